//! Memory of PyTorch.

use pyo3::prelude::*;

/// A one-dimensional uint8 tensor.
#[derive(Debug)]
pub(crate) struct TorchBuffer {
    /// `None` while it is dropped.
    tensor: Option<Py<PyAny>>,
    /// Whether nothing else reads the memory, so that it can be written to.
    is_own: bool,
}

impl TorchBuffer {
    /// Memory that this buffer alone uses, if `is_own`; else it is only read.
    pub(crate) fn new(tensor: Py<PyAny>, is_own: bool) -> Self {
        Self { tensor: Some(tensor), is_own }
    }

    /// The tensor, to be read.
    pub(crate) fn tensor<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        // Always there until `drop`.
        self.tensor.as_ref().expect("a buffer has its tensor").bind(py)
    }

    /// The tensor, to be written to: a copy of the memory if something else reads it.
    pub(crate) fn tensor_mut<'py>(&mut self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        if !self.is_own {
            self.tensor = Some(self.tensor(py).call_method0("clone")?.unbind());
            self.is_own = true;
        }
        Ok(self.tensor(py))
    }

    /// Another handle of the same memory. Both are only read from now on.
    pub(crate) fn share(&mut self) -> Self {
        self.is_own = false;
        Python::attach(|py| Self::new(self.tensor(py).clone().unbind(), false))
    }
}

impl Drop for TorchBuffer {
    fn drop(&mut self) {
        // Without the interpreter, which then has ended, the memory ends with the process.
        let tensor = self.tensor.take();
        let _ = Python::try_attach(|_| drop(tensor));
    }
}
