//! Loading the driver.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::call::check;
use super::error::{Result, Unavailable};

/// What this crate calls. All of it is in drivers since CUDA 12.
const SYMBOLS: [&str; 38] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuTensorMapEncodeTiled",
    "cuLaunchKernel",
    "cuGraphCreate",
    "cuGraphAddKernelNode_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
];

/// Loads the driver, once. Says why it cannot.
pub(crate) fn load() -> std::result::Result<(), Unavailable> {
    static LOADED: OnceLock<std::result::Result<(), Unavailable>> = OnceLock::new();
    LOADED.get_or_init(try_load).clone()
}

fn try_load() -> std::result::Result<(), Unavailable> {
    // SAFETY: this loads the driver, whose initialisers do what NVIDIA has them do.
    if !unsafe { sys::is_culib_present() } {
        let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
        let why = format!("CUDA cannot be used: {name} was not found");
        return Err(Unavailable { why, remedy: "install NVIDIA's driver" });
    }
    // SAFETY: as above; it is present.
    let library = unsafe { sys::culib() };
    for symbol in SYMBOLS {
        // SAFETY: only asked whether it is there.
        if unsafe { library.get::<*const c_void>(symbol.as_bytes()) }.is_err() {
            let why = format!("CUDA cannot be used: the driver has no {symbol}");
            return Err(Unavailable { why, remedy: "install a newer driver" });
        }
    }
    call!(cuInit(0)).map_err(Unavailable::from)
}

/// The version of CUDA that the driver speaks, as 1000 · major + 10 · minor.
pub(crate) fn version() -> Result<u32> {
    let mut version: c_int = 0;
    call!(cuDriverGetVersion(&raw mut version))?;
    Ok(version.unsigned_abs())
}
