//! NVRTC, NVIDIA's compiler as a library, for builds without nvcc.
#![expect(unsafe_code, reason = "the compiler is a C library")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::nvrtc::sys;

use crate::kernels::SOURCES;

/// Every function of NVRTC that this crate calls.
const SYMBOLS: [&str; 13] = [
    "nvrtcVersion",
    "nvrtcGetErrorString",
    "nvrtcGetNumSupportedArchs",
    "nvrtcGetSupportedArchs",
    "nvrtcCreateProgram",
    "nvrtcDestroyProgram",
    "nvrtcCompileProgram",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcGetPTXSize",
    "nvrtcGetPTX",
];

/// The first version that is known to support `--split-compile`, which compiles on all cores.
const PARALLEL: (i32, i32) = (13, 0);

/// NVRTC, loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nvrtc {
    pub(crate) version: (i32, i32),
}

impl Nvrtc {
    /// Loads NVRTC once, or gives the reason why it cannot be used.
    pub(crate) fn load() -> Result<Self, &'static str> {
        static LOADED: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        LOADED.get_or_init(try_load).as_ref().copied().map_err(String::as_str)
    }

    /// The newest architecture that NVRTC supports and a device of `capability` runs, as
    /// 10 · major + minor.
    pub(crate) fn newest_architecture_for(self, capability: u32) -> Result<u32, String> {
        let mut count: c_int = 0;
        // SAFETY: `load` checked the symbol. NVRTC writes one int to `count`, a local.
        check(unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) })?;
        let mut all = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: NVRTC writes as many ints as it just reported, and `all` has that many.
        check(unsafe { sys::nvrtcGetSupportedArchs(all.as_mut_ptr()) })?;
        let all = all.into_iter().filter_map(|arch| u32::try_from(arch).ok());
        all.filter(|arch| *arch <= capability).max().ok_or_else(|| {
            format!(
                "NVRTC {}.{} supports no architecture as old as {capability}",
                self.version.0, self.version.1
            )
        })
    }

    /// Compiles all kernels: to a cubin for `sm_…`, to PTX that ends with a zero byte for
    /// `compute_…`.
    pub(crate) fn compile(self, architecture: &str) -> Result<Vec<u8>, String> {
        self.compile_as(SOURCES[0].1, architecture)
    }

    /// As [`Self::compile`], with `source` in place of `kernels.cu`.
    fn compile_as(self, source: &str, architecture: &str) -> Result<Vec<u8>, String> {
        let text = |text: &str| CString::new(text).expect("sources have no zero byte");
        let names = SOURCES.map(|(name, _)| text(name));
        let texts = SOURCES.map(|(name, header)| text(if name == SOURCES[0].0 { source } else { header }));
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (headers, includes) = (pointers(&texts[1..]), pointers(&names[1..]));
        let mut program = Program(ptr::null_mut());
        // SAFETY: NVRTC writes one handle to a field of a local. All texts end with a zero byte, and they
        // and the two lists, of the same length, outlive the call. NVRTC copies them.
        check(unsafe {
            sys::nvrtcCreateProgram(
                &raw mut program.0,
                texts[0].as_ptr(),
                names[0].as_ptr(),
                c_int::try_from(headers.len()).expect("few headers"),
                headers.as_ptr(),
                includes.as_ptr(),
            )
        })?;
        let mut options = vec![text(&format!("--gpu-architecture={architecture}")), text("--std=c++17")];
        if self.version >= PARALLEL {
            options.push(text("--split-compile=0"));
        }
        let count = c_int::try_from(options.len()).expect("few options");
        // SAFETY: the program was created above and is not destroyed yet. NVRTC reads `count` texts, which
        // end with a zero byte and outlive the call.
        let compiled = unsafe { sys::nvrtcCompileProgram(program.0, count, pointers(&options).as_ptr()) };
        check(compiled).map_err(|error| format!("{error}\n{}", program.log()))?;
        program.image(architecture.starts_with("sm_"))
    }
}

fn try_load() -> Result<Nvrtc, String> {
    // SAFETY: this loads a shared library and runs its initialisers. The names that cudarc tries are
    // those of NVRTC, whose initialisers are meant to be run by any process.
    if !unsafe { sys::is_culib_present() } {
        let name = if cfg!(windows) { "nvrtc64_130_0.dll" } else { "libnvrtc.so" };
        return Err(format!("{name} was not found"));
    }
    // SAFETY: as above. The library was found, so this does not panic.
    let library = unsafe { sys::culib() };
    for symbol in SYMBOLS {
        // SAFETY: the symbol is only looked up. The pointer is neither called nor read.
        if unsafe { library.get::<*const c_void>(symbol.as_bytes()) }.is_err() {
            return Err(format!("NVRTC has no function {symbol}: install NVRTC of CUDA 12 or later"));
        }
    }
    let mut version = (0, 0);
    // SAFETY: the symbol was found above. NVRTC writes one int to each of two fields of a local.
    check(unsafe { sys::nvrtcVersion(&raw mut version.0, &raw mut version.1) })?;
    Ok(Nvrtc { version })
}

fn check(code: sys::nvrtcResult) -> Result<(), String> {
    if code == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: NVRTC accepts any code and returns a constant text that ends with a zero byte and lives
    // as long as the library, which is never unloaded.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(code)) };
    Err(format!("NVRTC: {} ({})", text.to_string_lossy(), code as u32))
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: `self` owns the program, which is not destroyed yet. NVRTC writes one size to `bytes`, a
        // local.
        if check(unsafe { sys::nvrtcGetProgramLogSize(self.0, &raw mut bytes) }).is_err() {
            return String::new();
        }
        let mut log = vec![0_u8; bytes];
        // SAFETY: as above. NVRTC writes as many bytes as it just reported, and the buffer has that many.
        let _ = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast::<c_char>()) };
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned()
    }

    fn image(&self, cubin: bool) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: `self` owns the program, which is not destroyed yet. NVRTC writes one size to `bytes`, a
        // local.
        check(unsafe {
            if cubin {
                sys::nvrtcGetCUBINSize(self.0, &raw mut bytes)
            } else {
                sys::nvrtcGetPTXSize(self.0, &raw mut bytes)
            }
        })?;
        let mut image = vec![0_u8; bytes];
        let into = image.as_mut_ptr().cast::<c_char>();
        // SAFETY: as above. NVRTC writes as many bytes as it just reported, and the buffer has that many.
        check(unsafe {
            if cubin { sys::nvrtcGetCUBIN(self.0, into) } else { sys::nvrtcGetPTX(self.0, into) }
        })?;
        Ok(image)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: nvrtcCreateProgram made the program, `self` owns it, and this destroys it once.
            let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of `kernels.cu` that instantiate the tensor-core attention kernels.
    const TILES: [&str; 6] = [
        "ATTEND_DIMS(",
        "DECODE_DIMS(",
        "HOPPER_DIMS(",
        "BACKWARD_DIMS(",
        "HOPPER_KEYS_DIMS(",
        "HOPPER_QUERIES_DIMS(",
    ];

    #[test]
    #[ignore = "needs NVIDIA's libnvrtc: scripts/check/cuda.sh has it"]
    fn nvrtc_compiles_the_sources_as_they_are_embedded() {
        let compiler = Nvrtc::load().unwrap();
        assert!(compiler.version >= (12, 0), "{compiler:?}");
        assert_eq!(compiler.newest_architecture_for(90), Ok(90));
        assert!(compiler.newest_architecture_for(10).is_err());
        // The assembler takes most of the time and is that of nvcc, so it gets only the small kernels.
        let ptx = compiler.compile("compute_90a").unwrap();
        assert_eq!(ptx.last(), Some(&0));
        let small: Vec<_> =
            SOURCES[0].1.lines().filter(|line| !TILES.iter().any(|tiles| line.starts_with(tiles))).collect();
        let cubin = compiler.compile_as(&small.join("\n"), "sm_90a").unwrap();
        assert_eq!(cubin[..4], *b"\x7fELF");
        let has =
            |image: &[u8], kernel: &str| image.windows(kernel.len()).any(|name| name == kernel.as_bytes());
        for kernel in ["attend_bf16_128", "decode_f16_64", "hopper_bf16_128", "hopper_keys_f16_64"] {
            assert!(has(&ptx, kernel) && !has(&cubin, kernel), "{kernel}");
        }
        for kernel in ["attend_f32", "merge_parts", "repack"] {
            assert!(has(&ptx, kernel) && has(&cubin, kernel), "{kernel}");
        }
        let error = compiler.compile("sm_1").unwrap_err();
        assert!(error.contains("NVRTC"), "{error}");
    }
}
