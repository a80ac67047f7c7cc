//! Arrays of other libraries, by DLPack: in without a copy where the kernels can read them, out without a copy.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use bytes::Bytes;
use dlpark::ffi::{
    DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned,
};
use dlpark::metadata::Dynamic;
use dlpark::python::{DlpackExporter, ExportRequest, ImportRequest, export_dlpack};
use dlpark::{AllocationDeleter, DlpackFlags, Managed};
use kyklos::{Dtype, Error, Result, Tensor};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Elements of an array in host memory, with the strides that its library gave it.
#[derive(Clone, Debug)]
pub(crate) struct Elements {
    pub(crate) shape: Vec<usize>,
    /// In elements; 0 where an axis repeats.
    strides: Vec<usize>,
    pub(crate) kind: Kind,
    memory: Bytes,
}

/// The type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Number(Dtype),
    /// One byte each.
    Bool,
}

/// Shows when the memory of imported arrays is no longer in use: each array holds a clone.
#[derive(Debug)]
pub(crate) struct Loan(Sender<()>);

/// Memory of another library, until it is dropped.
struct Borrowed {
    first: *const u8,
    bytes: usize,
    _owner: AllocationDeleter,
    _loan: Sender<()>,
}

// SAFETY: the memory is only read, and its owner is released by a callback that may run on any thread.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

impl AsRef<[u8]> for Borrowed {
    fn as_ref(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: DLPack's contract: the elements that shape and strides reach are readable until the owner is released. That
        // no other thread writes to them during the call is the caller's part, which the documentation of a call says.
        unsafe { std::slice::from_raw_parts(self.first, self.bytes) }
    }
}

impl Loan {
    /// A loan, and what ends when nothing of it is in use.
    pub(crate) fn new() -> (Self, Receiver<()>) {
        let (sender, receiver) = channel();
        (Self(sender), receiver)
    }
}

impl Kind {
    fn bytes(self) -> usize {
        match self {
            Self::Number(dtype) => dtype.bytes(),
            Self::Bool => 1,
        }
    }

    fn of(dtype: DLDataType) -> Option<Self> {
        Some(match dtype {
            DLDataType::F32 => Self::Number(Dtype::F32),
            DLDataType::F16 => Self::Number(Dtype::F16),
            DLDataType::BF16 => Self::Number(Dtype::Bf16),
            DLDataType::BOOL => Self::Bool,
            _ => return None,
        })
    }
}

impl Elements {
    /// The array `object`, called `name` in errors. Nothing is copied.
    pub(crate) fn import(name: &str, object: &Bound<'_, PyAny>, loan: &Loan) -> Result<Self> {
        let type_name =
            || object.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
        let refuse = |mismatch: String, remedy: &str| Err(Error::request(mismatch, remedy));
        let imported =
            ImportRequest::new(object.as_borrowed()).and_then(|request| request.import(None, None));
        let imported = match imported {
            Ok(imported) => imported,
            Err(error) => {
                return refuse(
                    format!(
                        "{name} is a {} that does not give its elements by DLPack ({error})",
                        type_name()
                    ),
                    "pass an array of NumPy or a tensor of PyTorch (detached, where it requires a gradient) in host memory",
                );
            }
        };
        let faulty = |error: dlpark::tensor::Error| {
            Error::request(format!("{name}: {error}"), "pass a dense array in host memory")
        };
        let tensor = imported.validate().map_err(faulty)?;
        if tensor.device().device_type != DLDeviceType::CPU {
            return refuse(
                format!("{name} is on device type {} of DLPack", tensor.device().device_type.0),
                "move it to host memory: this release takes arrays of the CPU",
            );
        }
        let Some(kind) = Kind::of(tensor.dtype()) else {
            return refuse(
                format!("{name} has elements of {}", type_in_words(tensor.dtype())),
                "use float32, float16 or bfloat16, and bool for masks",
            );
        };
        let extents = |values: &[i64]| -> Option<Vec<usize>> {
            values.iter().map(|value| usize::try_from(*value).ok()).collect()
        };
        let strides = tensor.strides_or_compact().map_err(faulty)?;
        let (Some(shape), Some(strides)) = (extents(tensor.shape()), extents(&strides)) else {
            return refuse(
                format!("{name} has a negative stride"),
                "copy it, as with numpy.ascontiguousarray",
            );
        };
        let elements = if shape.contains(&0) {
            Some(0)
        } else {
            let last = shape.iter().zip(&strides).try_fold(0_usize, |sum, (extent, stride)| {
                sum.checked_add((extent - 1).checked_mul(*stride)?)
            });
            last.and_then(|last| last.checked_add(1))
        };
        let Some(bytes) = elements.and_then(|elements| elements.checked_mul(kind.bytes())) else {
            return refuse(format!("{name} reaches beyond the memory of a process"), "pass a dense array");
        };
        let first = if bytes == 0 {
            std::ptr::null()
        } else {
            // SAFETY: the tensor has elements, so its pointer is inside of its allocation.
            unsafe { tensor.offset_bytes_ptr() }.map_err(faulty)?
        };
        if !(first as usize).is_multiple_of(kind.bytes()) {
            return refuse(
                format!("the elements of {name} begin at address {first:p}"),
                "align them to their size: copy the array",
            );
        }
        let owner = Borrowed { first, bytes, _owner: imported.into_deleter(), _loan: loan.0.clone() };
        Ok(Self { shape, strides, kind, memory: Bytes::from_owner(owner) })
    }

    /// The tensor of q, k or v: four axes, tokens before heads, or after them with `heads_first`.
    pub(crate) fn tensor(&self, name: &str, heads_first: bool) -> Result<Tensor> {
        let Kind::Number(dtype) = self.kind else {
            return Err(Error::request(
                format!("{name} has elements of bool"),
                "use float32, float16 or bfloat16",
            ));
        };
        let (Ok(shape), Ok(strides)) =
            (<[usize; 4]>::try_from(&self.shape[..]), <[usize; 4]>::try_from(&self.strides[..]))
        else {
            let axes =
                if heads_first { "[batch, heads, tokens, dim]" } else { "[batch, tokens, heads, dim]" };
            return Err(Error::request(
                format!("{name} has the shape {:?}", self.shape),
                format!("give it four axes, {axes}"),
            ));
        };
        let flat = |memory: Bytes| Tensor::from_bytes([1, 1, 1, memory.len() / dtype.bytes()], dtype, memory);
        // Kernels take any strides of batch, tokens and heads, of elements that are not shared.
        let tensor = match flat(self.memory.clone())?.view(shape, strides, 0) {
            Ok(view) => view,
            Err(_) => Tensor::from_bytes(shape, dtype, self.dense(name)?.into())?,
        };
        Ok(if heads_first { tensor.swap_tokens_and_heads() } else { tensor })
    }

    /// The elements one after the other, in the order of the axes.
    pub(crate) fn dense(&self, name: &str) -> Result<Vec<u8>> {
        let bytes = self.kind.bytes();
        let total = self.shape.iter().try_fold(bytes, |bytes: usize, extent| bytes.checked_mul(*extent));
        let mut dense = Vec::new();
        // Repeated axes may stand for more elements than there is memory.
        if total.is_none_or(|total| dense.try_reserve_exact(total).is_err()) {
            return Err(Error::request(
                format!(
                    "{name} of shape {:?} repeats elements, and there is no memory for a copy",
                    self.shape
                ),
                "pass fewer tokens",
            ));
        }
        let count: usize = self.shape.iter().product();
        let mut index = vec![0_usize; self.shape.len()];
        for _ in 0..count {
            let at: usize = index.iter().zip(&self.strides).map(|(index, stride)| index * stride).sum();
            dense.extend_from_slice(&self.memory[at * bytes..(at + 1) * bytes]);
            for axis in (0..index.len()).rev() {
                index[axis] += 1;
                if index[axis] < self.shape[axis] {
                    break;
                }
                index[axis] = 0;
            }
        }
        Ok(dense)
    }

    /// The same elements with axes 1 and 2 exchanged.
    pub(crate) fn with_middle_axes_exchanged(mut self) -> Self {
        self.shape.swap(1, 2);
        self.strides.swap(1, 2);
        self
    }
}

/// A type of DLPack that calls do not take, as NumPy names it.
fn type_in_words(DLDataType { code, bits, lanes }: DLDataType) -> String {
    let kind = match code {
        DLDataTypeCode::INT => "int",
        DLDataTypeCode::UINT => "uint",
        DLDataTypeCode::FLOAT => "float",
        DLDataTypeCode::COMPLEX => "complex",
        other => return format!("DLPack type {} with {bits} bits in {lanes} lanes", other.0),
    };
    if lanes == 1 { format!("{kind}{bits}") } else { format!("{lanes} lanes of {kind}{bits}") }
}

/// An array that Kyklos has made. Other libraries take it by DLPack, without a copy.
#[pyclass(frozen, module = "kyklos._kyklos")]
#[derive(Debug)]
pub(crate) struct Array {
    memory: Bytes,
    shape: Vec<i64>,
    strides: Vec<i64>,
    dtype: Dtype,
}

impl Array {
    /// Dense elements in host memory; with `heads_first` shown with axes 1 and 2 exchanged.
    pub(crate) fn new(memory: Bytes, shape: &[usize], dtype: Dtype, heads_first: bool) -> Self {
        let mut shape: Vec<i64> =
            shape.iter().map(|extent| i64::try_from(*extent).unwrap_or(i64::MAX)).collect();
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis].max(1);
        }
        if heads_first {
            shape.swap(1, 2);
            strides.swap(1, 2);
        }
        Self { memory, shape, strides, dtype }
    }

    fn managed<M: dlpark::ManagedTensorBase>(&self) -> PyResult<Managed<M>> {
        let owner = Arc::new(self.memory.clone());
        let first: *mut c_void = owner.as_ptr().cast_mut().cast();
        let mut tensor = Dynamic::new(&self.shape[..], &self.strides[..])
            .initialize_as::<M>(owner)
            .map_err(|error| pyo3::exceptions::PyBufferError::new_err(error.to_string()))?;
        tensor.set_data(first).set_device(DLDevice::CPU).set_dtype(match self.dtype {
            Dtype::F32 => DLDataType::F32,
            Dtype::F16 => DLDataType::F16,
            Dtype::Bf16 => DLDataType::BF16,
        });
        // SAFETY: the owner keeps the memory, which holds the elements that shape and strides name; nothing else uses it.
        Ok(unsafe { tensor.finish() })
    }
}

impl DlpackExporter for Array {
    fn device(&self) -> DLDevice {
        DLDevice::CPU
    }

    fn flags(&self) -> DlpackFlags {
        DlpackFlags::empty()
    }

    fn prepare_export(&self, _: Python<'_>, _: &ExportRequest<'_>) -> PyResult<()> {
        Ok(())
    }

    fn export_legacy(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensor>> {
        self.managed()
    }

    fn export_versioned(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensorVersioned>> {
        self.managed()
    }
}

#[pymethods]
impl Array {
    /// Extents, in the layout of the call.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// `float32`, `float16` or `bfloat16`.
    #[getter]
    fn dtype(&self) -> &'static str {
        match self.dtype {
            Dtype::F32 => "float32",
            Dtype::F16 => "float16",
            Dtype::Bf16 => "bfloat16",
        }
    }

    fn __dlpack_device__(&self) -> (u32, i32) {
        DLDevice::CPU.into()
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        export_dlpack(self, py, ExportRequest::parse(stream, max_version, dl_device, copy)?)
    }

    fn __repr__(&self) -> String {
        format!("kyklos.Array(shape={:?}, dtype={})", self.shape, self.dtype())
    }
}
