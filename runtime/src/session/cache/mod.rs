//! Keys and values of earlier tokens, held by the ranks of a group.

mod attend;
mod calls;
mod create;
mod holdings;
mod plans;
mod restore;

use std::ops::Range;

use kyklos_transport::Rank;

use crate::backend::{Backend, Device, DeviceBuffer, Extent, Layout};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
pub use calls::CachedCalls;
use holdings::Holdings;
use kyklos_plan::{Dtype, TokenRuns};

/// Keys and values of earlier tokens on the device of this rank, as one part of a cache that is
/// spread over the ranks of a group. [`Session::kv_cache`](super::Session::kv_cache) makes it,
/// [`Session::attend_cached`](super::Session::attend_cached) appends to it and attends to it. A
/// model with several layers has one for each layer.
///
/// A token has a *position*: the number of tokens that were appended before it. All ranks keep the
/// same record of which rank holds which position. Each call compares the records, the settings,
/// and at which operation of the session the cache was made, so that ranks which pass the caches of
/// different layers get an error.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use kyklos::backend::Device;
/// use kyklos::{Attention, CacheOptions, Dtype, Execution, Mask, Session, Tensor};
/// use kyklos_transport::in_process_group;
///
/// let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
/// let mut cache = session.kv_cache(CacheOptions::new([1, 2, 8], Dtype::F32))?;
/// let call = Attention::new().mask(Mask::causal()).execution(Execution::new().same_queries());
/// // A prompt of 5 tokens, then one new token at a time: 4 query heads, 2 heads of keys and values.
/// for tokens in [5, 1, 1] {
///     let q = Tensor::new([1, tokens, 4, 8], vec![0.5_f32; tokens * 4 * 8])?;
///     let kv = Tensor::new([1, tokens, 2, 8], vec![0.25_f32; tokens * 2 * 8])?;
///     let output = session.attend_cached(&call, &mut cache, &q, &kv, &kv)?;
///     assert_eq!(output.o.shape(), [1, tokens, 4, 8]);
/// }
/// assert_eq!(cache.len(), 7);
/// cache.truncate(6)?;
/// # }
/// # Ok::<(), kyklos::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    options: CacheOptions,
    device: Device,
    /// This rank.
    rank: Rank,
    /// The operation of its group in which the cache was made: two caches have different ones.
    made: u64,
    holdings: Holdings,
    /// Keys, values, `[batch, rows, heads, dim]`; none during a call and after one that was
    /// dropped.
    tensors: Option<[DeviceBuffer; 2]>,
    /// Rows of each batch entry of the tensors.
    rows: u32,
}

/// Settings of a [`KvCache`], the same on all ranks but [`Self::max_bytes`] and [`Self::share`].
///
/// ```
/// use kyklos::{CacheOptions, Dtype};
///
/// // 8 heads of 128 elements, at most 4 GiB on this rank, for a model with a window of 4096 tokens.
/// let options = CacheOptions::new([1, 8, 128], Dtype::Bf16).max_bytes(4 << 30).window(4096);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CacheOptions {
    batch: u32,
    heads: u32,
    dim: u32,
    dtype: Dtype,
    max_bytes: u64,
    share: f64,
    window: Option<u32>,
    rollback: u32,
    block: u32,
}

impl CacheOptions {
    /// A cache for keys and values of `shape` = `[batch, heads, dim]` for each token. No byte
    /// limit, no window, the same share on all ranks, in blocks of 256 tokens.
    pub fn new(shape: [u32; 3], dtype: Dtype) -> Self {
        let [batch, heads, dim] = shape;
        let max_bytes = u64::MAX;
        Self { batch, heads, dim, dtype, max_bytes, share: 1.0, window: None, rollback: 0, block: 256 }
    }

    /// Most bytes of the keys and values that this rank holds. A call for which the ranks have no
    /// room is refused, and the cache stays as it is. Growing needs the old and the new tensors
    /// at the same time.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: u64) -> Self {
        self.max_bytes = max_bytes;
        self
    }

    /// This rank's share of tokens that all ranks pass, relative to others; 1 by default, 0 for
    /// none.
    #[must_use]
    pub fn share(mut self, share: f64) -> Self {
        self.share = share;
        self
    }

    /// Queries see at most the last `keys` keys, their own included. Older ones are dropped, and
    /// their memory is used again. The calls need a mask with this window or a smaller one:
    /// `Mask::window(Some(keys - 1), Some(0))`.
    #[must_use]
    pub fn window(mut self, keys: u32) -> Self {
        self.window = Some(keys);
        self
    }

    /// With a window: how many tokens, kept besides, [`KvCache::truncate`] can take back.
    #[must_use]
    pub fn rollback(mut self, tokens: u32) -> Self {
        self.rollback = tokens;
        self
    }

    /// Of tokens that all ranks pass, so many consecutive ones go to one rank. Its first memory has
    /// room for a block, up to 256 tokens.
    #[must_use]
    pub fn block(mut self, tokens: u32) -> Self {
        self.block = tokens;
        self
    }

    /// Bytes of a key and its value, over the batch and all heads.
    fn token_bytes(&self) -> u64 {
        let extents = [self.batch, self.heads, self.dim].map(u64::from);
        extents.into_iter().fold(2 * self.dtype.bytes() as u64, u64::saturating_mul)
    }

    /// Tokens that a rank with these options can hold.
    fn most_tokens(&self) -> u32 {
        u32::try_from(self.max_bytes / self.token_bytes()).unwrap_or(u32::MAX / 2).min(u32::MAX / 2)
    }

    fn checked(&self) -> Result<()> {
        let extents = [self.batch, self.heads, self.dim, self.block, self.window.unwrap_or(1)];
        if extents.contains(&0) {
            return Err(Error::request(
                format!("{self}: one of these numbers is 0"),
                "use at least 1 for batch, heads, dim, block and window",
            ));
        }
        if !(self.share.is_finite() && self.share >= 0.0) {
            return Err(Error::request(
                format!("a share of {} in the tokens of a cache", self.share),
                "use a finite number from 0 on",
            ));
        }
        Ok(())
    }
}

/// As in `a cache of [1, tokens, 8, 128] in bf16, blocks of 256 tokens, a window of 4096 keys,
/// rollback 0`.
impl std::fmt::Display for CacheOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { batch, heads, dim, dtype, block, window, rollback, .. } = self;
        write!(f, "a cache of [{batch}, tokens, {heads}, {dim}] in {dtype}, blocks of {block} tokens")?;
        match window {
            Some(keys) => write!(f, ", a window of {keys} keys, rollback {rollback}"),
            None => f.write_str(", no window"),
        }
    }
}

impl KvCache {
    /// Of the settings and the record; caches with the same one have the same plans.
    fn digest(&self) -> u64 {
        let mut hash = blake3::Hasher::new();
        hash.update(&self.holdings.digest().to_le_bytes()).update(self.options.to_string().as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
        u64::from_le_bytes(first)
    }

    /// Number of tokens that were appended and not truncated: the position of the next token.
    pub fn len(&self) -> u32 {
        self.holdings.len()
    }

    /// Whether no token was appended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Positions that `rank` holds, in the order of its memory.
    pub fn tokens(&self, rank: Rank) -> TokenRuns {
        self.holdings.tokens(rank)
    }

    /// Bytes of this rank's keys and values on its device, room for more tokens included.
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows) * self.options.token_bytes()
    }

    /// Tokens whose keys were lost with their ranks, ascending: see [`Self::after_loss`].
    pub fn missing(&self) -> &TokenRuns {
        self.holdings.missing()
    }

    /// Takes back the tokens from position `len` on, as after a rejected speculation. All ranks do
    /// the same; the next call finds out if they do not. A `len` that is not below
    /// [`Self::len`] changes nothing. Frees no memory.
    ///
    /// # Errors
    /// [`Error::Request`] if later queries would see keys that were dropped behind the window:
    /// [`CacheOptions::rollback`].
    pub fn truncate(&mut self, len: u32) -> Result<()> {
        // What the next call drops, and a call that failed may have overwritten.
        self.holdings = self.kept_for(&self.holdings);
        let first = self.holdings.live().start;
        let needs = len.saturating_sub(self.options.window.map_or(len, |keys| keys - 1));
        if needs < first && needs < len {
            return Err(Error::request(
                format!(
                    "a cache truncated to {len} tokens, whose next query sees keys from position {needs} on: they are dropped before position {first}"
                ),
                "use a larger rollback (CacheOptions::rollback), or truncate fewer tokens",
            ));
        }
        self.holdings.truncate(len);
        Ok(())
    }

    /// The part of the cache that is left on this rank, in a new group of survivors
    /// ([`Transport::reform`](kyklos_transport::Transport::reform)): `ranks` has the former rank of
    /// each of them. The tokens of lost ranks are then [`missing`](Self::missing); calls are
    /// refused until [`Session::restore`](super::Session::restore) has their keys again, or they
    /// are truncated. The n-th of `ranks` is rank n of the new group; the list is the same on
    /// all survivors. The new session uses the same [`Device`] or a clone of
    /// it; `Device::cpu()` makes another one.
    ///
    /// # Errors
    /// [`Error::Request`] if this rank is not one of `ranks`, or a rank does not exist.
    pub fn after_loss(mut self, ranks: &[Rank]) -> Result<Self> {
        let known = |rank: &Rank| self.holdings.ranks().any(|other| other == *rank);
        let once = |rank: &Rank| ranks.iter().filter(|other| *other == rank).count() == 1;
        let mine = ranks.iter().position(|rank| *rank == self.rank);
        let (Some(mine), true) = (mine, ranks.iter().all(|rank| known(rank) && once(rank))) else {
            return Err(Error::request(
                format!("survivors {ranks:?} for the cache of rank {}", self.rank),
                "name the former ranks of all survivors, each once, this rank's among them",
            ));
        };
        self.holdings = self.kept_for(&self.holdings).of_ranks(ranks);
        self.rank = Rank(u32::try_from(mine).unwrap_or(u32::MAX));
        Ok(self)
    }

    /// The number of new keys; refuses keys that are not of this cache.
    fn count(&self, [k, v]: [&Tensor; 2]) -> Result<u32> {
        let CacheOptions { batch, heads, dim, dtype, .. } = self.options;
        let [k_batch, count, k_heads, k_dim] = k.shape();
        if [k_batch, k_heads, k_dim] != [batch, heads, dim].map(|extent| extent as usize)
            || [k.dtype(), v.dtype()] != [dtype; 2]
            || k.shape() != v.shape()
        {
            return Err(Error::request(
                format!(
                    "k of shape {:?} in {} and v of shape {:?} in {}, for a cache of [{batch}, tokens, {heads}, {dim}] in {dtype}",
                    k.shape(),
                    k.dtype(),
                    v.shape(),
                    v.dtype()
                ),
                "append keys and values of the shape and type of the cache",
            ));
        }
        if self.tensors.is_none() {
            return Err(dropped());
        }
        let count = u32::try_from(count).ok().filter(|count| self.len().checked_add(*count).is_some());
        count.ok_or_else(too_many)
    }

    /// New keys and values on the device.
    fn upload(&self, [k, v]: [&Tensor; 2]) -> Result<NewKeys> {
        let count = self.count([k, v])?;
        Ok(NewKeys { tensors: [k.buffer("k", &self.device)?, v.buffer("v", &self.device)?], count })
    }

    /// Copies new keys and values, `tokens` of them in this order, to the rows `rows` of this rank.
    fn write(&mut self, new: &NewKeys, tokens: &[Range<u32>], rows: &[Range<u32>]) -> Result<()> {
        let Some(tensors) = &mut self.tensors else { return Err(dropped()) };
        for (tokens, row) in side_by_side(tokens, rows) {
            for (from, into) in new.tensors.iter().zip(tensors.iter_mut()) {
                let source = (from, layout(&self.options, new.count, tokens.start));
                let target = (into, layout(&self.options, self.rows, row));
                self.device.repack(source, target, extent(&self.options, tokens.len()))?;
            }
        }
        Ok(())
    }

    /// Makes room for `rows` rows of each batch entry.
    fn grow(&mut self, rows: u32) -> Result<()> {
        let Some(tensors) = &mut self.tensors else { return Err(dropped()) };
        if rows <= self.rows {
            return Ok(());
        }
        let most = self.options.most_tokens();
        let doubled = rows
            .max(self.rows.saturating_mul(2))
            .max(self.options.block.min(MOST_ROUNDING))
            .min(most.max(rows));
        let alloc = |rows: u32| -> Result<[DeviceBuffer; 2]> {
            let bytes =
                usize::try_from(u64::from(rows) * self.options.token_bytes() / 2).unwrap_or(usize::MAX);
            Ok([self.device.alloc("cached keys", bytes)?, self.device.alloc("cached values", bytes)?])
        };
        let (mut grown, rows) = match alloc(doubled) {
            Ok(grown) => (grown, doubled),
            Err(Error::OutOfMemory { .. }) if doubled > rows => (alloc(rows)?, rows),
            Err(error) => return Err(error),
        };
        if self.rows > 0 {
            for (old, new) in tensors.iter().zip(&mut grown) {
                let source = (old, layout(&self.options, self.rows, 0));
                let target = (new, layout(&self.options, rows, 0));
                self.device.repack(source, target, extent(&self.options, self.rows as usize))?;
            }
        }
        (self.tensors, self.rows) = (Some(grown), rows);
        Ok(())
    }
}

/// The first tokens of a cache get room for a block, but for no more than so many tokens.
const MOST_ROUNDING: u32 = 256;

/// Keys and values that are to be appended, on the device: dense, `count` tokens.
struct NewKeys {
    tensors: [DeviceBuffer; 2],
    count: u32,
}

/// Ranges of `tokens` and the first of their rows: the n-th token goes to the n-th row.
fn side_by_side(tokens: &[Range<u32>], rows: &[Range<u32>]) -> Vec<(Range<u32>, u32)> {
    let (mut rows, mut parts) = (rows.iter().cloned(), Vec::new());
    let mut space = 0..0;
    for tokens in tokens {
        let mut tokens = tokens.clone();
        while !tokens.is_empty() {
            if space.is_empty() {
                space = rows.next().expect("a row for each token");
            }
            let count = tokens.end.min(tokens.start + (space.end - space.start)) - tokens.start;
            parts.push((tokens.start..tokens.start + count, space.start));
            (tokens.start, space.start) = (tokens.start + count, space.start + count);
        }
    }
    parts
}

/// The rows from `first` on of a tensor with `rows` rows for each batch entry, in bytes.
fn layout(options: &CacheOptions, rows: u32, first: u32) -> Layout {
    let head_stride = options.dim as usize * options.dtype.bytes();
    let row_stride = options.heads as usize * head_stride;
    Layout {
        offset: first as usize * row_stride,
        batch_stride: rows as usize * row_stride,
        row_stride,
        head_stride,
    }
}

fn extent(options: &CacheOptions, rows: usize) -> Extent {
    Extent {
        batch: options.batch as usize,
        rows,
        heads: options.heads as usize,
        row_bytes: options.dim as usize * options.dtype.bytes(),
    }
}

fn too_many() -> Error {
    Error::request("more tokens in a cache than it has positions", format!("use at most {}", u32::MAX / 2))
}

fn dropped() -> Error {
    Error::request(
        "a cache whose tensors were lost in a call that was dropped before its end",
        "make a new cache, and append its tokens again",
    )
}
