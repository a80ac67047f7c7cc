//! The image of the kernels for a device: embedded in this library, from the cache, or compiled by NVRTC.

use std::path::{Path, PathBuf};

use super::cache;
use super::nvrtc::Nvrtc;
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

/// The image for a device of this compute capability (10 · major + minor). `cache`: folder for images that NVRTC compiled.
pub(crate) fn image(capability: u32, cache: Option<&Path>) -> Result<Image, NoImage> {
    if let Some((name, packed)) = embedded(capability, IMAGES) {
        let bytes = miniz_oxide::inflate::decompress_to_vec_zlib(packed)
            .map_err(|error| NoImage(format!("the embedded kernels are damaged: {error}")))?;
        return Ok(Image { bytes, origin: (*name).to_owned(), wgmma: *name == HOPPER });
    }
    let compiler = Nvrtc::load().map_err(|why| {
        NoImage(format!(
            "this library was built without nvcc, so NVRTC has to compile the kernels, but {why}: \
             install CUDA's NVRTC, or build where nvcc is found (NVCC, CUDA_HOME or PATH)"
        ))
    })?;
    let newest = compiler.newest_architecture_for(capability).map_err(NoImage)?;
    // A cubin if NVRTC knows the device, else PTX, which the driver compiles.
    let architecture = match (newest == capability, newest) {
        (true, 90) => HOPPER.to_owned(),
        (true, _) => format!("sm_{newest}"),
        (false, _) => format!("compute_{newest}"),
    };
    let wgmma = architecture == HOPPER;
    // The same text for an image from the cache: sessions compare it to see whether the devices of their ranks differ.
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

/// The best embedded image that runs on a device of this capability: a cubin for it, else one for an older device of its
/// generation, else PTX for any newer device.
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
    fn embedded_images_are_complete() {
        for (name, packed) in IMAGES {
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
            assert_eq!(has("hopper_bf16_128"), *name == HOPPER, "{name}");
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
