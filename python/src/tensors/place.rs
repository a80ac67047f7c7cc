//! Where a rank reads arrays in place, and the order between its GPU and the streams of callers.

use std::ffi::c_void;
use std::sync::OnceLock;

use dlpark::ffi::{DLDevice, DLDeviceType};
use dlpark::python::consumer::stream;
use dlpark::python::{CudaStreamRequest, DlpackStream, ExportRequest, StreamArg};
use kyklos::backend::Device;
use kyklos::{Error, Result, Tensor};
use kyklos_cuda::{CallerStream, CudaBackend, CudaTensor};
use pyo3::prelude::*;

use crate::errors;

/// The device of a rank, as far as it reads arrays in place. Arrays in host memory are for every
/// rank.
#[derive(Debug)]
pub(crate) struct Place {
    device: Device,
    /// The stream for which other libraries make their arrays ready.
    ready: OnceLock<CallerStream>,
}

impl Place {
    pub(crate) fn new(device: Device) -> Self {
        Self { device, ready: OnceLock::new() }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The index of the rank's NVIDIA GPU. `None` on another device.
    pub(crate) fn gpu(&self) -> Option<usize> {
        gpu_of(&self.device)
    }

    /// Refuses an array in memory that this rank does not read.
    pub(crate) fn check(&self, name: &str, array: DLDevice) -> Result<()> {
        let DLDevice { device_type, device_id } = array;
        if device_type != DLDeviceType::CUDA {
            return Err(elsewhere(name, array));
        }
        let gpu = self.gpu();
        if gpu.is_some() && gpu == usize::try_from(device_id).ok() {
            return Ok(());
        }
        let own = gpu.map_or_else(|| self.device.info().name.clone(), |gpu| format!("cuda:{gpu}"));
        Err(Error::request(
            format!("{name} is on cuda:{device_id}, and this rank computes on {own}"),
            format!("move it to host memory, or form the group with device=\"cuda:{device_id}\""),
        ))
    }

    /// The stream for which another library makes an array on this GPU ready.
    pub(crate) fn ready(&self) -> Result<Ready<'_>> {
        let stream = match self.ready.get() {
            Some(stream) => stream,
            None => {
                let made = CallerStream::new(&self.device)?;
                self.ready.get_or_init(|| made)
            }
        };
        Ok(Ready { device: &self.device, stream })
    }
}

/// The error of an array in memory that no rank reads, or that is not read for this purpose.
pub(crate) fn elsewhere(name: &str, DLDevice { device_type, device_id }: DLDevice) -> Error {
    let place = match device_type {
        DLDeviceType::CUDA => format!("cuda:{device_id}"),
        DLDeviceType(other) => format!("device type {other} of DLPack"),
    };
    Error::request(format!("{name} is on {place}"), "move it to host memory")
}

/// A stream that waits for what writes the arrays of a call.
pub(crate) struct Ready<'a> {
    pub(crate) device: &'a Device,
    pub(crate) stream: &'a CallerStream,
}

// SAFETY: the stream is one of this device, which the request is for, and lives as long as `Place`.
// The argument follows DLPack's convention for CUDA.
unsafe impl DlpackStream for Ready<'_> {
    fn as_python_arg(&self, _: Python<'_>, _: DLDevice) -> PyResult<StreamArg> {
        Ok(stream::cuda(self.stream.handle()))
    }

    unsafe fn wait_for_producer(&self, _: DLDevice, producer: *mut c_void) -> PyResult<bool> {
        // SAFETY: the caller guarantees that the stream exists; it is used during this call only.
        let producer = unsafe { CallerStream::from_raw(producer) };
        let ordered = self.stream.wait_for(&producer, self.device);
        ordered.map(|()| true).map_err(|error| Python::attach(|py| errors::of_call(py, &error)))
    }
}

/// A tensor on a GPU that another library has taken. When that library releases it, the memory is
/// used for something else after what its stream had been given by then.
pub(crate) struct Taken {
    tensor: Tensor,
    /// `None` where that library orders its streams itself.
    stream: Option<CallerStream>,
}

impl Taken {
    /// `tensor`, for whoever sent `request`: his stream waits for the elements.
    pub(crate) fn new(tensor: &Tensor, request: &ExportRequest<'_>) -> PyResult<Self> {
        let handle = match request.cuda_stream()? {
            CudaStreamRequest::NoSync => None,
            CudaStreamRequest::Omitted | CudaStreamRequest::LegacyDefault => Some(std::ptr::null_mut()),
            CudaStreamRequest::PerThreadDefault => Some(std::ptr::without_provenance_mut(2)),
            CudaStreamRequest::Pointer(address) => Some(std::ptr::with_exposed_provenance_mut(address)),
        };
        // SAFETY: DLPack's contract for the stream of a request, and the documentation of `Array`: it
        // exists until the importer has released the array.
        let stream = handle.map(|handle| unsafe { CallerStream::from_raw(handle) });
        Ok(Self { tensor: tensor.clone(), stream })
    }

    /// Lets the stream of the request wait for the elements.
    pub(crate) fn make_ready(&self, py: Python<'_>) -> PyResult<()> {
        let Some(stream) = &self.stream else { return Ok(()) };
        py.detach(|| self.tensor.make_wait(stream)).map_err(|error| errors::of_call(py, &error))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(stream) = &self.stream
            && self.tensor.keep_for(stream).is_err()
        {
            // What still reads the memory is unknown, so it is never used again.
            std::mem::forget(self.tensor.clone());
        }
    }
}

/// The index of the NVIDIA GPU that `device` is.
pub(crate) fn gpu_of(device: &Device) -> Option<usize> {
    device.backend::<CudaBackend>().map(CudaBackend::ordinal)
}
