//! The image of the kernels for a device: embedded in this library, from the cache, or compiled by
//! NVRTC.

use std::path::{Path, PathBuf};

use super::cache;
use super::nvrtc::Nvrtc;
use crate::driver::{Unavailable, version_text};
use crate::kernels::SOURCES;

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Machine code or PTX of the kernels, for one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    /// A cubin, or PTX that ends with a zero byte.
    pub(crate) bytes: Vec<u8>,
    /// Architecture and source of the image, for display.
    pub(crate) origin: String,
    /// Whether it has the kernels for Hopper.
    pub(crate) wgmma: bool,
}

/// The architecture that has the kernels for Hopper. Its code runs on no other device.
const HOPPER: &str = "sm_90a";

/// Why there is no image for a device, with a remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoImage(pub(crate) String);

/// The images that the build compiled.
#[derive(Clone, Copy, Debug)]
struct Embedded<'a> {
    /// The version of the toolkit that compiled them, as 1000 · major + 10 · minor.
    toolkit: u32,
    /// Architectures, and their images, deflated. None if the build had no nvcc.
    images: &'a [(&'a str, &'a [u8])],
}

/// Where the kernels for a device come from.
#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    Embedded(&'a str, &'a [u8]),
    /// NVRTC, for this architecture (10 · major + minor): machine code if it is the device's own,
    /// else PTX.
    Compiler(Nvrtc, u32),
}

/// Whether there are kernels for a device of this compute capability (10 · major + minor) that this
/// driver loads. Compiles nothing.
///
/// # Errors
/// What is missing, and the driver that would be new enough.
pub(crate) fn check(capability: u32, driver: u32) -> Result<(), Unavailable> {
    source(capability, driver).map(drop)
}

/// The image for a device of this compute capability and this version of the driver. `cache`:
/// folder for images that NVRTC compiled.
pub(crate) fn image(capability: u32, driver: u32, cache: Option<&Path>) -> Result<Image, NoImage> {
    let (compiler, newest) = match source(capability, driver).map_err(|why| NoImage(why.to_string()))? {
        Source::Embedded(name, packed) => {
            let bytes = miniz_oxide::inflate::decompress_to_vec_zlib(packed)
                .map_err(|error| NoImage(format!("the embedded kernels are damaged: {error}")))?;
            return Ok(Image { bytes, origin: name.to_owned(), wgmma: name == HOPPER });
        }
        Source::Compiler(compiler, newest) => (compiler, newest),
    };
    let architecture = match (newest == capability, newest) {
        (true, 90) => HOPPER.to_owned(),
        (true, _) => format!("sm_{newest}"),
        (false, _) => format!("compute_{newest}"),
    };
    let wgmma = architecture == HOPPER;
    // The same text for an image from the cache: sessions compare it to see whether the devices of
    // their ranks differ.
    let (major, minor) = compiler.version;
    let origin = format!("{architecture} by NVRTC {major}.{minor}");
    let file = cache.map(|folder| cache_file(folder, compiler, &architecture));
    if let Some(bytes) = file.as_deref().and_then(cache::read) {
        return Ok(Image { bytes, origin, wgmma });
    }
    let bytes = compiler.compile(&architecture).map_err(NoImage)?;
    if let Some(file) = file {
        // If the write fails, the next start compiles again. That is no reason to fail now.
        let _ = cache::write(&file, &bytes);
    }
    Ok(Image { bytes, origin, wgmma })
}

/// The embedded image for a device, or else NVRTC, if the driver loads what it makes.
fn source(capability: u32, driver: u32) -> Result<Source<'static>, Unavailable> {
    let image = embedded(capability, EMBEDDED.images);
    let built =
        image.map(|(name, _)| Code { toolkit: EMBEDDED.toolkit, is_machine_code: name.starts_with("sm_") });
    if let (Some((name, packed)), true) = (image, built.is_some_and(|code| code.runs_with(driver))) {
        return Ok(Source::Embedded(name, packed));
    }
    let compiler = Nvrtc::load().map_err(str::to_owned);
    let compiled = compiler.and_then(|compiler| {
        let newest = compiler.newest_architecture_for(capability)?;
        let (major, minor) = compiler.version;
        let toolkit = 1000 * major.unsigned_abs() + 10 * minor.unsigned_abs();
        Ok((Source::Compiler(compiler, newest), Code { toolkit, is_machine_code: newest == capability }))
    });
    match compiled {
        Ok((source, code)) if code.runs_with(driver) => Ok(source),
        other => Err(no_kernels(driver, built, other.map(|(_, code)| code))),
    }
}

/// What a compiler makes for a device.
#[derive(Clone, Copy, Debug)]
struct Code {
    /// The version of its toolkit.
    toolkit: u32,
    /// Else PTX.
    is_machine_code: bool,
}

impl Code {
    /// The oldest driver that loads it: of the same major version for machine code, as new as the
    /// toolkit for PTX.
    fn driver(self) -> u32 {
        if self.is_machine_code { self.toolkit / 1000 * 1000 } else { self.toolkit }
    }

    fn runs_with(self, driver: u32) -> bool {
        self.driver() <= driver
    }
}

/// Why a driver has no kernels: it is too old for those that were `built` in, if there are any, and
/// for what NVRTC would make, if it can be used.
fn no_kernels(driver: u32, built: Option<Code>, compiled: Result<Code, String>) -> Unavailable {
    let needs = |code: Code| format!("need CUDA {}", version_text(code.driver()));
    let ours = match built {
        None => "this library was built without nvcc".to_owned(),
        Some(code) => format!("the kernels in this library {}", needs(code)),
    };
    let others = match &compiled {
        Ok(code) => format!("kernels by NVRTC {} {}", version_text(code.toolkit), needs(*code)),
        Err(why) => format!("NVRTC cannot be used: {why}"),
    };
    let oldest = built.into_iter().chain(compiled.as_ref().ok().copied()).map(Code::driver).min();
    let newer_driver = oldest.map(|needed| match needed {
        13_000 => "install NVIDIA's driver 580 or later".to_owned(),
        _ => format!("install a driver that supports CUDA {}", version_text(needed)),
    });
    let compiler = match compiled {
        Ok(Code { is_machine_code: false, .. }) => {
            format!("install NVRTC of CUDA {} or earlier", version_text(driver))
        }
        _ => format!("install NVRTC of CUDA {}", driver / 1000),
    };
    let with_nvcc =
        oldest.is_none().then(|| "build where nvcc is found (NVCC, CUDA_HOME or PATH)".to_owned());
    let remedies: Vec<_> = newer_driver.into_iter().chain([compiler]).chain(with_nvcc).collect();
    Unavailable {
        why: format!("the driver supports CUDA {}, {ours}, and {others}", version_text(driver)),
        remedy: remedies.join(", or ").into(),
    }
}

/// The best embedded image that runs on a device of this capability: a cubin for it, else one for
/// an older device of its generation, else PTX for any newer device.
fn embedded<'a>(capability: u32, images: &'a [(&'a str, &'a [u8])]) -> Option<&'a (&'a str, &'a [u8])> {
    let number = |name: &str| -> Option<u32> {
        name.split_once('_').and_then(|(_, number)| number.trim_end_matches('a').parse().ok())
    };
    let runs = |name: &str| {
        let Some(number) = number(name) else { return false };
        match name.ends_with('a') {
            true => number == capability,
            false if name.starts_with("sm_") => number / 10 == capability / 10 && number <= capability,
            false => number <= capability,
        }
    };
    let rank = |name: &str| (name.starts_with("sm_"), number(name));
    images.iter().filter(|(name, _)| runs(name)).max_by_key(|(name, _)| rank(name))
}

/// The cache file for these sources, this compiler and this architecture.
fn cache_file(folder: &Path, compiler: Nvrtc, architecture: &str) -> PathBuf {
    let mut hash = blake3::Hasher::new();
    for (name, source) in SOURCES {
        for text in [name, source] {
            hash.update(&(text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        }
    }
    let (major, minor) = compiler.version;
    hash.update(format!("{architecture} {major}.{minor}").as_bytes());
    folder.join(format!("{architecture}-{}.cuda", &hash.finalize().to_hex()[..32]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &[(&str, &[u8])] =
        &[("sm_80", &[0]), ("sm_86", &[1]), ("sm_89", &[2]), ("sm_90a", &[3]), ("compute_80", &[4])];

    #[test]
    fn a_device_gets_its_own_image_or_the_newest_that_it_runs() {
        let of = |capability| embedded(capability, ALL).map(|(name, _)| *name);
        assert_eq!(of(80), Some("sm_80"));
        assert_eq!(of(86), Some("sm_86"));
        assert_eq!(of(87), Some("sm_86"));
        assert_eq!(of(89), Some("sm_89"));
        assert_eq!(of(90), Some("sm_90a"));
        // An architecture that ends with `a` runs on no other device.
        assert_eq!(of(100), Some("compute_80"));
        assert_eq!(of(120), Some("compute_80"));
        assert_eq!(of(75), None);
        assert_eq!(embedded(90, &[]), None);
    }

    #[test]
    fn a_driver_loads_machine_code_of_its_major_version_and_ptx_that_is_no_newer() {
        let code = |toolkit, is_machine_code| Code { toolkit, is_machine_code };
        for (toolkit, driver, machine_code, ptx) in [
            (13_000, 12_080, false, false),
            (13_000, 13_000, true, true),
            (13_020, 13_000, true, false),
            (12_090, 12_000, true, false),
            (12_090, 13_000, true, true),
        ] {
            let runs = [true, false].map(|is_machine_code| code(toolkit, is_machine_code).runs_with(driver));
            assert_eq!(runs, [machine_code, ptx], "{toolkit} with a driver of {driver}");
        }
    }

    #[test]
    fn a_refusal_says_which_driver_or_compiler_is_needed() {
        let code = |toolkit, is_machine_code| Code { toolkit, is_machine_code };
        let missing = || Err("libnvrtc.so was not found".to_owned());
        for (driver, built, compiled, expected) in [
            (
                12_040,
                Some(code(13_000, true)),
                missing(),
                "the driver supports CUDA 12.4, the kernels in this library need CUDA 13.0, and NVRTC cannot be used: \
                 libnvrtc.so was not found: install NVIDIA's driver 580 or later, or install NVRTC of CUDA 12",
            ),
            (
                12_040,
                Some(code(13_000, true)),
                Ok(code(13_020, true)),
                "the driver supports CUDA 12.4, the kernels in this library need CUDA 13.0, and kernels by NVRTC 13.2 \
                 need CUDA 13.0: install NVIDIA's driver 580 or later, or install NVRTC of CUDA 12",
            ),
            (
                13_000,
                None,
                missing(),
                "the driver supports CUDA 13.0, this library was built without nvcc, and NVRTC cannot be used: libnvrtc.so \
                 was not found: install NVRTC of CUDA 13, or build where nvcc is found (NVCC, CUDA_HOME or PATH)",
            ),
            (
                12_040,
                None,
                Ok(code(12_060, false)),
                "the driver supports CUDA 12.4, this library was built without nvcc, and kernels by NVRTC 12.6 need \
                 CUDA 12.6: install a driver that supports CUDA 12.6, or install NVRTC of CUDA 12.4 or earlier",
            ),
        ] {
            assert_eq!(no_kernels(driver, built, compiled).to_string(), expected);
        }
    }

    #[test]
    fn embedded_images_are_complete() {
        assert_eq!(EMBEDDED.images.is_empty(), EMBEDDED.toolkit == 0);
        for (name, packed) in EMBEDDED.images {
            let image = miniz_oxide::inflate::decompress_to_vec_zlib(packed).unwrap();
            if name.starts_with("sm_") {
                assert_eq!(image[..4], *b"\x7fELF", "{name}");
            } else {
                assert_eq!(image.last(), Some(&0), "{name}");
            }
            let has = |kernel: &str| image.windows(kernel.len()).any(|name| name == kernel.as_bytes());
            for kernel in ["attend_bf16_128", "decode_f16_64", "attend_f32", "merge_parts", "repack"] {
                assert!(has(kernel), "{name}: {kernel}");
            }
            for kernel in ["hopper_bf16_128", "hopper_keys_bf16_128", "hopper_queries_bf16_128"] {
                assert_eq!(has(kernel), *name == HOPPER, "{name}: {kernel}");
            }
        }
    }

    #[test]
    fn cache_files_differ_by_compiler_and_architecture() {
        let of = |version, architecture| cache_file(Path::new("/x"), Nvrtc { version }, architecture);
        let one = of((13, 0), "sm_90a");
        assert_eq!(one, of((13, 0), "sm_90a"));
        assert_ne!(one, of((13, 1), "sm_90a"));
        assert_ne!(one.file_name().unwrap().to_str().unwrap()[6..], *of((13, 0), "sm_80").to_str().unwrap());
        assert_eq!(one.extension().unwrap(), "cuda");
    }
}
