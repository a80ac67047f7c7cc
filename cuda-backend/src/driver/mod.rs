//! The driver API as values that clean up after themselves. Here, in `driver/` and in `compiler.rs` is all that is unsafe.
//!
//! Bindings are cudarc's, loaded at run time; it panics where a library or a symbol is missing, so [`load`] looks for
//! all of them first, and nothing else is called before it. Every call makes its context current: which thread calls
//! does not matter.
#![expect(unsafe_code, reason = "the driver is a C library")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use crate::devices::{Unavailable, failed};

type Result<T> = std::result::Result<T, Fault>;

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

/// Calls the driver; an error keeps the name of the call.
macro_rules! call {
    ($name:ident ( $($argument:expr),* $(,)? )) => {
        // SAFETY: `load` found the symbol. Handles are those of values that live, each of which destroys its own once;
        // pointers are to locals or to memory that the value owns, of the sizes that are passed.
        check(stringify!($name), unsafe { sys::$name($($argument),*) })
    };
}

mod error;
mod graph;
mod memory;
mod module;
mod stream;

pub(crate) use error::Fault;
pub(crate) use graph::Graph;
pub(crate) use memory::{InFlight, Memory, Pinned};
pub(crate) use module::{Function, Launch, Module, encode};
pub(crate) use stream::{Event, Stream};

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
    call!(cuInit(0)).map_err(failed)
}

/// The version of CUDA that the driver speaks, as 1000 · major + 10 · minor.
pub(crate) fn version() -> Result<u32> {
    let mut version: c_int = 0;
    call!(cuDriverGetVersion(&raw mut version))?;
    Ok(version.unsigned_abs())
}

pub(crate) fn device_count() -> Result<usize> {
    let mut count: c_int = 0;
    call!(cuDeviceGetCount(&raw mut count))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// What a device says of itself.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) name: String,
    /// Compute capability, 10 · major + minor.
    pub(crate) capability: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) integrated: bool,
    pub(crate) memory_bytes: usize,
}

pub(crate) fn facts(ordinal: usize) -> Result<Facts> {
    use sys::CUdevice_attribute_enum as Attribute;
    let device = device(ordinal)?;
    let attribute = |which| -> Result<u32> {
        let mut value: c_int = 0;
        call!(cuDeviceGetAttribute(&raw mut value, which, device))?;
        Ok(value.unsigned_abs())
    };
    let mut name = [0_u8; 256];
    call!(cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 255, device))?;
    let mut memory_bytes = 0;
    call!(cuDeviceTotalMem_v2(&raw mut memory_bytes, device))?;
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
    let [major, minor] = [
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ];
    Ok(Facts {
        name,
        capability: 10 * major + minor,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        memory_bytes,
    })
}

fn device(ordinal: usize) -> Result<sys::CUdevice> {
    let mut device = 0;
    call!(cuDeviceGet(&raw mut device, c_int::try_from(ordinal).unwrap_or(c_int::MAX)))?;
    Ok(device)
}

fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
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
    Err(Fault {
        call,
        code: code as u32,
        name: words(sys::cuGetErrorName).unwrap_or_else(|| format!("{code:?}")),
        text: words(sys::cuGetErrorString).unwrap_or_else(unknown),
    })
}

/// A handle of the driver's. The driver takes them from any thread.
#[derive(Debug)]
struct Handle<T>(*mut T);

// SAFETY: the driver API may be called from any thread, with any handle.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above, also at the same time.
unsafe impl<T> Sync for Handle<T> {}

/// A device's primary context: the one that a whole process shares.
#[derive(Debug)]
pub(crate) struct Context {
    raw: Handle<sys::CUctx_st>,
    device: sys::CUdevice,
}

impl Context {
    pub(crate) fn retain(ordinal: usize) -> Result<Arc<Self>> {
        let device = device(ordinal)?;
        let mut raw = ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&raw mut raw, device))?;
        Ok(Arc::new(Self { raw: Handle(raw), device }))
    }

    fn bind(&self) -> Result<()> {
        call!(cuCtxSetCurrent(self.raw.0))
    }

    /// Bytes of the device that nobody has.
    pub(crate) fn free_bytes(&self) -> Result<usize> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok(free)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Whoever has the context still calls with it is dropped before; a failure has nobody to be told to.
        let _ = call!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}
