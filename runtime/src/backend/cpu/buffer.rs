//! Host memory behind the backend's buffers.

use bytes::Bytes;

use crate::error::{Error, Result};

/// Host memory: owned, or shared with the caller of an upload or download. Writing to shared memory
/// copies it first.
#[derive(Debug)]
pub struct CpuBuffer {
    label: String,
    storage: Storage,
}

#[derive(Debug)]
enum Storage {
    /// Words, so that f32 can be read out of it; `bytes` of them count.
    Owned {
        words: Vec<u32>,
        bytes: usize,
    },
    Shared(Bytes),
}

impl CpuBuffer {
    /// Zeroed memory.
    pub(super) fn zeroed(label: &str, bytes: usize) -> Result<Self> {
        Ok(Self { label: label.to_owned(), storage: Storage::zeroed(label, bytes)? })
    }

    /// `data` itself where f32 can be read out of it, else a copy.
    pub(super) fn adopt(label: &str, data: Bytes) -> Result<Self> {
        let storage = if data.as_ptr().cast::<u32>().is_aligned() {
            Storage::Shared(data)
        } else {
            Storage::copied(label, &data)?
        };
        Ok(Self { label: label.to_owned(), storage })
    }

    /// Contents.
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.storage {
            Storage::Owned { words, bytes } => &bytemuck::cast_slice(words)[..*bytes],
            Storage::Shared(shared) => shared,
        }
    }

    /// Contents as elements of two or four bytes.
    pub(super) fn elements<T: bytemuck::Pod>(&self) -> &[T] {
        let bytes = self.bytes();
        bytemuck::cast_slice(&bytes[..bytes.len() / size_of::<T>() * size_of::<T>()])
    }

    /// Contents, to be changed in part.
    pub(super) fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        if let Storage::Shared(shared) = &self.storage {
            self.storage = Storage::copied(&self.label, shared)?;
        }
        Ok(self.storage.owned_bytes())
    }

    /// As [`Self::bytes_mut`], for a caller that overwrites all of it: old contents are not carried
    /// over.
    pub(super) fn overwrite(&mut self) -> Result<&mut [u8]> {
        if let Storage::Shared(shared) = &self.storage {
            self.storage = Storage::zeroed(&self.label, shared.len())?;
        }
        Ok(self.storage.owned_bytes())
    }

    /// Another buffer of the same memory. Writing to one of them copies it first.
    pub(super) fn handle(&mut self) -> Self {
        Self { label: self.label.clone(), storage: Storage::Shared(self.share()) }
    }

    /// The contents as shared memory; the buffer keeps them too.
    pub(super) fn share(&mut self) -> Bytes {
        if let Storage::Owned { words, bytes } = &mut self.storage {
            let frozen = Bytes::from_owner(Frozen(std::mem::take(words))).slice(..*bytes);
            self.storage = Storage::Shared(frozen);
        }
        match &self.storage {
            Storage::Shared(shared) => shared.clone(),
            Storage::Owned { .. } => unreachable!("frozen above"),
        }
    }
}

impl Storage {
    fn zeroed(label: &str, bytes: usize) -> Result<Self> {
        let words = bytes.div_ceil(4);
        // A failed `try_reserve_exact` is an error; a failed allocation would abort the process. After it,
        // the allocator returns the vector zeroed, which is free for fresh pages; growing the
        // reserved vector would touch all pages.
        Vec::<u32>::new().try_reserve_exact(words).map_err(|_| Error::OutOfMemory {
            device: "cpu".to_owned(),
            what: label.to_owned(),
            asked_bytes: bytes as u64,
            allowed_bytes: isize::MAX as u64,
        })?;
        Ok(Self::Owned { words: vec![0; words], bytes })
    }

    fn copied(label: &str, data: &[u8]) -> Result<Self> {
        let mut storage = Self::zeroed(label, data.len())?;
        storage.owned_bytes().copy_from_slice(data);
        Ok(storage)
    }

    fn owned_bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Owned { words, bytes } => &mut bytemuck::cast_slice_mut(words)[..*bytes],
            Self::Shared(_) => &mut [],
        }
    }
}

/// Words that [`Bytes`] can keep.
struct Frozen(Vec<u32>);

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_no_machine_has_are_an_error() {
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 62] {
            let error = CpuBuffer::zeroed("k of hop 3", bytes).unwrap_err();
            assert!(matches!(&error, Error::OutOfMemory { what, .. } if what == "k of hop 3"), "{error}");
        }
    }

    #[test]
    fn upload_and_download_share_memory_and_writing_does_not_reach_the_others() {
        let data = Bytes::from_owner(Frozen(vec![1, 2, 3]));
        let mut buffer = CpuBuffer::adopt("x", data.clone()).unwrap();
        assert_eq!(buffer.bytes().as_ptr(), data.as_ptr());
        buffer.bytes_mut().unwrap()[0] = 9;
        assert_eq!((data[0], buffer.bytes()[0]), (1, 9));
        let at = buffer.bytes().as_ptr();
        let down = buffer.share();
        assert_eq!((down.as_ptr(), buffer.bytes().as_ptr()), (at, at));
        buffer.overwrite().unwrap().fill(7);
        assert_eq!((down[0], buffer.bytes()[0]), (9, 7));
        let odd = CpuBuffer::adopt("odd", data.slice(1..)).unwrap();
        assert_eq!(odd.bytes(), &data[1..]);
        assert_eq!(odd.elements::<f32>().len(), 2);
        assert_eq!(CpuBuffer::zeroed("none", 0).unwrap().bytes(), [0_u8; 0]);
    }
}
