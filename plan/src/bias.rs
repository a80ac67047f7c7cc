//! Tensors over (query, key) pairs or over keys, for masks and biases that are not a function of
//! positions.

use bytes::Bytes;

use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// A tensor that hides keys, or is added to the logits after a softcap. Its columns are key
/// positions.
///
/// | `shared_rows` | shape in memory | each rank holds |
/// |---|---|---|
/// | `false` | `[batch, q_len, heads, kv_len]` | the rows of its own queries |
/// | `true` | `[batch, 1, heads, kv_len]` | the whole tensor, the same bytes on all ranks; it is never sent |
///
/// A key mask of any pattern for each batch entry, `[batch, kv_len]`:
///
/// ```
/// use kyklos_plan::{AttentionProblem, BiasKind, BiasTensor, Dtype, Mask};
///
/// let keys = BiasTensor { kind: BiasKind::Mask, batch: 2, heads: 1, shared_rows: true };
/// let problem = AttentionProblem::new([2, 40, 8, 2, 64], Dtype::F16, Mask::causal())?.with_bias(Some(keys))?;
/// // Entry 0 hides every third key, entry 1 hides the first seven keys.
/// let visible = |entry: u32| (0..40).map(move |key| if entry == 0 { key % 3 != 0 } else { key >= 7 });
/// let rows: Vec<u32> = (0..2).flat_map(|entry| BiasTensor::pack(visible(entry))).collect();
/// assert_eq!(rows.len() * 4, 2 * keys.row_bytes(Dtype::F16, problem.kv_len));
/// # Ok::<(), kyklos_plan::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct BiasTensor {
    /// Whether it hides keys or is added to logits.
    pub kind: BiasKind,
    /// Batch entries: the problem's, or 1 that serves all.
    pub batch: u32,
    /// Query heads: the problem's, or 1 that serves all.
    pub heads: u32,
    /// Whether all queries share one row of each batch entry and head.
    // Left out where it is false, so that tensors with a row for each query hash as in releases without it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shared_rows: bool,
}

/// The effect of a [`BiasTensor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BiasKind {
    /// A query does not see a key whose bit is 0. One bit for each key: bit `k % 32` of word `k /
    /// 32` of a row of whole 32-bit words.
    #[serde(rename = "visible")]
    Mask,
    /// Added to the logit, in the problem's dtype; −∞ hides the key. A row of 2-byte elements is
    /// padded to whole 32-bit words. Below −1e38 it counts as −1e38, which f32 can still scale.
    Additive,
}

impl BiasTensor {
    /// Bytes of one row of one head.
    pub fn row_bytes(self, dtype: Dtype, kv_len: u32) -> usize {
        match self.kind {
            BiasKind::Mask => (kv_len as usize).div_ceil(32) * 4,
            BiasKind::Additive => (kv_len as usize * dtype.bytes()).next_multiple_of(4),
        }
    }

    /// Elements of one row of one head as a kernel counts them: words of [`BiasKind::Mask`],
    /// numbers of [`BiasKind::Additive`], padding included.
    pub fn row_elements(self, dtype: Dtype, kv_len: u32) -> usize {
        match self.kind {
            BiasKind::Mask => self.row_bytes(dtype, kv_len) / 4,
            BiasKind::Additive => self.row_bytes(dtype, kv_len) / dtype.bytes(),
        }
    }

    /// Bytes of the rows of `queries` queries: all batch entries and heads. With shared rows, of
    /// the whole tensor.
    pub fn bytes(self, dtype: Dtype, queries: u32, kv_len: u32) -> u64 {
        let rows = if self.shared_rows { 1 } else { u64::from(queries) };
        u64::from(self.batch) * rows * u64::from(self.heads) * self.row_bytes(dtype, kv_len) as u64
    }

    /// Bytes of the gradient of `rows` rows, which is f32 without padding: all batch entries and
    /// heads.
    pub(crate) fn gradient_bytes(self, rows: u32, kv_len: u32) -> u64 {
        u64::from(self.batch) * u64::from(rows) * u64::from(self.heads) * u64::from(kv_len) * 4
    }

    /// A row of [`BiasKind::Mask`] from one bool for each key.
    pub fn pack(visible: impl IntoIterator<Item = bool>) -> Vec<u32> {
        let mut words = Vec::new();
        for (key, visible) in visible.into_iter().enumerate() {
            if key % 32 == 0 {
                words.push(0);
            }
            if let (true, Some(word)) = (visible, words.last_mut()) {
                *word |= 1 << (key % 32);
            }
        }
        words
    }

    /// A key mask `[batch, keys]` for all heads and queries: the tensor and its bytes, for
    /// `kyklos::Attention::bias`. `visible` has one bool for each key of each batch entry; false
    /// hides the key.
    ///
    /// ```
    /// use kyklos_plan::BiasTensor;
    ///
    /// // Entry 0 sees its first 3 keys of 5, entry 1 the even ones.
    /// let visible = [true, true, true, false, false, true, false, true, false, true];
    /// let (tensor, rows) = BiasTensor::key_mask(2, &visible)?;
    /// assert_eq!((tensor.batch, tensor.heads, rows.len()), (2, 1, 8)); // a word of 32 bits for each entry
    /// # Ok::<(), kyklos_plan::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Request`] if `visible` cannot be divided by `batch`.
    pub fn key_mask(batch: u32, visible: &[bool]) -> Result<(Self, Bytes)> {
        let keys =
            visible.len().checked_div(batch as usize).filter(|keys| keys * batch as usize == visible.len());
        let Some(keys) = keys else {
            return Err(Error::request(
                format!("a key mask of {} bools for {batch} batch entries", visible.len()),
                "give one bool for each key of each batch entry",
            ));
        };
        let rows = visible.chunks(keys.max(1)).flat_map(|row| Self::pack(row.iter().copied()));
        let bytes: Vec<u8> = rows.flat_map(u32::to_ne_bytes).collect();
        Ok((Self { kind: BiasKind::Mask, batch, heads: 1, shared_rows: true }, bytes.into()))
    }

    /// Refuses the part of `rank`, which has these rows and keys, where the rank has `queries` and
    /// all ranks together `kv_len` keys.
    pub fn axes_fit(self, rank: usize, [rows, keys]: [u32; 2], queries: u32, kv_len: u32) -> Result<()> {
        let Self { batch, heads, shared_rows, .. } = self;
        let (name, wanted, tokens) = match shared_rows {
            true => ("key bias", 1, String::new()),
            false => ("bias", queries, format!("tokens {rows}, ")),
        };
        let shape = format!("[batch {batch}, {tokens}heads {heads}, keys {keys}]");
        let (axis, has, call, remedy) = if rows != wanted {
            (
                "tokens",
                rows,
                format!("rank {rank} has {wanted} queries"),
                "give it a row for each query of the rank",
            )
        } else if keys != kv_len {
            let remedy = "give it all keys of the call, those of other ranks and of a cache too";
            ("keys", keys, format!("the call has {kv_len} keys over all ranks"), remedy)
        } else {
            return Ok(());
        };
        Err(Error::request(
            format!("the {name} of rank {rank}, {shape}, has {has} {axis}, and {call}"),
            remedy,
        ))
    }

    /// Refuses extents that are neither 1 nor the problem's.
    pub(crate) fn fits(self, batch: u32, q_heads: u32, kv_len: u32) -> Result<()> {
        if ![1, batch].contains(&self.batch) || ![1, q_heads].contains(&self.heads) {
            return Err(Error::request(
                format!(
                    "an attention bias tensor of {} batch entries and {} heads for {batch} and {q_heads}",
                    self.batch, self.heads
                ),
                "give it the problem's batch entries and query heads, or 1 for all",
            ));
        }
        if kv_len == 0 {
            return Err(Error::request(
                "an attention bias tensor over no keys",
                "leave it out, or give keys",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_whole_words_and_bits_count_from_the_lowest() {
        let tensor = |kind| BiasTensor { kind, batch: 1, heads: 1, shared_rows: false };
        let visible = tensor(BiasKind::Mask);
        assert_eq!([1, 32, 33].map(|keys| visible.row_bytes(Dtype::F16, keys)), [4, 4, 8]);
        let bias = tensor(BiasKind::Additive);
        assert_eq!([1, 2, 3].map(|keys| bias.row_bytes(Dtype::Bf16, keys)), [4, 4, 8]);
        assert_eq!(bias.row_elements(Dtype::F16, 3), 4);
        assert_eq!(bias.row_bytes(Dtype::F32, 3), 12);
        assert_eq!(bias.bytes(Dtype::F32, 5, 3), 5 * 12);
        assert_eq!(BiasTensor { shared_rows: true, ..bias }.bytes(Dtype::F32, 5, 3), 12);
        assert_eq!(BiasTensor::pack((0..34).map(|key| key == 1 || key >= 31)), [0x8000_0002, 3]);
    }

    #[test]
    fn axes_are_those_of_the_call_and_not_of_as_many_bytes() {
        let tensor = BiasTensor { kind: BiasKind::Mask, batch: 1, heads: 2, shared_rows: false };
        assert!(tensor.axes_fit(1, [5, 33], 5, 33).is_ok());
        let error = |axes| tensor.axes_fit(1, axes, 5, 33).unwrap_err().to_string();
        let keys =
            "the bias of rank 1, [batch 1, tokens 5, heads 2, keys 34], has 34 keys, and the call has 33";
        assert!(error([5, 34]).contains(keys), "{}", error([5, 34]));
        assert_eq!(
            tensor.bytes(Dtype::F32, 5, 34),
            tensor.bytes(Dtype::F32, 5, 33),
            "which bytes do not tell"
        );
        assert!(error([4, 33]).contains("has 4 tokens, and rank 1 has 5 queries"), "{}", error([4, 33]));
        let shared = BiasTensor { shared_rows: true, ..tensor };
        assert!(shared.axes_fit(0, [1, 33], 5, 33).is_ok());
        assert!(
            shared.axes_fit(0, [1, 20], 5, 33).unwrap_err().to_string().contains("the key bias of rank 0")
        );
    }

    #[test]
    fn a_key_mask_has_a_row_of_whole_words_for_each_entry() {
        let visible: Vec<bool> = (0..66).map(|index| index % 33 == 32 || index == 1).collect();
        let (tensor, rows) = BiasTensor::key_mask(2, &visible).unwrap();
        assert_eq!(rows.len() as u64, tensor.bytes(Dtype::F32, 7, 33));
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&rows);
        assert_eq!(words, [2, 1, 0, 1]);
        assert!(BiasTensor::key_mask(2, &[true; 3]).is_err());
        assert!(BiasTensor::key_mask(0, &[]).is_err());
    }

    #[test]
    fn the_hash_of_a_tensor_with_a_row_for_each_query_is_that_of_earlier_releases() {
        let tensor = BiasTensor { kind: BiasKind::Mask, batch: 2, heads: 1, shared_rows: false };
        let json = |tensor| serde_json::to_string(&tensor).unwrap();
        assert_eq!(json(tensor), r#"{"kind":"visible","batch":2,"heads":1}"#);
        let shared = BiasTensor { shared_rows: true, ..tensor };
        assert_eq!(json(shared), r#"{"kind":"visible","batch":2,"heads":1,"shared_rows":true}"#);
    }
}
