//! Loading the driver.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
use kyklos::machine::can_load_drivers;

use super::call::check;
use super::error::{Result, Unavailable};

/// Every function of the driver that this crate calls. Drivers have all of them since CUDA 12.
const SYMBOLS: [&str; 45] = [
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
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuPointerGetAttribute",
    "cuMemGetAddressRange_v2",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyPeerAsync",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuStreamGetCtx",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime",
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

/// Loads the driver once and checks that it has every function of [`SYMBOLS`].
pub(crate) fn load() -> std::result::Result<(), Unavailable> {
    static LOADED: OnceLock<std::result::Result<(), Unavailable>> = OnceLock::new();
    LOADED.get_or_init(try_load).clone()
}

fn try_load() -> std::result::Result<(), Unavailable> {
    // SAFETY: this loads a shared library and runs its initialisers. The names that cudarc tries are
    // those of NVIDIA's driver, whose initialisers are meant to be run by any process.
    if !unsafe { sys::is_culib_present() } {
        if !can_load_drivers() {
            let why =
                "CUDA cannot be used: this program is static (musl), and a static program loads no driver";
            return Err(Unavailable { why: why.to_owned(), remedy: "use a build for glibc".into() });
        }
        let name = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
        let why = format!("CUDA cannot be used: {name} was not found");
        return Err(Unavailable { why, remedy: "install NVIDIA's driver".into() });
    }
    // SAFETY: as above. The library was found, so this does not panic.
    let library = unsafe { sys::culib() };
    for symbol in SYMBOLS {
        // SAFETY: the symbol is only looked up. The pointer is neither called nor read.
        if unsafe { library.get::<*const c_void>(symbol.as_bytes()) }.is_err() {
            let why = format!("CUDA cannot be used: the driver has no function {symbol}");
            return Err(Unavailable { why, remedy: "install a newer driver".into() });
        }
    }
    // SAFETY: cuInit is the first call and takes no pointer. It may be called more than once in a
    // process.
    check("cuInit", unsafe { sys::cuInit(0) }).map_err(Unavailable::from)
}

/// The CUDA version that the driver supports, as 1000 · major + 10 · minor.
pub(crate) fn version() -> Result<u32> {
    let mut version: c_int = 0;
    // SAFETY: the driver writes one int to `version`, a local. The call needs no context.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(version.unsigned_abs())
}

/// A version of CUDA as text: 13.0 for 13000.
pub(crate) fn version_text(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The sources of this folder without their tests.
    fn sources() -> Vec<String> {
        let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/driver")).unwrap();
        let read = |path| std::fs::read_to_string(path).unwrap();
        let texts = folder.map(|entry| read(entry.unwrap().path()));
        texts.map(|text| text.split("#[cfg(test)]").next().unwrap().to_owned()).collect()
    }

    /// The identifier at the beginning of `text`.
    fn identifier(text: &str) -> &str {
        text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap()
    }

    /// cudarc panics at a call whose symbol is missing, so `load` has to look for all of them.
    #[test]
    fn load_looks_for_every_function_that_is_called_and_for_no_other() {
        let sources = sources();
        let after = sources.iter().flat_map(|text| text.split("sys::cu").skip(1)).map(identifier);
        let called: BTreeSet<_> = after.filter(|name| name.starts_with(char::is_uppercase)).collect();
        let listed: BTreeSet<_> = SYMBOLS.iter().map(|name| &name[2..]).collect();
        assert_eq!(called, listed);
    }

    #[test]
    fn an_error_names_the_function_that_was_called() {
        let mut checked = 0;
        for text in sources() {
            for part in text.split("check(\"cu").skip(1) {
                let call = part.split("sys::cu").nth(1).unwrap();
                assert_eq!(identifier(part), identifier(call));
                checked += 1;
            }
        }
        assert_eq!(checked, SYMBOLS.len(), "each function is called in one place");
    }
}
