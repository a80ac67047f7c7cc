//! NVRTC, NVIDIA's compiler as a library: for builds that had no nvcc.
#![expect(unsafe_code, reason = "the compiler is a C library")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::nvrtc::sys;

use crate::kernels::SOURCES;

/// What this crate calls.
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

/// From this version on it is known to compile on all cores if it is told to.
const PARALLEL: (i32, i32) = (13, 0);

/// The compiler that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nvrtc {
    pub(crate) version: (i32, i32),
}

impl Nvrtc {
    /// Finds it, once. Says why it cannot be used.
    pub(crate) fn find() -> Result<Self, &'static str> {
        static FOUND: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
        FOUND.get_or_init(find).as_ref().copied().map_err(String::as_str)
    }

    /// The newest architecture that it compiles for and a device of `capability` runs, in the same numbers.
    pub(crate) fn newest_architecture_for(self, capability: u32) -> Result<u32, String> {
        let mut count: c_int = 0;
        // SAFETY: the symbol is there; `count` is a local.
        check(unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) })?;
        let mut all = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: as many as the compiler said it writes.
        check(unsafe { sys::nvrtcGetSupportedArchs(all.as_mut_ptr()) })?;
        let all = all.into_iter().filter_map(|arch| u32::try_from(arch).ok());
        all.filter(|arch| *arch <= capability).max().ok_or_else(|| {
            format!(
                "NVRTC {}.{} knows no architecture as old as {capability}",
                self.version.0, self.version.1
            )
        })
    }

    /// Compiles all kernels: for `sm_…` a cubin, for `compute_…` PTX, which ends with a zero byte.
    pub(crate) fn compile(self, architecture: &str) -> Result<Vec<u8>, String> {
        self.compile_as(SOURCES[0].1, architecture)
    }

    /// The same of a `source` that is in the place of `kernels.cu`.
    fn compile_as(self, source: &str, architecture: &str) -> Result<Vec<u8>, String> {
        let text = |text: &str| CString::new(text).expect("sources have no zero byte");
        let names = SOURCES.map(|(name, _)| text(name));
        let texts = SOURCES.map(|(name, header)| text(if name == SOURCES[0].0 { source } else { header }));
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (headers, includes) = (pointers(&texts[1..]), pointers(&names[1..]));
        let mut program = Program(ptr::null_mut());
        // SAFETY: texts end with a zero byte and outlive the call; the counts are those of the lists.
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
        // SAFETY: as above.
        let compiled = unsafe { sys::nvrtcCompileProgram(program.0, count, pointers(&options).as_ptr()) };
        check(compiled).map_err(|error| format!("{error}\n{}", program.log()))?;
        program.image(architecture.starts_with("sm_"))
    }
}

fn find() -> Result<Nvrtc, String> {
    // SAFETY: this loads the compiler, whose initialisers do what NVIDIA has them do.
    if !unsafe { sys::is_culib_present() } {
        let name = if cfg!(windows) { "nvrtc64_130_0.dll" } else { "libnvrtc.so" };
        return Err(format!("{name} was not found"));
    }
    // SAFETY: as above; it is present.
    let library = unsafe { sys::culib() };
    for symbol in SYMBOLS {
        // SAFETY: only asked whether it is there.
        if unsafe { library.get::<*const c_void>(symbol.as_bytes()) }.is_err() {
            return Err(format!("NVRTC has no {symbol}: install that of CUDA 12 or later"));
        }
    }
    let mut version = (0, 0);
    // SAFETY: the symbol is there; both are locals.
    check(unsafe { sys::nvrtcVersion(&raw mut version.0, &raw mut version.1) })?;
    Ok(Nvrtc { version })
}

fn check(code: sys::nvrtcResult) -> Result<(), String> {
    if code == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: a text of the library's own.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(code)) };
    Err(format!("NVRTC: {} ({})", text.to_string_lossy(), code as u32))
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the program lives; `bytes` is a local.
        if check(unsafe { sys::nvrtcGetProgramLogSize(self.0, &raw mut bytes) }).is_err() {
            return String::new();
        }
        let mut log = vec![0_u8; bytes];
        // SAFETY: as many bytes as the compiler said it writes.
        let _ = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast::<c_char>()) };
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned()
    }

    fn image(&self, cubin: bool) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: the program lives; `bytes` is a local.
        check(unsafe {
            if cubin {
                sys::nvrtcGetCUBINSize(self.0, &raw mut bytes)
            } else {
                sys::nvrtcGetPTXSize(self.0, &raw mut bytes)
            }
        })?;
        let mut image = vec![0_u8; bytes];
        let into = image.as_mut_ptr().cast::<c_char>();
        // SAFETY: as many bytes as the compiler said it writes.
        check(unsafe {
            if cubin { sys::nvrtcGetCUBIN(self.0, into) } else { sys::nvrtcGetPTX(self.0, into) }
        })?;
        Ok(image)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by this library, and destroyed once.
            let _ = unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines of `kernels.cu` that make kernels for tiles.
    const TILES: [&str; 3] = ["ATTEND_DIMS(", "DECODE_DIMS(", "HOPPER_DIMS("];

    #[test]
    #[ignore = "needs NVIDIA's libnvrtc: scripts/check-cuda.sh has it"]
    fn nvrtc_compiles_the_sources_as_they_are_embedded() {
        let compiler = Nvrtc::find().unwrap();
        assert!(compiler.version >= (12, 0), "{compiler:?}");
        assert_eq!(compiler.newest_architecture_for(90), Ok(90));
        assert!(compiler.newest_architecture_for(10).is_err());
        // Its assembler is that of nvcc, and takes most of the time: it gets the small kernels.
        let ptx = compiler.compile("compute_90a").unwrap();
        assert_eq!(ptx.last(), Some(&0));
        let small: Vec<_> =
            SOURCES[0].1.lines().filter(|line| !TILES.iter().any(|tiles| line.starts_with(tiles))).collect();
        let cubin = compiler.compile_as(&small.join("\n"), "sm_90a").unwrap();
        assert_eq!(cubin[..4], *b"\x7fELF");
        let has =
            |image: &[u8], kernel: &str| image.windows(kernel.len()).any(|name| name == kernel.as_bytes());
        for kernel in ["attend_bf16_128", "decode_f16_64", "hopper_bf16_128"] {
            assert!(has(&ptx, kernel) && !has(&cubin, kernel), "{kernel}");
        }
        for kernel in ["attend_f32", "merge_parts", "repack"] {
            assert!(has(&ptx, kernel) && has(&cubin, kernel), "{kernel}");
        }
        let error = compiler.compile("sm_1").unwrap_err();
        assert!(error.contains("NVRTC"), "{error}");
    }
}
