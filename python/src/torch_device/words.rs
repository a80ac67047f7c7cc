//! Bytes of the host for PyTorch, by DLPack, without a copy where its kernels can read them.

use std::ffi::c_void;
use std::sync::Arc;

use bytes::Bytes;
use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::python::{DlpackExporter, ExportRequest, export_dlpack};
use dlpark::{DlpackFlags, Managed, ManagedTensorBase};
use pyo3::prelude::*;

use crate::spare;

/// Where vector instructions of any processor read.
const ALIGNMENT: usize = 16;

/// Bytes that are only read, as numbers of 32 bits, whatever they stand for.
#[pyclass(frozen)]
pub(super) struct Words(Bytes);

impl Words {
    /// `data`, with zeros behind it up to a whole number of words; `None` without memory for a
    /// copy.
    pub(super) fn new(data: Bytes) -> Option<Self> {
        if data.len().is_multiple_of(4) && data.as_ptr().addr().is_multiple_of(ALIGNMENT) {
            return Some(Self(data));
        }
        let bytes = data.len().next_multiple_of(ALIGNMENT);
        let copy = spare::filled(bytes, |copy| {
            copy.extend_from_slice(&data);
            copy.resize(bytes, 0);
        });
        copy.map(Self)
    }

    fn managed<M: ManagedTensorBase>(&self) -> PyResult<Managed<M>> {
        let count = i64::try_from(self.0.len() / 4).unwrap_or(i64::MAX);
        let first: *mut c_void = self.0.as_ptr().cast_mut().cast();
        let mut tensor = Dynamic::new(&[count][..], &[1][..])
            .initialize_as::<M>(Arc::new(self.0.clone()))
            .map_err(|error| pyo3::exceptions::PyBufferError::new_err(error.to_string()))?;
        tensor.set_data(first).set_device(DLDevice::CPU).set_dtype(DLDataType::F32);
        // SAFETY: the owner keeps the bytes, which are aligned and as many as the shape says. The Python
        // code only reads them: a buffer that is written to is a copy.
        Ok(unsafe { tensor.finish() })
    }
}

impl DlpackExporter for Words {
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
impl Words {
    fn __dlpack_device__(&self) -> (u32, i32) {
        self.device().into()
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
}
