//! Types, extents and places in the words of the Python code.

use kyklos::Dtype;
use kyklos::backend::{Layout, Operand, StateShape};
use pyo3::prelude::*;

use super::TorchBuffer;

pub(super) type Tuple4 = (usize, usize, usize, usize);

pub(super) fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        Dtype::Bf16 => "bfloat16",
    }
}

pub(super) fn place(Layout { offset, batch_stride, row_stride, head_stride }: Layout) -> Tuple4 {
    (offset, batch_stride, row_stride, head_stride)
}

pub(super) fn placed<'py>(
    py: Python<'py>,
    Operand { buffer, layout }: &Operand<'_, TorchBuffer>,
) -> PyResult<(Bound<'py, PyAny>, Tuple4)> {
    Ok((buffer.tensor(py)?.clone(), place(*layout)))
}

pub(super) fn extents(StateShape { batch, rows, heads, dim }: StateShape) -> Tuple4 {
    (batch, rows, heads, dim)
}

pub(super) fn is_empty(StateShape { batch, rows, heads, dim }: StateShape) -> bool {
    batch * rows * heads * dim == 0
}
