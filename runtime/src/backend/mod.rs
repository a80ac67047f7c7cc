//! The seam between plans and devices.
//!
//! # Contract
//!
//! - **Who validates.** The layer above: descriptors are in bounds and of the right type when they get here.
//!   What a backend must find out itself is what only it can know: memory that is not there, a device that is lost.
//! - **Order.** Operations on one backend take effect in the order of the calls. A buffer that is dropped while the
//!   device still uses it stays alive underneath until the device is done.
//! - **Blocking.** No method blocks on the device. `attend` works through its block in pieces of at most about
//!   100 ms; between two pieces it looks at [`Control`] and lets other futures of its task run. It may resolve
//!   before the last pieces are done; [`Backend::wait`] ends when everything submitted so far is.
//! - **Errors.** A device failure surfaces at the call or at any later call, at the latest at `wait`.
//! - **Non-finite values.** NaN and ∞ in q, k, v reach exactly the rows that see them. A NaN or ∞ in a key or value
//!   that a row cannot see leaves that row bit for bit as it was.
//!   A row whose every visible logit is −∞ has seen nothing: `o = 0`, `lse = −∞`.
//!
//! # Running state
//!
//! For each query row and head: the largest logit so far `m` (natural-log units), `l = Σ exp(x − m)`, and the
//! un-normalised `a = Σ exp(x − m)·v`, all f32. `ml` is `[batch, heads, rows, 2]` (m then l), `a` is
//! `[batch, rows, heads, dim]`. Nothing seen yet is `m = `[`EMPTY_M`], `l = 0`, `a = 0`. Two states of disjoint key
//! sets merge as `m = max(m₁, m₂)`, `l = l₁e^{m₁−m} + l₂e^{m₂−m}`, `a` likewise (Milakov & Gimelshein 2018, §3.1).
//! Where one of them has seen nothing the result is the other one, bit for bit but for the sign of zeros, which
//! `finalize` takes away: [`fixed order`](crate::AttentionProblem::fixed_order) rests on it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use kyklos_transport::Pulse;

use crate::{AttentionProblem, BiasKind, BlockWork, Dtype, Error, Result, TileShape};

#[cfg(feature = "cpu")]
pub mod cpu;
#[cfg(feature = "wgpu")]
pub mod wgpu;

/// `m` of a row that has seen no key: finite, because WGSL promises nothing about infinities.
pub const EMPTY_M: f32 = -0.7 * f32::MAX;

/// A device that can do the few things a plan asks for.
#[expect(
    async_fn_in_trait,
    reason = "no Send bound on purpose: each rank drives its own future on its own thread"
)]
pub trait Backend {
    /// Linear memory on the device.
    type Buffer: fmt::Debug;
    /// Ends with the bytes on the host.
    type Download: Future<Output = Result<Bytes>> + 'static;

    /// What this device is.
    fn info(&self) -> &DeviceInfo;

    /// The tiles in which this backend wants [`BlockWork`] for a call of [`Self::attend`] of `problem` on a state of this
    /// shape.
    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape;

    /// `bytes` of memory with unspecified contents; `label` names it in errors and debuggers.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the bytes asked and allowed, before the device is touched.
    fn alloc(&self, label: &str, bytes: usize) -> Result<Self::Buffer>;

    /// A new buffer that holds `data`. Host backends may keep `data` itself.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    fn upload(&self, label: &str, data: Bytes) -> Result<Self::Buffer>;

    /// Overwrites `buffer` from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn write(&self, buffer: &mut Self::Buffer, offset: usize, data: &[u8]) -> Result<()>;

    /// Starts copying `range` (bytes) to the host: what the buffer holds now, whatever is submitted afterwards.
    /// Takes the buffer mutably so that a host backend can share the memory instead of copying it.
    fn download(&self, buffer: &mut Self::Buffer, range: std::ops::Range<usize>) -> Self::Download;

    /// Makes a running state that has seen nothing.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn reset_state(&self, state: &mut StateMut<'_, Self::Buffer>) -> Result<()>;

    /// Attention of one block of queries against one block of keys, into a running state.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the control's cancel token rises between two pieces, [`Error::Device`].
    async fn attend(&self, args: Attend<'_, Self::Buffer>, control: &Control) -> Result<()>;

    /// Merges the state `from` into `into`; both are of the same rows and heads and of disjoint keys.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn merge(&self, into: &mut StateMut<'_, Self::Buffer>, from: &State<'_, Self::Buffer>) -> Result<()>;

    /// `o = a / l` rounded to `dtype` and `lse = m + ln l`; a row that saw no key gets `o = 0`, `lse = −∞`.
    ///
    /// `sinks` are finite, one for each head of the state, or none. A sink `s` is a key with this logit and the value 0:
    /// `l` becomes `l + exp(s − m)`, and a row that saw no key gets `o = 0`, `lse = s`. It enters here and nowhere else,
    /// so that it counts once however many states were merged.
    ///
    /// `o` is `[batch, rows, heads, dim]`, `lse` is f32 `[batch, rows, heads]`: token-major like `o`, so that a range
    /// of tokens is one piece of both.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn finalize(
        &self,
        state: &State<'_, Self::Buffer>,
        sinks: &[f32],
        dtype: Dtype,
        o: &mut Self::Buffer,
        lse: &mut Self::Buffer,
    ) -> Result<()>;

    /// Copies `extent` rows between two strided layouts (rows of `extent.row_bytes`, a multiple of 4): packing for a
    /// message, unpacking from one, and the piece that a rank keeps.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn repack(
        &self,
        from: (&Self::Buffer, Layout),
        into: (&mut Self::Buffer, Layout),
        extent: Extent,
    ) -> Result<()>;

    /// `into` = `from` in another form: a dense tensor of `shape` = `[batch, tokens, heads, dim]`. Either both are
    /// [`Elements::Stored`] and one of the two types is f32, or just one is [`Elements::Coded`].
    ///
    /// Rounded to nearest, ties to even; what is beyond a storage type becomes ±∞. Codes may round the other way where a
    /// division that is off by an ulp puts an element on the other side of a tie: an element comes back within half a scale
    /// of itself, and an ulp.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn convert(
        &self,
        from: Elements<&Self::Buffer>,
        into: Elements<&mut Self::Buffer>,
        shape: [usize; 4],
    ) -> Result<()>;

    /// Ends when everything submitted so far is done.
    ///
    /// # Errors
    /// [`Error::Device`]: also what surfaced late.
    async fn wait(&self) -> Result<()>;
}

/// What a device is, for tables and for choosing.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// `cpu`, `wgpu` or `cuda`.
    pub backend: &'static str,
    /// The device's own name.
    pub name: String,
    /// Driver or instruction set, for reports.
    pub driver: String,
    /// Kind of device.
    pub class: DeviceClass,
    /// Kernel variant in use, for reports.
    pub kernel: String,
}

/// Kind of device, in the order in which one is preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceClass {
    /// A GPU with memory of its own.
    DiscreteGpu,
    /// A GPU that shares the host's memory.
    IntegratedGpu,
    /// A GPU behind a hypervisor, or of unknown kind.
    OtherGpu,
    /// The host's cores.
    Cpu,
    /// A graphics driver that computes on the host's cores.
    SoftwareGpu,
}

/// A tensor `[batch, rows, heads, dim]` inside a buffer; the elements of one head of one row are adjacent.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a, Buffer> {
    /// Where it lives.
    pub buffer: &'a Buffer,
    /// How it lies there, in elements of its storage type.
    pub layout: Layout,
}

/// Element offsets of a strided `[batch, rows, heads, ·]` tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Element (bytes in [`Backend::repack`]) at which (0, 0, 0) starts.
    pub offset: usize,
    /// Distance between batch entries.
    pub batch_stride: usize,
    /// Distance between rows.
    pub row_stride: usize,
    /// Distance between heads.
    pub head_stride: usize,
}

/// Where the elements of a dense tensor `[batch, tokens, heads, dim]` are, and in which form.
#[derive(Clone, Copy, Debug)]
pub enum Elements<Buffer> {
    /// In a storage type.
    Stored {
        /// Where they live.
        buffer: Buffer,
        /// The element of the buffer with which the tensor begins; a multiple of 8.
        first: usize,
        /// The type.
        dtype: Dtype,
    },
    /// As [`WireFormat::Int8`](crate::WireFormat::Int8) says, from the beginning of both buffers.
    Coded {
        /// 8-bit codes in two's complement, `[batch, tokens, heads, dim]`.
        codes: Buffer,
        /// f32 scales.
        scales: Buffer,
        /// What shares one.
        of: Scales,
    },
}

/// What shares a scale in [`Elements::Coded`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// [`TOKENS_PER_SCALE`](crate::TOKENS_PER_SCALE) tokens of a channel: `[batch, ⌈tokens / 64⌉, heads, dim]`.
    Channels,
    /// The elements of one head of one token: `[batch, tokens, heads]`.
    Rows,
}

/// How much [`Backend::repack`] copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Adjacent bytes of one head of one row.
    pub row_bytes: usize,
}

/// A dense running state, to be read.
#[derive(Debug)]
pub struct State<'a, Buffer> {
    /// f32 `[batch, rows, heads, dim]`.
    pub a: &'a Buffer,
    /// f32 `[batch, heads, rows, 2]`.
    pub ml: &'a Buffer,
    /// Extents of the state.
    pub shape: StateShape,
}

/// A dense running state, to be changed.
#[derive(Debug)]
pub struct StateMut<'a, Buffer> {
    /// f32 `[batch, rows, heads, dim]`.
    pub a: &'a mut Buffer,
    /// f32 `[batch, heads, rows, 2]`.
    pub ml: &'a mut Buffer,
    /// Extents of the state.
    pub shape: StateShape,
}

/// Extents of a running state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Batch entries.
    pub batch: usize,
    /// Query rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
}

impl StateShape {
    /// Bytes of `a`.
    pub fn a_bytes(self) -> usize {
        self.batch * self.rows * self.heads * self.dim * 4
    }

    /// Bytes of `ml`.
    pub fn ml_bytes(self) -> usize {
        self.batch * self.rows * self.heads * 2 * 4
    }
}

/// One Q block against one KV block.
#[derive(Debug)]
pub struct Attend<'a, Buffer> {
    /// Storage type of q, k and v.
    pub dtype: Dtype,
    /// Factor on q·k.
    pub scale: f32,
    /// `Some(c)`: logits become `c · tanh(logit / c)`.
    pub softcap: Option<f32>,
    /// `[batch, q rows, q heads, dim]`.
    pub q: Operand<'a, Buffer>,
    /// `[batch, kv rows, kv heads, dim]`.
    pub k: Operand<'a, Buffer>,
    /// `[batch, kv rows, kv heads, dim]`.
    pub v: Operand<'a, Buffer>,
    /// For each query head of `q`, the head of `k` and `v` that it attends to.
    pub kv_head_of: &'a [u32],
    /// What the queries see of the keys, in this backend's tiles. Rows: `work.classes[..].rows`; keys: `work.kv_positions`.
    pub work: &'a BlockWork,
    /// A tensor over the pairs of these rows and of all key positions, which hides keys or is added to logits.
    pub pairs: Option<Pairs<'a, Buffer>>,
    /// Whether each row must get the same bytes whatever rows are computed with it, and on whatever mesh: no kernel may be
    /// chosen by the number of rows, nor keys be divided by it.
    pub fixed_order: bool,
    /// The running state of exactly these rows and heads.
    pub state: StateMut<'a, Buffer>,
}

/// Rows of a [`BiasTensor`](crate::BiasTensor): `[batch, q rows, q heads, key positions]`. Columns are positions, not
/// places in a block of keys.
#[derive(Clone, Copy, Debug)]
pub struct Pairs<'a, Buffer> {
    /// What it does.
    pub kind: BiasKind,
    /// Where it lives.
    pub buffer: &'a Buffer,
    /// How it lies there, in 32-bit words of [`BiasKind::Mask`], in elements of [`BiasKind::Additive`]. A stride of 0
    /// serves all batch entries, or all heads, alike.
    pub layout: Layout,
}

/// How the outside reaches into a long computation, and looks at it.
#[derive(Clone, Debug, Default)]
pub struct Control {
    /// Raised from outside: give up between two pieces.
    cancel: Arc<AtomicBool>,
    /// Pieces done so far.
    pieces: Arc<AtomicU64>,
    /// Beats with every piece.
    pulse: Arc<Pulse>,
}

impl Control {
    /// A control that is cancelled when `cancel` rises.
    pub fn new(cancel: Arc<AtomicBool>) -> Self {
        Self { cancel, ..Self::default() }
    }

    /// A control that beats `pulse` at every piece too.
    pub fn beating(self, pulse: Arc<Pulse>) -> Self {
        Self { pulse, ..self }
    }

    /// Called by backends between two pieces.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the token has risen.
    pub fn piece_done(&self) -> Result<()> {
        self.pieces.fetch_add(1, Ordering::Relaxed);
        self.pulse.beat();
        if self.cancel.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Pieces done so far, over all calls with this control.
    pub fn pieces_done(&self) -> u64 {
        self.pieces.load(Ordering::Relaxed)
    }
}

/// Lets other futures of the same task run once; backends call it between pieces.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return std::task::Poll::Ready(());
        }
        context.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}
