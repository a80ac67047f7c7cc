//! Conversions of the library's sizes, indices and types to those of kernels and of the API.

use kyklos_shaders::{MAX_HEAD_DIM, Storage};

use crate::error::{Error, Result};
use kyklos_plan::Dtype;

/// The storage type of kernels for a dtype.
pub(super) fn storage(dtype: Dtype) -> Storage {
    match dtype {
        Dtype::F32 => Storage::F32,
        Dtype::F16 => Storage::F16,
        Dtype::Bf16 => Storage::Bf16,
    }
}

/// Bytes as a 64-bit size of the API.
pub(super) fn wide(bytes: usize) -> u64 {
    bytes as u64
}

/// A number for a kernel, which counts in u32; bindings are far smaller than 2^32 units of 16
/// bytes.
pub(super) fn narrow(what: &str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| {
        Error::request(format!("{what} is {value}"), "kernels count in 32 bits: use smaller pieces")
    })
}

/// A head dim for which kernels exist. [`AttentionProblem`](crate::AttentionProblem) checks it too;
/// this function is for direct callers of the backend.
pub(super) fn checked_dim(dim: usize) -> Result<u32> {
    match u32::try_from(dim) {
        Ok(dim) if dim > 0 && dim.is_multiple_of(8) && dim <= MAX_HEAD_DIM => Ok(dim),
        _ => Err(Error::request(
            format!("head dim {dim} is not supported"),
            format!("use a multiple of 8 up to {}", MAX_HEAD_DIM),
        )),
    }
}
