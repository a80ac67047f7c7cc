//! A device that computes nothing. To write a backend, copy this file and fill in one operation
//! after the other, in the order of the file; the suite says which claims do not hold yet. The
//! contract is the documentation of [`kyklos::backend`].

use std::future::{Ready, ready};
use std::ops::Range;

use bytes::Bytes;
use kyklos::backend::{
    Attend, AttendBackward, Backend, Control, DeviceClass, DeviceInfo, Elements, Extent, Layout, RowStats,
    State, StateMut, StateShape,
};
use kyklos::{AttentionProblem, Dtype, Result, TileShape};

/// A device without memory and without arithmetic; downloads are zeros. It is the start of a new
/// backend. A session on it costs what the engine costs (votes, messages, steps), so it is the
/// floor of measurements.
#[derive(Debug)]
pub struct DoNothing(DeviceInfo);

impl DoNothing {
    /// Opens the device. A real one fails here with [`kyklos::Error::Device`], with the driver's
    /// own words.
    pub fn open() -> Result<Self> {
        Ok(Self(DeviceInfo {
            backend: "nothing",       // The name of the backend in reports.
            name: "nothing".into(),   // The device's own name, from the driver.
            driver: "none".into(),    // The driver with its version.
            class: DeviceClass::Cpu,  // Not a software GPU: those run fewer cases of the suite.
            kernel: "nothing".into(), // The kernel variant that this device uses.
        }))
    }
}

impl Backend for DoNothing {
    // Linear memory. It must stay alive until the device is done with it, also if the caller drops it
    // before.
    type Buffer = ();
    // The end of a copy to the host. It is polled by any executor, so the driver must wake it, and
    // nothing may block.
    type Download = Ready<Result<Bytes>>;

    fn info(&self) -> &DeviceInfo {
        &self.0
    }

    // `supports` and `kernel` have defaults. Override `supports` with `Error::Request` for a dtype or a
    // head dim without a kernel.

    // Rows and keys of the tiles that `attend` works on. The work list of `attend` comes in these
    // tiles. With `problem.fixed_order` they may not depend on `shape.rows`.
    fn tile_shape(&self, _problem: &AttentionProblem, _shape: StateShape) -> TileShape {
        TileShape { q_rows: 64, kv_cols: 64 }
    }

    // Memory with any contents; 0 bytes are allowed. Too much is `Error::OutOfMemory` with the bytes
    // asked and allowed, and the device still works afterwards.
    fn alloc(&self, _label: &str, _bytes: usize) -> Result<()> {
        Ok(())
    }

    // A new buffer with these bytes. Errors as `alloc`.
    fn upload(&self, _label: &str, _data: Bytes) -> Result<()> {
        Ok(())
    }

    // `buffer[offset..offset + data.len()] = data`, after all operations that were called before.
    fn write(&self, _buffer: &mut (), _offset: usize, _data: &[u8]) -> Result<()> {
        Ok(())
    }

    // A second handle of the same memory, such as a clone of an `Arc`. Neither handle is written
    // afterwards.
    fn share(&self, _buffer: &mut ()) {}

    // The bytes of the buffer as they are now, `range.len()` of them. Later operations do not change
    // them.
    fn download(&self, _buffer: &mut (), range: Range<usize>) -> Self::Download {
        ready(Ok(Bytes::from(vec![0; range.len()])))
    }

    // For every row and head: m = EMPTY_M, l = 0, a = 0. `ml` is f32 [batch, heads, rows, 2], `a` f32
    // [batch, rows, heads, dim].
    fn reset_state(&self, _state: &mut StateMut<'_, ()>) -> Result<()> {
        Ok(())
    }

    // For every query row, head and visible key: adds the key to the state of the row. `args.work` says
    // which pairs are visible, `args.q`, `k` and `v` where the elements are, `args.state` what is
    // changed. About every 100 ms: one piece. After a piece `control.piece_done()?`, which is
    // `Error::Cancelled` if the caller has given up, then `yield_now().await`.
    async fn attend(&self, _args: Attend<'_, ()>, control: &Control) -> Result<()> {
        control.piece_done()
    }

    // m = max(m1, m2), l = l1·exp(m1 - m) + l2·exp(m2 - m), `a` likewise. If one state is empty, the
    // other one bit for bit.
    fn merge(&self, _into: &mut StateMut<'_, ()>, _from: &State<'_, ()>) -> Result<()> {
        Ok(())
    }

    // First each sink, one for each head: l += exp(sink - m). Then o = a / l in `dtype`, [batch, rows,
    // heads, dim], and lse = m + ln l, f32 [batch, rows, heads, 2]: rounded, and the rest. A row
    // without a key: o = 0 and lse = -∞, or lse = the sink.
    fn finalize(
        &self,
        _state: &State<'_, ()>,
        _sinks: &[f32],
        _dtype: Dtype,
        _o: &mut (),
        _lse: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    // Copies [batch, rows, heads] pieces of `extent.row_bytes` bytes between two layouts, whose offsets
    // and strides are bytes.
    fn repack(&self, _from: (&(), Layout), _into: (&mut (), Layout), _extent: Extent) -> Result<()> {
        Ok(())
    }

    // `shape` = [batch, tokens, heads, dim] elements from one form to another: f32 and a 16-bit type
    // (round to nearest even), or any type and 8-bit codes with scales. No byte outside the tensor
    // is written.
    fn convert(
        &self,
        _from: Elements<&()>,
        _into: Elements<&mut ()>,
        _shape: [usize; 4],
        _overflow: Option<&mut ()>,
    ) -> Result<()> {
        Ok(())
    }

    // The backward pass. A backend without one leaves out this method and the next four: then it is
    // refused.
    fn supports_backward(&self, _dtype: Dtype, _head_dim: usize) -> Result<()> {
        Ok(())
    }

    // For every row and head: its log-sum-exp, e^-rest, the sum of d_o · o minus d_lse, and the rest.
    // f32 [batch, rows, heads, 4].
    fn row_stats(&self, _args: RowStats<'_, ()>) -> Result<()> {
        Ok(())
    }

    // For every visible pair: adds to dq, dk and dv, as `Backend::attend_backward` says. Pieces as in
    // `attend`.
    async fn attend_backward(&self, _args: AttendBackward<'_, ()>, control: &Control) -> Result<()> {
        control.piece_done()
    }

    // As `repack`, but f32 numbers are added.
    fn accumulate(&self, _from: (&(), Layout), _into: (&mut (), Layout), _extent: Extent) -> Result<()> {
        Ok(())
    }

    // All bytes are 0.
    fn clear(&self, _buffer: &mut ()) -> Result<()> {
        Ok(())
    }

    // Ends when the device has done all work. A failure that no call has returned yet is returned here,
    // as `Error::Device`.
    async fn wait(&self) -> Result<()> {
        Ok(())
    }
}
