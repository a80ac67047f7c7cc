//! Result codes of the driver as errors.

use std::ffi::{CStr, c_char};
use std::ptr;

use cudarc::driver::sys;

use super::error::{DriverError, Result};

/// `Ok` for `CUDA_SUCCESS`, else an error with the name of the function, the code, and the driver's
/// own text.
pub(super) fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let words = |ask: unsafe fn(sys::CUresult, *mut *const c_char) -> sys::CUresult| {
        let mut text: *const c_char = ptr::null();
        // SAFETY: `ask` is cuGetErrorName or cuGetErrorString. Both accept any code and write one pointer
        // to `text`, which is valid for the call. They need no context.
        let _ = unsafe { ask(code, &raw mut text) };
        // SAFETY: a pointer that is not null points to a constant of the driver, which ends with a zero
        // byte and lives as long as the process.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    let unknown = || "the driver has no text for this code".to_owned();
    Err(DriverError {
        call,
        code: code as u32,
        name: words(sys::cuGetErrorName).unwrap_or_else(|| format!("{code:?}")),
        text: words(sys::cuGetErrorString).unwrap_or_else(unknown),
    })
}
