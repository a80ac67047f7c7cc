//! Sizes, indices and types of the library as kernels and the API take them.

use kyklos_shaders::{MAX_HEAD_DIM, Storage};

use crate::{Dtype, Error, Result};

/// What kernels call a dtype.
pub(super) fn storage(dtype: Dtype) -> Storage {
    match dtype {
        Dtype::F32 => Storage::F32,
        Dtype::F16 => Storage::F16,
        Dtype::Bf16 => Storage::Bf16,
    }
}

/// Bytes as the 64-bit sizes of the API.
pub(super) fn wide(bytes: usize) -> u64 {
    bytes as u64
}

/// An index for a kernel. Kernels count 16-byte units in u32; what they bind is far below that.
pub(super) fn narrow(what: &str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| {
        Error::request(format!("{what} is {value}"), "kernels count in 32 bits: use smaller pieces")
    })
}

/// Head dims are checked by the problem; a backend used alone says so itself.
pub(super) fn checked_dim(dim: usize) -> Result<u32> {
    match u32::try_from(dim) {
        Ok(dim) if dim > 0 && dim.is_multiple_of(8) && dim <= MAX_HEAD_DIM => Ok(dim),
        _ => Err(Error::request(
            format!("head dim {dim} is not supported"),
            format!("use a multiple of 8 up to {}", MAX_HEAD_DIM),
        )),
    }
}
