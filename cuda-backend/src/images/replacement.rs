//! Kernels in a file that replace those of the image.

use std::path::Path;

use kyklos::{Error, Result};
use kyklos_transport::regular_file::read_regular;

/// A cubin with some kernels: they are launched instead of those of the same names.
///
/// Threads, shared memory and tile of a launch are those of the kernel that is replaced, and
/// nothing in a cubin says for which tile it was made. The driver refuses a launch with more
/// threads or more shared memory than the kernel can have. Any other difference is a wrong result,
/// or an access outside of the buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Replacement {
    /// The file: all that its headers name is inside.
    pub(crate) bytes: Vec<u8>,
    /// Name and hash of the file: two variants may have the same name.
    pub(crate) name: String,
    /// The architecture for which it was compiled, 10 · major + minor.
    pub(crate) architecture: u32,
    /// Names of its kernels, sorted.
    pub(crate) kernels: Vec<String>,
}

impl Replacement {
    /// # Errors
    /// [`Error::Request`] if the file cannot be read or is no cubin.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let wrong = |why: &str| {
            Error::request(
                format!("{} replaces no kernels: {why}", path.display()),
                "name a cubin, as nvcc -cubin makes it",
            )
        };
        let bytes =
            read_regular(path, MOST_BYTES).map_err(|error| wrong(&format!("it cannot be read: {error}")))?;
        let Some((architecture, kernels)) = contents(&bytes) else {
            return Err(wrong("it is no cubin, or a part of one"));
        };
        let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        let name = format!("{file} (BLAKE3 {})", &blake3::hash(&bytes).to_hex()[..8]);
        Ok(Self { bytes, name, architecture, kernels })
    }
}

/// The architecture of a cubin and the names of its kernels. `None` if it is no ELF file of CUDA,
/// or if a section or segment of it is not inside: the driver reads them without knowing where the
/// file ends.
fn contents(bytes: &[u8]) -> Option<(u32, Vec<String>)> {
    let at = |from: usize, size: usize| -> Option<usize> {
        let mut number = [0; 8];
        number[..size].copy_from_slice(bytes.get(from..from.checked_add(size)?)?);
        usize::try_from(u64::from_le_bytes(number)).ok()
    };
    let inside = |from: usize, size: usize| bytes.get(from..from.checked_add(size)?);
    let field = |entry: usize, offset: usize, size: usize| at(entry.checked_add(offset)?, size);
    // 64 bits, little-endian, for CUDA.
    if !bytes.starts_with(b"\x7fELF\x02\x01") || at(18, 2)? != EM_CUDA {
        return None;
    }
    let (version, flags) = (at(8, 1)?, at(48, 4)?);
    let architecture = if version < 8 { flags } else { flags >> 8 } & 0xff;
    // The tables, and the sizes of their entries.
    let (sections, section_bytes) = (at(40, 8)?, at(58, 2)?);
    let (segments, segment_bytes) = (at(32, 8)?, at(54, 2)?);
    for segment in 0..at(56, 2)? {
        let entry = segments.checked_add(segment * segment_bytes)?;
        inside(field(entry, 8, 8)?, field(entry, 32, 8)?)?;
    }
    let section = |index: usize| -> Option<(usize, &[u8])> {
        let entry = sections.checked_add(index * section_bytes)?;
        let (kind, name) = (field(entry, 4, 4)?, field(entry, 0, 4)?);
        let size = if kind == NOTHING_IN_FILE { 0 } else { field(entry, 32, 8)? };
        Some((name, inside(field(entry, 24, 8)?, size)?))
    };
    let (_, names) = section(at(62, 2)?)?;
    let mut kernels = Vec::new();
    for index in 0..at(60, 2)? {
        let (name, _) = section(index)?;
        let name = names.get(name..)?.split(|byte| *byte == 0).next()?;
        // The code of each kernel has a section of its own.
        if let Some(kernel) = name.strip_prefix(b".text.") {
            kernels.push(String::from_utf8(kernel.to_vec()).ok()?);
        }
    }
    kernels.sort();
    Some((u32::try_from(architecture).ok()?, kernels))
}

/// Far more than the kernels of one architecture take.
const MOST_BYTES: u64 = 1 << 30;
/// The machine of a cubin's header.
const EM_CUDA: usize = 190;
/// The kind of a section that has a size and no bytes.
const NOTHING_IN_FILE: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    /// `two.cubin` has two empty kernels, by `nvcc -cubin -arch sm_90a` of CUDA 13.0.
    #[test]
    fn a_cubin_says_its_architecture_and_its_kernels_and_a_part_of_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("two.cubin");
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Replacement::read(&path)
        };
        let whole = include_bytes!("two.cubin").to_vec();
        let found = read(&whole).unwrap();
        assert_eq!(found.architecture, 90);
        assert_eq!(found.kernels, ["attend_f32", "repack"]);
        assert!(found.name.starts_with("two.cubin (BLAKE3 "), "{}", found.name);
        let mut other = whole.clone();
        *other.last_mut().unwrap() ^= 1;
        assert_ne!(read(&other).unwrap().name, found.name);
        for bytes in (0..whole.len()).step_by(7).chain([whole.len() - 1]) {
            let refused = read(&whole[..bytes]).unwrap_err();
            assert!(refused.to_string().contains("two.cubin replaces no kernels"), "{refused}");
        }
        // Tables and sections far behind the end.
        for field in [32, 40] {
            let mut wrong = whole.clone();
            wrong[field..field + 8].copy_from_slice(&(u64::MAX - 20).to_le_bytes());
            assert!(read(&wrong).is_err());
        }
        assert!(read(b"// PTX").is_err());
        assert!(Replacement::read(folder.path()).unwrap_err().to_string().contains("cannot be read"));
    }
}
