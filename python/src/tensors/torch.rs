//! Tensors of PyTorch on a group's device of PyTorch, which are read where they are.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use kyklos::backend::{Device, DeviceBuffer};
use kyklos::{Dtype, Result, Tensor};
use pyo3::prelude::*;

use crate::torch_device::{CallersTensor, TorchBackend, TorchBuffer};

/// The memory of a caller's tensor, until it is dropped.
#[derive(Debug)]
pub(crate) struct TorchMemory {
    flat: Py<PyAny>,
    loan: Sender<()>,
}

/// `array`, if it is a tensor that `device` reads in place. Whoever holds it holds a clone of
/// `loan`.
pub(crate) fn adopt(
    device: &Device,
    array: &Bound<'_, PyAny>,
    loan: &Sender<()>,
) -> Result<Option<(Arc<TorchMemory>, CallersTensor)>> {
    let Some(backend) = device.backend::<TorchBackend>() else { return Ok(None) };
    let adopted = backend.adopt(array)?;
    Ok(adopted.map(|(flat, of)| (Arc::new(TorchMemory { flat, loan: loan.clone() }), of)))
}

/// `array` in host memory, if it is a mask or bias of `device` that is not read where it is. With
/// `some_in_place` numbers whose rows end on a 4-byte boundary are.
pub(crate) fn rows_on_host<'py>(
    device: &Device,
    array: &Bound<'py, PyAny>,
    some_in_place: bool,
) -> Result<Option<Bound<'py, PyAny>>> {
    match device.backend::<TorchBackend>() {
        Some(backend) => backend.rows_on_host(array, some_in_place),
        None => Ok(None),
    }
}

/// The tensor `[batch, tokens, heads, dim]` in adopted memory.
pub(crate) fn tensor(
    shape: [usize; 4],
    strides: [usize; 4],
    dtype: Dtype,
    memory: &Arc<TorchMemory>,
    device: &Device,
) -> Result<Tensor> {
    let reach = match shape.contains(&0) {
        true => 0,
        false => 1 + shape.iter().zip(&strides).map(|(extent, stride)| (extent - 1) * stride).sum::<usize>(),
    };
    let flat = Python::attach(|py| memory.flat.clone_ref(py));
    let buffer = TorchBuffer::borrowed(flat, memory.loan.clone());
    Tensor::from_buffer(shape, strides, dtype, device, DeviceBuffer::new(buffer), reach)
}

/// The elements of a dense tensor as a tensor of PyTorch; `None` if they are not on a device of
/// PyTorch.
pub(crate) fn result(tensor: &Tensor) -> Result<Option<Py<PyAny>>> {
    let Some(backend) = tensor.device().and_then(|device| device.backend::<TorchBackend>()) else {
        return Ok(None);
    };
    let result = |buffer: &TorchBuffer| backend.result(buffer, tensor.dtype(), &tensor.shape());
    tensor.with_buffer(result).transpose()
}
