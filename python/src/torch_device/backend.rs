//! The operations of a backend, as calls of Python.

use std::future::{Ready, ready};
use std::ops::Range;

use bytes::Bytes;
use kyklos::backend::{
    Accuracy, Attend, AttendBackward, Backend, Control, DeviceClass, DeviceInfo, Elements, Extent, Layout,
    Results, RowStats, Scales, State, StateMut, StateShape,
};
use kyklos::{AttentionProblem, Dtype, Error, Result, TileShape};
use pyo3::exceptions::{PyBufferError, PyMemoryError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::places::{Tuple4, extents, is_empty, name, place};
use super::words::Words;
use super::{TorchBackend, TorchBuffer};
use crate::spare;

impl Backend for TorchBackend {
    type Buffer = TorchBuffer;
    type Download = Ready<Result<Bytes>>;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports_fixed_order(&self) -> Result<()> {
        Err(Error::request(
            format!("sums in a fixed order on {}", self.info.name),
            "PyTorch's kernels choose the order by the shape: form the group with device=\"cpu\", \"wgpu\" or \"cuda\"",
        ))
    }

    fn accuracy(&self, dtype: Dtype) -> Accuracy {
        let of_kernel = self.with(|_, device| device.call_method1("accuracy", (name(dtype),))?.extract());
        let (log_sum_exp, of_blocks, of_gradients) = of_kernel.unwrap_or_default();
        Accuracy { log_sum_exp, of_blocks, of_gradients }
    }

    fn kernel(&self, dtype: Dtype, shape: StateShape) -> String {
        let of = self.with(|_, device| device.call_method1("kernel", (name(dtype), shape.dim))?.extract());
        of.unwrap_or_else(|_| self.info.kernel.clone())
    }

    fn tile_shape(&self, _: &AttentionProblem, _: StateShape) -> TileShape {
        // Tiles are not used: blocks are cut by `BlockWork::pieces`.
        TileShape { q_rows: 256, kv_cols: 256 }
    }

    fn alloc(&self, label: &str, bytes: usize) -> Result<TorchBuffer> {
        Python::attach(|py| match self.device.bind(py).call_method1("alloc", (bytes,)) {
            Ok(tensor) => Ok(TorchBuffer::new(tensor.unbind(), true)),
            Err(error) if error.is_instance_of::<PyMemoryError>(py) => Err(self.out_of_memory(label, bytes)),
            Err(error) => Err(self.failed(&error)),
        })
    }

    fn upload(&self, label: &str, data: Bytes) -> Result<TorchBuffer> {
        let bytes = data.len();
        if bytes == 0 {
            return self.alloc(label, 0);
        }
        let array = Words::new(data).ok_or_else(|| self.out_of_memory(label, bytes))?;
        let tensor =
            self.with(|_, device| device.call_method1("upload", (array, bytes)).map(Bound::unbind))?;
        // On the CPU it is the caller's memory, elsewhere a copy.
        Ok(TorchBuffer::new(tensor, self.info.class != DeviceClass::Cpu))
    }

    fn write(&self, buffer: &mut TorchBuffer, offset: usize, data: &[u8]) -> Result<()> {
        self.with(|py, device| {
            let tensor = buffer.tensor_mut(py)?;
            device.call_method1("write", (tensor, offset, PyBytes::new(py, data))).map(drop)
        })
    }

    fn share(&self, buffer: &mut TorchBuffer) -> TorchBuffer {
        buffer.share()
    }

    fn download(&self, buffer: &mut TorchBuffer, range: Range<usize>) -> Self::Download {
        let copied = self.with(|py, device| {
            let (tensor, address, bytes): (Py<PyAny>, usize, usize) =
                device.call_method1("on_host", (buffer.tensor(py)?, range.start, range.end))?.extract()?;
            if bytes != range.len() {
                return Err(PyBufferError::new_err(format!("{bytes} bytes where {range:?} were wanted")));
            }
            let copy = py.detach(|| {
                spare::filled(range.len(), |copy| {
                    if !range.is_empty() {
                        let first = std::ptr::with_exposed_provenance::<u8>(address);
                        // SAFETY: `on_host` gives a tensor in host memory of these bytes, which lives until
                        // the end of this function. The thread of the session is the
                        // only one that writes to the buffers of a session, and it is
                        // here.
                        copy.extend_from_slice(unsafe { std::slice::from_raw_parts(first, range.len()) });
                    }
                })
            });
            drop(tensor);
            Ok(copy)
        });
        ready(
            copied.and_then(|copy| {
                copy.ok_or_else(|| self.out_of_memory("a copy in host memory", range.len()))
            }),
        )
    }

    fn reset_state(&self, state: &mut StateMut<'_, TorchBuffer>) -> Result<()> {
        if is_empty(state.shape) {
            return Ok(());
        }
        self.with(|py, device| {
            state.a.make_zero(py)?;
            device.call_method1("reset_state", (state.ml.tensor_mut(py)?, extents(state.shape))).map(drop)
        })
    }

    async fn attend(&self, args: Attend<'_, TorchBuffer>, control: &Control) -> Result<()> {
        self.attend_into(args, None, control).await
    }

    async fn attend_and_finalize(
        &self,
        args: Attend<'_, TorchBuffer>,
        results: Results<'_, TorchBuffer>,
        control: &Control,
    ) -> Result<()> {
        self.attend_into(args, Some(results), control).await
    }

    fn merge(&self, into: &mut StateMut<'_, TorchBuffer>, from: &State<'_, TorchBuffer>) -> Result<()> {
        if is_empty(into.shape) {
            return Ok(());
        }
        self.with(|py, device| {
            let (a, ml) = (into.a.tensor_mut(py)?, into.ml.tensor_mut(py)?);
            let args = (a, ml, from.a.tensor(py)?, from.ml.tensor(py)?, extents(into.shape));
            device.call_method1("merge", args).map(drop)
        })
    }

    fn finalize(
        &self,
        state: &State<'_, TorchBuffer>,
        sinks: &[f32],
        dtype: Dtype,
        o: &mut TorchBuffer,
        lse: &mut TorchBuffer,
    ) -> Result<()> {
        if is_empty(state.shape) {
            return Ok(());
        }
        self.with(|py, device| {
            let (a, ml) = (state.a.tensor(py)?, state.ml.tensor(py)?);
            let (o, lse) = (o.tensor_mut(py)?, lse.tensor_mut(py)?);
            let args = (a, ml, extents(state.shape), sinks.to_vec(), name(dtype), o, lse);
            device.call_method1("finalize", args).map(drop)
        })
    }

    fn repack(
        &self,
        (from, from_layout): (&TorchBuffer, Layout),
        (into, into_layout): (&mut TorchBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        self.of_rows("repack", (from, from_layout), (into, into_layout), extent)
    }

    fn convert(
        &self,
        from: Elements<&TorchBuffer>,
        into: Elements<&mut TorchBuffer>,
        shape: [usize; 4],
        overflow: Option<&mut TorchBuffer>,
    ) -> Result<()> {
        if shape.contains(&0) {
            return Ok(());
        }
        let extents: Tuple4 = shape.into();
        self.with(|py, device| match (from, into) {
            (
                Elements::Stored { buffer: from, first, dtype },
                Elements::Stored { buffer: into, first: into_first, dtype: into_dtype },
            ) => {
                let overflow = overflow.map(|word| word.tensor_mut(py)).transpose()?;
                let from = (from.tensor(py)?, first, name(dtype));
                let into = (into.tensor_mut(py)?, into_first, name(into_dtype));
                device.call_method1("convert", (from, into, extents, overflow)).map(drop)
            }
            (Elements::Stored { buffer, first, dtype }, Elements::Coded { codes, scales, of }) => {
                let from = (buffer.tensor(py)?, first, name(dtype));
                let (codes, scales) = (codes.tensor_mut(py)?, scales.tensor_mut(py)?);
                let args = (from, codes, scales, of == Scales::Channels, extents);
                device.call_method1("encode", args).map(drop)
            }
            (Elements::Coded { codes, scales, of }, Elements::Stored { buffer, first, dtype }) => {
                let into = (buffer.tensor_mut(py)?, first, name(dtype));
                let args = (codes.tensor(py)?, scales.tensor(py)?, of == Scales::Channels, into, extents);
                device.call_method1("decode", args).map(drop)
            }
            (Elements::Coded { .. }, Elements::Coded { .. }) => {
                unreachable!("plans convert to codes and back, not from codes to codes")
            }
        })
    }

    fn supports_backward(&self, _: Dtype, _: usize) -> Result<()> {
        Ok(())
    }

    fn supports_bias_gradient(&self) -> Result<()> {
        Ok(())
    }

    fn row_stats(&self, args: RowStats<'_, TorchBuffer>) -> Result<()> {
        let RowStats { dtype, shape, o, d_o, lse, d_lse, stats } = args;
        if is_empty(shape) {
            return Ok(());
        }
        self.with(|py, device| {
            let given = d_lse.map(|d_lse| d_lse.tensor(py)).transpose()?;
            let (o, d_o, lse) = (o.tensor(py)?, d_o.tensor(py)?, lse.tensor(py)?);
            let args = (name(dtype), extents(shape), o, d_o, lse, given, stats.tensor_mut(py)?);
            device.call_method1("row_stats", args).map(drop)
        })
    }

    async fn attend_backward(&self, args: AttendBackward<'_, TorchBuffer>, control: &Control) -> Result<()> {
        self.gradients_of(args, control).await
    }

    fn accumulate(
        &self,
        (from, from_layout): (&TorchBuffer, Layout),
        (into, into_layout): (&mut TorchBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        self.of_rows("accumulate", (from, from_layout), (into, into_layout), extent)
    }

    fn clear(&self, buffer: &mut TorchBuffer) -> Result<()> {
        self.with(|py, device| device.call_method1("clear", (buffer.tensor_mut(py)?,)).map(drop))
    }

    async fn wait(&self) -> Result<()> {
        self.with(|_, device| device.call_method0("wait").map(drop))
    }
}

impl TorchBackend {
    /// The operation `operation` on rows of two layouts.
    fn of_rows(
        &self,
        operation: &str,
        (from, from_layout): (&TorchBuffer, Layout),
        (into, into_layout): (&mut TorchBuffer, Layout),
        Extent { batch, rows, heads, row_bytes }: Extent,
    ) -> Result<()> {
        if batch * rows * heads * row_bytes == 0 {
            return Ok(());
        }
        self.with(|py, device| {
            let extent = (batch, rows, heads, row_bytes);
            let into = into.tensor_mut(py)?;
            device
                .call_method1(
                    operation,
                    (from.tensor(py)?, place(from_layout), into, place(into_layout), extent),
                )
                .map(drop)
        })
    }
}
