//! The interface between the executor and devices.
//!
//! # Contract
//!
//! - **Validation.** The caller validates: descriptors that arrive here are in bounds and of the
//!   right type. A backend reports only failures that it alone can find: memory that the device
//!   cannot give, a device that is lost.
//! - **Order.** Operations on one backend take effect in the order of the calls. A buffer that is
//!   dropped while the device still uses it stays alive underneath until the device is done.
//! - **Blocking.** No method blocks on the device. `attend` works through its block in pieces of at
//!   most about 100 ms, or of half a second on a slow device that a shorter piece would not fill;
//!   between two pieces it checks [`Control`] and lets other futures of its task run. It may
//!   resolve before the last pieces are done; [`Backend::wait`] ends when all submitted work is
//!   done.
//! - **Errors.** A device failure is returned by the call or by a later call, at the latest by
//!   `wait`.
//! - **Non-finite values.** NaN and ∞ in q, k, v reach exactly the rows that see them. A NaN or ∞
//!   in a key or value that a row cannot see does not change a bit of that row. A row whose visible
//!   logits are all −∞ counts as a row that saw no key: `o = 0`, `lse = −∞`.
//!
//! The crate `kyklos-backend-suite` (`tests/backend-suite/`) holds a backend in any crate to this
//! contract. Its `DoNothing` is where a new backend starts.
//!
//! # Running state
//!
//! For each query row and head: the largest logit so far `m` (natural-log units), `l = Σ exp(x −
//! m)`, and the un-normalised `a = Σ exp(x − m)·v`, all f32. `ml` is `[batch, heads, rows, 2]` (m
//! then l), `a` is `[batch, rows, heads, dim]`. The empty state, of a row that saw no key, is `m =
//! `[`EMPTY_M`], `l = 0`, `a = 0`. Two states of disjoint key sets merge as `m = max(m₁, m₂)`, `l =
//! l₁e^{m₁−m} + l₂e^{m₂−m}`, `a` likewise (Milakov & Gimelshein 2018, §3.1). Where one of them is
//! empty the result is the other one, bit for bit except for the sign of zeros, which `finalize`
//! normalises: [`fixed order`](crate::AttentionProblem::fixed_order) relies on it.

use std::fmt;
use std::future::Future;

use bytes::Bytes;

use crate::error::{Error, Result};
use kyklos_plan::{AttentionProblem, Dtype, TileShape};

mod arguments;
mod control;
#[cfg(feature = "cpu")]
pub mod cpu;
mod device;
mod erased;
mod gradients;
mod info;
mod short_work;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use arguments::{
    Accuracy, Attend, BiasInput, Elements, Extent, Layout, Operand, Results, Scales, State, StateMut,
    StateShape,
};
pub use control::{Control, yield_now};
pub use device::{Device, DeviceBuffer, Threaded};
pub use gradients::{AttendBackward, BiasGradient, RowStats};
pub use info::{DeviceClass, DeviceInfo, KernelTime};
pub use short_work::ShortWork;

/// `m` of a row that saw no key: finite, because WGSL promises nothing about infinities.
pub const EMPTY_M: f32 = -0.7 * f32::MAX;

/// The operations that plans need of a device. The contract of all of them is in the
/// [module](self).
#[expect(
    async_fn_in_trait,
    reason = "no Send bound on purpose: each rank drives its own future on its own thread"
)]
pub trait Backend {
    /// Linear memory on the device.
    type Buffer: fmt::Debug;
    /// Ends with the bytes in host memory.
    type Download: Future<Output = Result<Bytes, Error>> + 'static;

    /// Name, driver and kind of the device.
    fn info(&self) -> &DeviceInfo;

    /// Refuses a problem for which the device has no kernel. Called before ranks vote, so that no
    /// data moves.
    ///
    /// # Errors
    /// [`Error::Request`].
    fn supports(&self, _dtype: Dtype, _head_dim: usize) -> Result<()> {
        Ok(())
    }

    /// Most bytes of m and l, or of the log-sum-exp, of a running state that the device's kernels
    /// read; `None`: any. Ranks tell it with their votes, so that no data moves for a larger one.
    fn most_state_bytes(&self) -> Option<u64> {
        None
    }

    /// Refuses sums in a fixed order ([`AttentionProblem::fixed_order`]) if the device's kernels
    /// cannot give them. Called before ranks vote.
    ///
    /// # Errors
    /// [`Error::Request`].
    fn supports_fixed_order(&self) -> Result<()> {
        Ok(())
    }

    /// How far the kernels may be off, beyond f32 arithmetic.
    fn accuracy(&self, _dtype: Dtype) -> Accuracy {
        Accuracy::F32
    }

    /// Name of the kernel that attends into a state of this shape, for reports.
    fn kernel(&self, _dtype: Dtype, _shape: StateShape) -> String {
        self.info().kernel.clone()
    }

    /// The tiles of the [`BlockWork`](crate::BlockWork) that [`Self::attend`] takes for `problem`
    /// and a state of this shape.
    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape;

    /// Allocates `bytes` bytes with unspecified contents; `label` names them in errors and
    /// debuggers.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the bytes asked and allowed, before the device is touched.
    fn alloc(&self, label: &str, bytes: usize) -> Result<Self::Buffer>;

    /// A new buffer that holds `data`. Host backends may keep `data` itself.
    ///
    /// # Errors
    /// As [`Self::alloc`].
    fn upload(&self, label: &str, data: Bytes) -> Result<Self::Buffer>;

    /// Overwrites `buffer` from byte `offset` on. GPU backends take whole 32-bit words.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn write(&self, buffer: &mut Self::Buffer, offset: usize, data: &[u8]) -> Result<()>;

    /// Another handle of the same memory, which lives until the last handle is dropped. Neither
    /// handle is written from then on: the caller only reads, as it does with its inputs.
    fn share(&self, buffer: &mut Self::Buffer) -> Self::Buffer;

    /// Frees memory that the backend keeps for later calls. Called when a session ends.
    fn release_idle(&self) {}

    /// Starts to copy `range` (bytes) to the host: the present contents, without the effects of
    /// work that is submitted later.
    /// Takes the buffer mutably so that a host backend can share the memory instead of copying it.
    fn download(&self, buffer: &mut Self::Buffer, range: std::ops::Range<usize>) -> Self::Download;

    /// Makes a running state empty.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn reset_state(&self, state: &mut StateMut<'_, Self::Buffer>) -> Result<()>;

    /// Attention of one block of queries against one block of keys, into a running state.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the control's cancel flag is set between two pieces,
    /// [`Error::Device`].
    async fn attend(&self, args: Attend<'_, Self::Buffer>, control: &Control) -> Result<()>;

    /// Merges the state `from` into `into`; both are of the same rows and heads and of disjoint
    /// keys.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn merge(&self, into: &mut StateMut<'_, Self::Buffer>, from: &State<'_, Self::Buffer>) -> Result<()>;

    /// `o = a / l` rounded to `dtype` and `lse = m + ln l`; a row that saw no key gets `o = 0`,
    /// `lse = −∞`.
    ///
    /// `sinks` are finite, one for each head of the state, or none. A sink `s` is a key with this
    /// logit and the value 0: `l` becomes `l + exp(s − m)`, and a row that saw no key gets `o =
    /// 0`, `lse = s`. Sinks enter only here, so each counts once, for any number of merged
    /// states.
    ///
    /// `o` is `[batch, rows, heads, dim]`, `lse` is f32 `[batch, rows, heads, 2]`: token-major like
    /// `o`, so that a range of tokens is one piece of both. Its two numbers are the log-sum-exp
    /// rounded to f32, and the rest: `ln l − (lse − m)`. Beyond 10⁷ the first alone is `m`,
    /// whatever `l` is. The rest is 0 where the first is −∞, and any number where it is NaN.
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

    /// [`Self::attend`] and then [`Self::finalize`], as one operation, for the last block of a
    /// state of which nothing but the results is wanted: its contents are unspecified
    /// afterwards. Kernels that do both save writing and reading it.
    ///
    /// # Errors
    /// As [`Self::attend`].
    async fn attend_and_finalize(
        &self,
        args: Attend<'_, Self::Buffer>,
        results: Results<'_, Self::Buffer>,
        control: &Control,
    ) -> Result<()> {
        let (dtype, StateMut { a, ml, shape }) = (args.dtype, args.state);
        let state = StateMut { a: &mut *a, ml: &mut *ml, shape };
        self.attend(Attend { state, ..args }, control).await?;
        let Results { sinks, o, lse } = results;
        self.finalize(&State { a, ml, shape }, sinks, dtype, o, lse)
    }

    /// Copies `extent` rows between two strided layouts (rows of `extent.row_bytes`, a multiple of
    /// 4). Used to pack a message, to unpack a message, and to copy the piece that stays on the
    /// rank.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn repack(
        &self,
        from: (&Self::Buffer, Layout),
        into: (&mut Self::Buffer, Layout),
        extent: Extent,
    ) -> Result<()>;

    /// `into` = `from` in another form: a dense tensor of `shape` = `[batch, tokens, heads, dim]`.
    /// Either both are [`Elements::Stored`] and one of the two types is f32, or just one is
    /// [`Elements::Coded`].
    ///
    /// Rounded to nearest, ties to even; values beyond the range of a storage type become ±∞. A
    /// code may round the other way if a division that is off by an ulp puts the element on the
    /// other side of a tie. A converted element differs from the original by at most half a
    /// scale and an ulp.
    ///
    /// From f32 to f16, the first 32-bit word of `overflow` becomes 1 if a finite element becomes
    /// ±∞, and stays as it is otherwise. Other conversions leave it alone. Its size is a
    /// multiple of 16 bytes.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn convert(
        &self,
        from: Elements<&Self::Buffer>,
        into: Elements<&mut Self::Buffer>,
        shape: [usize; 4],
        overflow: Option<&mut Self::Buffer>,
    ) -> Result<()>;

    /// Refuses a backward pass for which the device has no kernel. Called before ranks vote, so
    /// that no data moves. A backend that accepts one has all operations that follow.
    ///
    /// # Errors
    /// [`Error::Request`].
    fn supports_backward(&self, _dtype: Dtype, _head_dim: usize) -> Result<()> {
        Err(no_backward(self.info()))
    }

    /// Refuses the gradient of an additive bias ([`AttendBackward::d_bias`]) if the device has no
    /// kernel for it.
    ///
    /// # Errors
    /// [`Error::Request`].
    fn supports_bias_gradient(&self) -> Result<()> {
        Err(no_bias_gradient(self.info()))
    }

    /// The tiles of the [`BlockWork`](crate::BlockWork) that [`Self::attend_backward`] takes for
    /// `problem` and queries of this shape.
    fn backward_tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        self.tile_shape(problem, shape)
    }

    /// What a backward pass needs to know of each row of the forward pass: its log-sum-exp, and
    /// `δ = Σ d_o · o − d_lse` (Dao 2023, arXiv 2307.08691, §3.1.2).
    ///
    /// The four numbers of a row are the first number of its log-sum-exp, the factor e^−rest, δ,
    /// and the rest. Where the log-sum-exp is −∞ they are −[`EMPTY_M`], 1, 0, 0, and the
    /// gradients of the row are 0 whatever `d_o` and `d_lse` hold.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn row_stats(&self, _args: RowStats<'_, Self::Buffer>) -> Result<()> {
        Err(no_backward(self.info()))
    }

    /// Adds to `dq`, `dk` and `dv` what one block of queries against one block of keys gives. With
    /// `x = scale · q·k` (softcap and bias as in the forward pass):
    ///
    /// ```text
    /// P = exp(x − lse) · factor    dS = P · (d_o·v − δ) · (slope of the softcap)
    /// dQ += scale · dS · k    dK += scale · dS · q    dV += P · d_o
    /// dBias += P · (d_o·v − δ)
    /// ```
    ///
    /// Sums are f32 and in an order that depends on the arguments only. A NaN or ∞ in a row or key
    /// reaches only what it is paired with by a visible pair. After [`Error::Cancelled`] the
    /// sums have no meaning.
    ///
    /// # Errors
    /// As [`Self::attend`].
    async fn attend_backward(
        &self,
        _args: AttendBackward<'_, Self::Buffer>,
        _control: &Control,
    ) -> Result<()> {
        Err(no_backward(self.info()))
    }

    /// Adds f32 rows: `into += from`, `extent` rows of two strided layouts, which are in bytes as
    /// in [`Self::repack`].
    ///
    /// # Errors
    /// [`Error::Device`].
    fn accumulate(
        &self,
        _from: (&Self::Buffer, Layout),
        _into: (&mut Self::Buffer, Layout),
        _extent: Extent,
    ) -> Result<()> {
        Err(no_backward(self.info()))
    }

    /// Fills `buffer` with zeros.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn clear(&self, _buffer: &mut Self::Buffer) -> Result<()> {
        Err(no_backward(self.info()))
    }

    /// Ends when all submitted work is done.
    ///
    /// # Errors
    /// [`Error::Device`], also for a failure of earlier work that no call has returned yet.
    async fn wait(&self) -> Result<()>;

    /// Begins or ends a time of short work; called by [`ShortWork`], whose times may overlap.
    /// Without effect on a device that cannot tell that it hangs.
    fn expect_short_work(&self, _on: bool) {}

    /// Starts or stops measuring kernels by the device's own clock. Without effect on a device that
    /// has none.
    fn measure_kernels(&self, _on: bool) {}

    /// The times of the kernels that were measured since the last call, in the order in which they
    /// ran; of everything that is submitted, so call it after [`Self::wait`]. Empty on a device
    /// without a clock.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn kernel_times(&self) -> Result<Vec<KernelTime>> {
        Ok(Vec::new())
    }
}

fn no_backward(device: &DeviceInfo) -> Error {
    Error::request(
        format!("a backward pass on {} ({})", device.name, device.backend),
        "this backend has no kernels for gradients: compute them on a device of the backend cpu, wgpu or cuda",
    )
}

/// The refusal of [`Backend::supports_bias_gradient`].
fn no_bias_gradient(device: &DeviceInfo) -> Error {
    Error::request(
        format!("the gradient of a bias tensor on {} ({})", device.name, device.backend),
        "this backend has no kernel for it: use the backend cpu, wgpu or cuda, or leave this gradient out",
    )
}
