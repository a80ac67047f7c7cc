//! cudarc's bindings, and a function that they have under the name of a newer driver only.

use std::ffi::c_float;

pub(super) use cudarc::driver::sys::{CUevent, CUevent_flags_enum, CUevent_st, CUresult, CUstream_st};
pub(super) use cudarc::driver::sys::{
    cuEventCreate, cuEventDestroy_v2, cuEventQuery, cuEventRecord, cuStreamWaitEvent,
};

type ElapsedTime = unsafe extern "C" fn(*mut c_float, CUevent, CUevent) -> CUresult;

/// The milliseconds between two events. Every driver has it; its second version, which the bindings
/// have, is of CUDA 12.8.
///
/// # Safety
/// `ms` is valid for a write, and the events exist.
#[expect(non_snake_case, reason = "the driver's name")]
pub(super) unsafe fn cuEventElapsedTime(ms: *mut c_float, from: CUevent, to: CUevent) -> CUresult {
    // SAFETY: `load` found the library and this function before anything else here is called.
    let function = unsafe { cudarc::driver::sys::culib().get::<ElapsedTime>(b"cuEventElapsedTime") };
    match function {
        // SAFETY: the driver declares the function so, and the caller guarantees the rest.
        Ok(function) => unsafe { function(ms, from, to) },
        Err(_) => CUresult::CUDA_ERROR_NOT_FOUND,
    }
}
