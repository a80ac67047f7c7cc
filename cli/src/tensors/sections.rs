//! Digests of sections of an input file, by which ranks compare their copies.

use std::ops::Range;

use super::copy::Stamp;
use super::file::InputFile;
use super::positioned::read_exact_at;
use crate::failure::{Failure, Result};

/// A digest of one section of a tensor: enough to find ranks with other bytes, not made against
/// ranks that lie.
pub(crate) type Digest = [u8; DIGEST_BYTES];
pub(crate) const DIGEST_BYTES: usize = 8;

/// Sections of each tensor. The ranks that read one copy divide them, so that together they read it
/// once.
const SECTIONS: usize = 24;

impl InputFile {
    /// The number of all sections of all tensors that a call uses; the sections of one tensor
    /// follow each other.
    pub(crate) fn sections(&self) -> usize {
        self.tensors().len() * SECTIONS
    }

    /// The name of the tensor of a section.
    pub(crate) fn tensor_of_section(&self, section: usize) -> &'static str {
        self.tensors().get(section / SECTIONS).map_or("?", |(name, _)| name)
    }

    /// The digest of the bytes of one section.
    pub(crate) fn digest_of_section(&self, section: usize) -> Result<Digest> {
        let Some((_, bytes)) = self.tensors().get(section / SECTIONS).cloned() else {
            return Ok([0; DIGEST_BYTES]);
        };
        let (length, part) = (bytes.end - bytes.start, section % SECTIONS);
        let bound = |part: usize| {
            let at = u128::from(length) * part as u128 / SECTIONS as u128;
            bytes.start + u64::try_from(at).unwrap_or(length)
        };
        let mut hasher = blake3::Hasher::new();
        let (mut at, end) = (bound(part), bound(part + 1));
        let mut buffer = vec![0; PIECE_BYTES.min(end - at) as usize];
        while at < end {
            let piece = &mut buffer[..PIECE_BYTES.min(end - at) as usize];
            read_exact_at(&self.file, piece, at)
                .map_err(|error| Failure::file("read", &self.path, &error))?;
            hasher.update(piece);
            at += piece.len() as u64;
        }
        let mut digest = [0; DIGEST_BYTES];
        digest.copy_from_slice(&hasher.finalize().as_bytes()[..DIGEST_BYTES]);
        Ok(digest)
    }

    /// Refuses a file that was written to since it was opened: ranks may have read other bytes.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|error| Failure::file("read", &self.path, &error))?;
        if Stamp::of(&now) == self.stamp {
            return Ok(());
        }
        Err(Failure::run(format!(
            "{} was written to while the ranks read it: start the call when the file is complete",
            self.path.display()
        )))
    }

    /// The tensors whose bytes a call uses, apart from sinks, which are part of the problem.
    fn tensors(&self) -> Vec<(&'static str, Range<u64>)> {
        let [q, k, v] = self.bytes.clone();
        let mut tensors = vec![("q", q), ("k", k), ("v", v)];
        if let Some(gradients) = &self.gradients {
            tensors.push(("do", gradients.d_o.clone()));
            tensors.extend(gradients.d_lse.clone().map(|d_lse| ("dlse", d_lse)));
        }
        tensors.extend(self.bias.as_ref().map(|bias| (bias.name(), bias.bytes())));
        tensors
    }
}

/// Of one read.
const PIECE_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use safetensors::tensor::TensorView;

    use super::*;

    /// A file with q, k, v and a mask; the values are bytes that differ.
    fn file(path: &std::path::Path) {
        let shapes: [(&str, safetensors::Dtype, &[usize]); 4] = [
            ("q", safetensors::Dtype::F32, &[1, 5, 2, 8]),
            ("k", safetensors::Dtype::F32, &[1, 5, 1, 8]),
            ("v", safetensors::Dtype::F32, &[1, 5, 1, 8]),
            ("mask", safetensors::Dtype::U8, &[1, 1, 5, 5]),
        ];
        let bytes: Vec<u8> = (0..320_u16).map(|byte| (byte % 251) as u8).collect();
        let views = shapes.map(|(name, dtype, shape)| {
            let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorView::new(dtype, shape.to_vec(), &bytes[..length]).expect("it fits"))
        });
        std::fs::write(path, safetensors::serialize(views, None).expect("tensors")).expect("a file");
    }

    fn digests(input: &InputFile) -> Vec<Digest> {
        (0..input.sections()).map(|section| input.digest_of_section(section).expect("a digest")).collect()
    }

    #[test]
    fn every_byte_of_a_tensor_is_in_one_section() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("input");
        file(&path);
        let input = InputFile::open(&path, false).expect("an input");
        let right = digests(&input);
        assert_eq!(right.len(), 4 * SECTIONS);
        for (tensor, (name, bytes)) in input.tensors().into_iter().enumerate() {
            for at in bytes {
                let mut writer = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
                let mut change = |byte: u8| {
                    writer
                        .seek(SeekFrom::Start(at))
                        .and_then(|_| writer.write_all(&[byte]))
                        .expect("a write");
                };
                let mut old = [0];
                read_exact_at(&input.file, &mut old, at).expect("a byte");
                change(!old[0]);
                let now = digests(&input);
                change(old[0]);
                let other: Vec<usize> =
                    (0..now.len()).filter(|section| now[*section] != right[*section]).collect();
                assert_eq!(other.len(), 1, "byte {at} of {name}");
                assert_eq!(input.tensor_of_section(other[0]), name);
                assert_eq!(other[0] / SECTIONS, tensor);
            }
        }
    }

    #[test]
    fn a_file_that_is_written_to_while_it_is_open_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("input");
        file(&path);
        let input = InputFile::open(&path, false).expect("an input");
        input.check_unchanged().expect("nobody has written");
        let hour = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
        let writer = std::fs::OpenOptions::new().append(true).open(&path).expect("the file");
        writer.set_modified(hour).expect("a time");
        assert!(input.check_unchanged().expect_err("it was changed").text.contains("was written to"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn one_file_is_one_copy_by_any_name_and_another_file_is_another_copy() {
        let folder = tempfile::tempdir().expect("a folder");
        let [one, link, other] = ["one", "link", "other"].map(|name| folder.path().join(name));
        file(&one);
        std::fs::hard_link(&one, &link).expect("a link");
        std::fs::copy(&one, &other).expect("a copy");
        let [one, link, other] =
            [one, link, other].map(|path| InputFile::open(&path, false).expect("an input"));
        assert_eq!(one.copy, link.copy);
        assert_ne!(one.copy, other.copy);
        assert_eq!(digests(&one), digests(&other));
    }
}
