//! Memory of PyTorch.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use pyo3::prelude::*;

/// A one-dimensional uint8 tensor.
#[derive(Debug)]
pub(crate) struct TorchBuffer {
    /// `None` while it is dropped.
    tensor: Option<Py<PyAny>>,
    /// Whether nothing else reads the memory, so that it can be written to.
    is_own: bool,
    /// Whether its contents are zeros that are not written yet: of a running state that is empty.
    is_zero: AtomicBool,
    /// Of a caller's memory: shows that it is in use.
    loan: Option<Sender<()>>,
}

impl TorchBuffer {
    /// Memory that this buffer alone uses, if `is_own`; else it is only read.
    pub(crate) fn new(tensor: Py<PyAny>, is_own: bool) -> Self {
        Self { tensor: Some(tensor), is_own, is_zero: AtomicBool::new(false), loan: None }
    }

    /// Memory of a caller, which is only read. `loan` is dropped when it is no longer in use.
    pub(crate) fn borrowed(tensor: Py<PyAny>, loan: Sender<()>) -> Self {
        let mut buffer = Self::new(tensor, false);
        buffer.loan = Some(loan);
        buffer
    }

    fn raw<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        // Always there until `drop`.
        self.tensor.as_ref().expect("a buffer has its tensor").bind(py)
    }

    /// The tensor, to be read.
    pub(crate) fn tensor<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        if self.is_zero.swap(false, Ordering::Relaxed) {
            self.raw(py).call_method0("zero_")?;
        }
        Ok(self.raw(py))
    }

    /// The tensor, to be written to: a copy of the memory if something else reads it.
    pub(crate) fn tensor_mut<'py>(&mut self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        if !self.is_own {
            self.tensor = Some(self.tensor(py)?.call_method0("clone")?.unbind());
            self.is_own = true;
            self.loan = None;
        }
        self.tensor(py)
    }

    /// From now on it counts as zeros.
    pub(crate) fn make_zero(&mut self, py: Python<'_>) -> PyResult<()> {
        self.tensor_mut(py)?;
        self.is_zero.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The tensor, to be overwritten, and whether it counts as zeros that are not written: it no
    /// longer does.
    pub(crate) fn overwrite<'py>(&mut self, py: Python<'py>) -> PyResult<(bool, &Bound<'py, PyAny>)> {
        let is_zero = self.is_zero.swap(false, Ordering::Relaxed);
        Ok((is_zero, self.tensor_mut(py)?))
    }

    /// Another handle of the same memory. Both are only read from now on.
    pub(crate) fn share(&mut self) -> Self {
        self.is_own = false;
        let mut other = Python::attach(|py| Self::new(self.raw(py).clone().unbind(), false));
        other.loan.clone_from(&self.loan);
        other.is_zero.store(self.is_zero.load(Ordering::Relaxed), Ordering::Relaxed);
        other
    }
}

impl Drop for TorchBuffer {
    fn drop(&mut self) {
        // Without the interpreter, which then has ended, the memory ends with the process.
        let tensor = self.tensor.take();
        let _ = Python::try_attach(|_| drop(tensor));
    }
}
