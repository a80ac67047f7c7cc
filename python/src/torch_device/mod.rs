//! PyTorch as a device: buffers are its tensors, kernels are its operators
//! (`python/kyklos/_device/`). An operation is a few calls of Python, and holds the interpreter's
//! lock only while it gives work to PyTorch, which releases it while it computes.

mod attention;
mod backend;
mod buffer;
mod messages;
mod pieces;
mod places;
mod words;

use kyklos::backend::{DeviceClass, DeviceInfo};
use kyklos::{Dtype, Error, Result};
use pyo3::exceptions::{PyMemoryError, PyTypeError};
use pyo3::prelude::*;

pub(crate) use self::buffer::TorchBuffer;
pub(crate) use self::messages::form;
use self::places::name;

/// A device of PyTorch.
#[derive(Debug)]
pub(crate) struct TorchBackend {
    info: DeviceInfo,
    /// A `kyklos._device.Device`.
    device: Py<PyAny>,
}

/// A caller's tensor, in elements from the beginning of its memory on.
pub(crate) struct CallersTensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    pub(crate) dtype: Dtype,
}

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
            Ok(Self { info, device })
        })
    }

    /// The memory of a tensor of this device, and what is in it; `None` of another array.
    pub(crate) fn adopt(&self, array: &Bound<'_, PyAny>) -> Result<Option<(Py<PyAny>, CallersTensor)>> {
        type Found = Option<(Py<PyAny>, Vec<usize>, Vec<usize>, String)>;
        let found = Python::attach(|py| {
            let adopt =
                || -> PyResult<Found> { self.device.bind(py).call_method1("adopt", (array,))?.extract() };
            adopt().map_err(|error| match error.is_instance_of::<PyTypeError>(py) {
                true => Error::request(error.value(py).to_string(), "use float32, float16 or bfloat16"),
                false => self.failed(&error),
            })
        })?;
        let dtype = |of: &str| Dtype::ALL.into_iter().find(|dtype| name(*dtype) == of);
        Ok(found.and_then(|(flat, shape, strides, of)| {
            Some((flat, CallersTensor { shape, strides, dtype: dtype(&of)? }))
        }))
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
            work(py, self.device.bind(py)).map_err(|error| match is_of_memory(py, &error) {
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
}

/// Whether memory of the device is missing. For that of the host PyTorch has no type of its own,
/// but in `alloc`.
fn is_of_memory(py: Python<'_>, error: &PyErr) -> bool {
    let of_devices = || py.import("torch")?.getattr("OutOfMemoryError");
    error.is_instance_of::<PyMemoryError>(py) || of_devices().is_ok_and(|class| error.is_instance(py, &class))
}
