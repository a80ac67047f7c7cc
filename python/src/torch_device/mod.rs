//! PyTorch as a device: buffers are its tensors, kernels are its operators
//! (`python/kyklos/_device/`). An operation is a few calls of Python, and holds the interpreter's
//! lock only while it gives work to PyTorch, which releases it while it computes.

mod buffer;
mod pieces;

use std::future::{Ready, ready};
use std::ops::Range;
use std::time::Instant;

use bytes::Bytes;
use kyklos::backend::{
    Accuracy, Attend, AttendBackward, Backend, BiasInput, Control, DeviceClass, DeviceInfo, Elements, Extent,
    Layout, Operand, Results, RowStats, Scales, State, StateMut, StateShape, yield_now,
};
use kyklos::{AttentionProblem, BiasKind, BlockWork, Dtype, Error, Result, TileShape};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

pub(crate) use self::buffer::TorchBuffer;
use self::pieces::{Costed, Pieces, Rate};
use crate::spare;
use crate::tensors::outputs::Array;

/// A device of PyTorch.
#[derive(Debug)]
pub(crate) struct TorchBackend {
    info: DeviceInfo,
    /// A `kyklos._device.Device`.
    device: Py<PyAny>,
    rate: Rate,
    backward_rate: Rate,
}

type Tuple4 = (usize, usize, usize, usize);

impl TorchBackend {
    /// Opens a device by PyTorch's name for it.
    pub(crate) fn open(name: &str) -> Result<Self> {
        Python::attach(|py| {
            let open = || -> PyResult<_> {
                let device = py.import("kyklos._device")?.getattr("Device")?.call1((name,))?;
                let info: (String, String, String) = device.call_method0("info")?.extract()?;
                let is_cpu: bool = device.getattr("is_cpu")?.extract()?;
                Ok((device.unbind(), info, is_cpu))
            };
            let (device, (name, driver, kernel), is_cpu) = open().map_err(|error| {
                Error::request(
                    format!("the device torch:{name} does not open: {error}"),
                    "install PyTorch for this device, or use another device",
                )
            })?;
            let class = if is_cpu { DeviceClass::Cpu } else { DeviceClass::OtherGpu };
            let info = DeviceInfo { backend: "torch", name, driver, class, kernel };
            Ok(Self { info, device, rate: Rate::default(), backward_rate: Rate::default() })
        })
    }

    /// The memory of a tensor of this device, with its shape, strides and type; `None` of another
    /// array.
    pub(crate) fn adopt(
        &self,
        array: &Bound<'_, PyAny>,
    ) -> Result<Option<(Py<PyAny>, Vec<usize>, Vec<usize>, Dtype)>> {
        type Found = Option<(Py<PyAny>, Vec<usize>, Vec<usize>, String)>;
        let found: Found = self.with(|_, device| device.call_method1("adopt", (array,))?.extract())?;
        let dtype = |of: &str| Dtype::ALL.into_iter().find(|dtype| name(*dtype) == of);
        Ok(found.and_then(|(flat, shape, strides, of)| Some((flat, shape, strides, dtype(&of)?))))
    }

    /// A mask or bias in host memory, if it is a tensor of this device; `None` of another array,
    /// and of one that is read where it is, if any of them is.
    pub(crate) fn rows_on_host<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        some_in_place: bool,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        let py = array.py();
        let args = (array, some_in_place);
        let copy = self.with(|_, device| device.call_method1("rows_on_host", args).map(Bound::unbind))?;
        Ok((!copy.is_none(py)).then(|| copy.into_bound(py)))
    }

    /// A tensor at the beginning of a buffer, for a caller.
    pub(crate) fn result(&self, buffer: &TorchBuffer, dtype: Dtype, shape: &[usize]) -> Result<Py<PyAny>> {
        self.with(|py, device| {
            let args = (buffer.tensor(py)?, name(dtype), shape.to_vec());
            device.call_method1("result", args).map(Bound::unbind)
        })
    }

    /// PyTorch's name of the device.
    pub(crate) fn torch_name(&self) -> &str {
        self.info.name.trim_start_matches("torch:")
    }

    /// Does `work` with the interpreter; an exception is an error of the device.
    fn with<T>(&self, work: impl FnOnce(Python<'_>, &Bound<'_, PyAny>) -> PyResult<T>) -> Result<T> {
        Python::attach(|py| {
            work(py, self.device.bind(py)).map_err(|error| match error.is_instance_of::<PyMemoryError>(py) {
                true => self.out_of_memory("temporary tensors", 0),
                false => self.failed(&error),
            })
        })
    }

    fn failed(&self, error: &PyErr) -> Error {
        Error::Device {
            device: self.info.name.clone(),
            operation: "compute with PyTorch".to_owned(),
            native: error.to_string(),
        }
    }

    fn out_of_memory(&self, what: &str, bytes: usize) -> Error {
        let device = self.info.name.clone();
        Error::OutOfMemory { device, what: what.to_owned(), asked_bytes: bytes as u64, allowed_bytes: 0 }
    }

    /// A block of queries and keys as the Python code has it.
    fn block<'py>(
        py: Python<'py>,
        device: &Bound<'py, PyAny>,
        shape: StateShape,
        of: &BlockOf<'_>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let words = |words: &[u32]| PyBytes::new(py, bytemuck::cast_slice(words)).unbind();
        let spans: Vec<_> =
            of.work.classes.iter().map(|class| PyBytes::new(py, bytemuck::cast_slice(&class.rows))).collect();
        let bias = match &of.bias {
            Some(bias) => {
                Some((bias.kind == BiasKind::Mask, bias.buffer.tensor(py)?.clone(), place(bias.layout)))
            }
            None => None,
        };
        let [q, k, v] = of.operands.each_ref();
        let [q, k, v] = [placed(py, q)?, placed(py, k)?, placed(py, v)?];
        let numbers = (of.scale, of.softcap, of.inference);
        device.call_method1(
            "block",
            (
                name(of.dtype),
                extents(shape),
                q,
                k,
                v,
                of.kv_head_of.to_vec(),
                numbers,
                words(&of.work.kv_positions),
                spans,
                bias,
            ),
        )
    }

    /// Attends piece by piece.
    async fn in_pieces(
        &self,
        rate: &Rate,
        mut pieces: Pieces,
        control: &Control,
        attend: impl Fn(Python<'_>, &Bound<'_, PyAny>, &Costed) -> PyResult<()>,
    ) -> Result<()> {
        while let Some(piece) = pieces.take(rate.budget()) {
            let start = Instant::now();
            self.with(|py, device| attend(py, device, &piece))?;
            rate.measured(piece.cost, start);
            control.piece_done()?;
            yield_now().await;
        }
        Ok(())
    }
}

/// What both directions know of a block.
struct BlockOf<'a> {
    dtype: Dtype,
    scale: f32,
    softcap: Option<f32>,
    /// q, k, v.
    operands: [Operand<'a, TorchBuffer>; 3],
    kv_head_of: &'a [u32],
    work: &'a BlockWork,
    bias: Option<BiasInput<'a, TorchBuffer>>,
    inference: bool,
}

impl Backend for TorchBackend {
    type Buffer = TorchBuffer;
    type Download = Ready<Result<Bytes>>;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn supports_fixed_order(&self) -> Result<()> {
        Err(Error::request(
            format!("sums in a fixed order on {}", self.info.name),
            "PyTorch's kernels choose the order by the shape: use the device \"cpu\", \"wgpu\" or \"cuda\"",
        ))
    }

    fn accuracy(&self, dtype: Dtype) -> Accuracy {
        let of_kernel = self.with(|_, device| device.call_method1("accuracy", (name(dtype),))?.extract());
        let (log_sum_exp, of_blocks) = of_kernel.unwrap_or_default();
        Accuracy { log_sum_exp, of_blocks }
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
        let array = words(data).ok_or_else(|| self.out_of_memory(label, bytes))?;
        let tensor =
            self.with(|_, device| device.call_method1("upload", (array, bytes)).map(Bound::unbind))?;
        Ok(TorchBuffer::new(tensor, false))
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
            let (tensor, address): (Py<PyAny>, usize) =
                device.call_method1("on_host", (buffer.tensor(py)?, range.start, range.end))?.extract()?;
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
        let AttendBackward { dtype, scale, softcap, q, k, v, kv_head_of, work, bias, shape, .. } = args;
        if is_empty(shape) || work.is_empty() {
            return control.piece_done();
        }
        let of =
            BlockOf { dtype, scale, softcap, operands: [q, k, v], kv_head_of, work, bias, inference: false };
        let kv_heads = kv_head_of.iter().max().map_or(0, |head| *head as usize + 1);
        let (block, gradients) = self.with(|py, device| {
            let block = Self::block(py, device, shape, &of)?;
            let d_bias = match args.d_bias {
                Some(sum) => Some((sum.buffer.tensor_mut(py)?.clone(), place(sum.layout), sum.columns)),
                None => None,
            };
            let args = (
                &block,
                extents(shape),
                placed(py, &args.d_o)?,
                placed(py, &args.stats)?,
                args.dq.tensor_mut(py)?,
                args.dk.tensor_mut(py)?,
                args.dv.tensor_mut(py)?,
                (kv_heads, place(args.kv_layout)),
                d_bias,
            );
            let gradients = device.call_method1("gradients", args)?;
            Ok((block.unbind(), gradients.unbind()))
        })?;
        let pieces = Pieces::new(work, shape.batch, 5 * (shape.heads * shape.dim) as u64);
        let attend = |py: Python<'_>, device: &Bound<'_, PyAny>, piece: &Costed| {
            device.call_method1("attend_backward", (block.bind(py), gradients.bind(py), piece.part)).map(drop)
        };
        self.in_pieces(&self.backward_rate, pieces, control, attend).await
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
    /// Attends into a state, or into results.
    async fn attend_into(
        &self,
        args: Attend<'_, TorchBuffer>,
        results: Option<Results<'_, TorchBuffer>>,
        control: &Control,
    ) -> Result<()> {
        let Attend { dtype, scale, softcap, q, k, v, kv_head_of, work, bias, inference, state, .. } = args;
        let shape = state.shape;
        if is_empty(shape) || work.is_empty() && results.is_none() {
            return control.piece_done();
        }
        let of = BlockOf { dtype, scale, softcap, operands: [q, k, v], kv_head_of, work, bias, inference };
        let (block, into) = self.with(|py, device| {
            let ml = state.ml.tensor_mut(py)?.clone();
            let (is_empty, a) = state.a.overwrite(py)?;
            let results = match results {
                Some(Results { sinks, o, lse }) => Some((
                    sinks.to_vec(),
                    name(dtype),
                    o.tensor_mut(py)?.clone(),
                    lse.tensor_mut(py)?.clone(),
                )),
                None => None,
            };
            let into = device.call_method1("running", (a, ml, extents(shape), is_empty, results))?;
            Ok((Self::block(py, device, shape, &of)?.unbind(), into.unbind()))
        })?;
        let pieces = Pieces::new(work, shape.batch, 2 * (shape.heads * shape.dim) as u64);
        let attend = |py: Python<'_>, device: &Bound<'_, PyAny>, piece: &Costed| {
            let args = (block.bind(py), into.bind(py), piece.part, piece.is_alone);
            device.call_method1("attend", args).map(drop)
        };
        self.in_pieces(&self.rate, pieces, control, attend).await?;
        self.with(|py, _| into.bind(py).call_method0("end").map(drop))
    }

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

fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        Dtype::Bf16 => "bfloat16",
    }
}

fn place(Layout { offset, batch_stride, row_stride, head_stride }: Layout) -> Tuple4 {
    (offset, batch_stride, row_stride, head_stride)
}

fn placed<'py>(
    py: Python<'py>,
    Operand { buffer, layout }: &Operand<'_, TorchBuffer>,
) -> PyResult<(Bound<'py, PyAny>, Tuple4)> {
    Ok((buffer.tensor(py)?.clone(), place(*layout)))
}

fn extents(StateShape { batch, rows, heads, dim }: StateShape) -> Tuple4 {
    (batch, rows, heads, dim)
}

fn is_empty(StateShape { batch, rows, heads, dim }: StateShape) -> bool {
    batch * rows * heads * dim == 0
}

/// Bytes as an array of numbers for DLPack, padded to whole numbers; `None` without memory for a
/// copy.
fn words(data: Bytes) -> Option<Array> {
    const ALIGNMENT: usize = 16;
    let whole = data.len().is_multiple_of(4) && data.as_ptr().addr().is_multiple_of(ALIGNMENT);
    let data = if whole {
        data
    } else {
        let bytes = data.len().next_multiple_of(ALIGNMENT);
        spare::filled(bytes, |copy| {
            copy.extend_from_slice(&data);
            copy.resize(bytes, 0);
        })?
    };
    Some(Array::of_words(data))
}
