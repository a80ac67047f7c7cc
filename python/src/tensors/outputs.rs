//! Arrays that Kyklos has made, for other libraries by DLPack, without a copy.

use std::ffi::c_void;
use std::sync::Arc;

use bytes::Bytes;
use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::python::{DlpackExporter, ExportRequest, export_dlpack};
use dlpark::{DlpackFlags, Managed};
use kyklos::{Dtype, Result, Tensor};
use kyklos_cuda::CudaTensor;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::tensors::place::{Taken, gpu_of};
use crate::tensors::torch;

/// An array that Kyklos has made. Other libraries take it by DLPack, without a copy.
///
/// On a GPU the stream that the library names waits for the elements. It exists until the library
/// has released the array: the memory is then used for something else after what the stream had
/// been given.
#[pyclass(frozen, module = "kyklos._kyklos")]
#[derive(Debug)]
pub(crate) struct Array {
    memory: Memory,
    shape: Vec<i64>,
    strides: Vec<i64>,
    dtype: Dtype,
}

#[derive(Debug)]
enum Memory {
    Host(Bytes),
    /// Of a CUDA device.
    Gpu(Tensor, i32),
    /// A tensor of PyTorch that begins where the elements do.
    Torch(Py<PyAny>),
}

/// A result, before Python gets it.
pub(crate) struct Fetched {
    memory: Memory,
    shape: Vec<usize>,
    dtype: Dtype,
}

impl Fetched {
    /// A tensor, dense: where it is if `in_place`, otherwise in host memory.
    pub(crate) fn new(tensor: &Tensor, in_place: bool) -> Result<Self> {
        let own = tensor.device().filter(|_| in_place);
        let memory = match own {
            Some(device) => {
                let dense = if tensor.is_dense() { tensor.clone() } else { tensor.copied()? };
                match (torch::result(&dense)?, gpu_of(device)) {
                    (Some(result), _) => Memory::Torch(result),
                    (None, Some(gpu)) => Memory::Gpu(dense, i32::try_from(gpu).unwrap_or(i32::MAX)),
                    (None, None) => Memory::Host(pollster::block_on(dense.bytes())?),
                }
            }
            None => Memory::Host(pollster::block_on(tensor.bytes())?),
        };
        Ok(Self { memory, shape: tensor.shape().to_vec(), dtype: tensor.dtype() })
    }

    /// Without the last axis, whose extent is 1.
    pub(crate) fn without_last_axis(mut self) -> Self {
        self.shape.pop();
        self
    }

    /// The array, with `heads_first` shown with axes 1 and 2 exchanged.
    pub(crate) fn array(self, heads_first: bool) -> Array {
        let Self { memory, shape, dtype } = self;
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
        Array { memory, shape, strides, dtype }
    }
}

/// One export of an array.
struct Export<'a> {
    array: &'a Array,
    owner: Arc<Owner>,
}

/// What keeps the memory of an export.
enum Owner {
    Host(#[expect(dead_code, reason = "only kept")] Bytes),
    Gpu(Taken),
}

impl Export<'_> {
    fn managed<M: dlpark::ManagedTensorBase>(&self) -> PyResult<Managed<M>> {
        let Array { memory, shape, strides, dtype } = self.array;
        let first: *mut c_void = match memory {
            Memory::Host(bytes) => bytes.as_ptr().cast_mut().cast(),
            // Without elements there is no address.
            Memory::Gpu(tensor, _) => {
                std::ptr::with_exposed_provenance_mut(tensor.cuda_address().unwrap_or(0) as usize)
            }
            Memory::Torch(_) => unreachable!("PyTorch exports its own tensors"),
        };
        let mut tensor = Dynamic::new(&shape[..], &strides[..])
            .initialize_as::<M>(self.owner.clone())
            .map_err(|error| pyo3::exceptions::PyBufferError::new_err(error.to_string()))?;
        tensor.set_data(first).set_device(self.device()).set_dtype(match dtype {
            Dtype::F32 => DLDataType::F32,
            Dtype::F16 => DLDataType::F16,
            Dtype::Bf16 => DLDataType::BF16,
        });
        // SAFETY: the owner keeps the memory, which holds the elements that shape and strides name; nothing
        // else uses it.
        Ok(unsafe { tensor.finish() })
    }
}

impl DlpackExporter for Export<'_> {
    fn device(&self) -> DLDevice {
        self.array.device()
    }

    fn flags(&self) -> DlpackFlags {
        DlpackFlags::empty()
    }

    fn prepare_export(&self, py: Python<'_>, _: &ExportRequest<'_>) -> PyResult<()> {
        match &*self.owner {
            Owner::Host(_) => Ok(()),
            Owner::Gpu(taken) => taken.make_ready(py),
        }
    }

    fn export_legacy(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensor>> {
        self.managed()
    }

    fn export_versioned(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensorVersioned>> {
        self.managed()
    }
}

impl Array {
    fn device(&self) -> DLDevice {
        match self.memory {
            Memory::Host(_) => DLDevice::CPU,
            Memory::Gpu(_, gpu) => DLDevice::cuda(gpu),
            Memory::Torch(_) => unreachable!("PyTorch exports its own tensors"),
        }
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

    /// The array as a tensor of PyTorch, if it is on a device of PyTorch.
    #[getter]
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Memory::Torch(tensor) = &self.memory else { return Ok(None) };
        let axes = (self.shape.clone(), self.strides.clone());
        tensor.bind(py).call_method1("as_strided", axes).map(Some)
    }

    fn __dlpack_device__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.torch(py)? {
            Some(tensor) => tensor.call_method0("__dlpack_device__"),
            None => Ok(<(u32, i32)>::from(self.device()).into_pyobject(py)?.into_any()),
        }
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
        if let Some(tensor) = self.torch(py)? {
            let options = PyDict::new(py);
            options.set_item("stream", stream)?;
            options.set_item("max_version", max_version)?;
            options.set_item("dl_device", dl_device)?;
            options.set_item("copy", copy)?;
            return tensor.call_method("__dlpack__", (), Some(&options)).map(Bound::unbind);
        }
        let request = ExportRequest::parse(stream, max_version, dl_device, copy)?;
        let owner = Arc::new(match &self.memory {
            Memory::Host(bytes) => Owner::Host(bytes.clone()),
            Memory::Gpu(tensor, _) => Owner::Gpu(Taken::new(tensor, &request)?),
            Memory::Torch(_) => unreachable!("PyTorch exports its own tensors"),
        });
        export_dlpack(&Export { array: self, owner }, py, request)
    }

    fn __repr__(&self) -> String {
        format!("kyklos.Array(shape={:?}, dtype={})", self.shape, self.dtype())
    }
}
