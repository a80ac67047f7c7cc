//! Calls of the driver.

use std::ffi::{CStr, c_char};
use std::ptr;

use cudarc::driver::sys;

use super::error::{DriverError, Result};

/// Calls the driver; an error keeps the name of the call.
macro_rules! call {
    ($name:ident ( $($argument:expr),* $(,)? )) => {
        // SAFETY: `load` found the symbol. Handles are those of values that live, each of which destroys its own once;
        // pointers are to locals or to memory that the value owns, of the sizes that are passed.
        check(stringify!($name), unsafe { sys::$name($($argument),*) })
    };
}

pub(super) fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let words = |ask: unsafe fn(sys::CUresult, *mut *const c_char) -> sys::CUresult| {
        let mut text: *const c_char = ptr::null();
        // SAFETY: the driver writes the address of a text of its own, or null.
        unsafe {
            let _ = ask(code, &raw mut text);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let unknown = || "a code that the driver has no words for".to_owned();
    Err(DriverError {
        call,
        code: code as u32,
        name: words(sys::cuGetErrorName).unwrap_or_else(|| format!("{code:?}")),
        text: words(sys::cuGetErrorString).unwrap_or_else(unknown),
    })
}
