//! A piece of memory with a fixed size that one rank fills and another one empties.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs,
    ftruncate, memfd_create,
};
use rustix::io::Errno;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// The size of all segments of a rank. Both ranks compute it from the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentSize {
    pub(crate) chunk_bytes: usize,
}

impl SegmentSize {
    /// `None` if a group is so large that the segments would be too small, or too many.
    pub(crate) fn of_group(size: u32) -> Option<Self> {
        let peers = usize::try_from(size).ok()?.saturating_sub(1).max(1);
        let chunk_bytes = (TOTAL_BYTES / peers / SLOTS) / LEAST_CHUNK_BYTES * LEAST_CHUNK_BYTES;
        (chunk_bytes > 0).then(|| Self { chunk_bytes: chunk_bytes.min(MOST_CHUNK_BYTES) })
    }

    pub(crate) fn bytes(self) -> usize {
        self.chunk_bytes * SLOTS
    }
}

/// Mapped memory of [`SLOTS`] chunks.
pub(crate) struct Segment {
    size: SegmentSize,
    region: MmapRegion<()>,
}

impl Segment {
    /// New memory that the kernel has reserved and whose size nobody can change any more.
    pub(crate) fn new(size: SegmentSize) -> Result<Self, String> {
        let bytes = size.bytes() as u64;
        let sealable = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let made = match memfd_create("kyklos", sealable | MemfdFlags::NOEXEC_SEAL) {
            // A kernel before 6.3.
            Err(Errno::INVAL) => memfd_create("kyklos", sealable),
            made => made,
        };
        let file = made.map_err(|error| format!("no memory file: {error}"))?;
        ftruncate(&file, bytes)
            // A page that is not there would be asked for at a write, whose failure ends the process.
            .and_then(|()| fallocate(&file, FallocateFlags::empty(), 0, bytes))
            .and_then(|()| fcntl_add_seals(&file, SEALS | SealFlags::SEAL))
            .map_err(|error| format!("no {bytes} bytes of shared memory: {error}"))?;
        Self::map(file, size)
    }

    /// The memory of a peer, unless its size could change under this process.
    pub(crate) fn of_peer(file: OwnedFd, size: SegmentSize) -> Result<Self, String> {
        // Files of other kinds cannot be sealed, or lack pages that are asked for at a read, whose failure
        // ends the process.
        let kind = fstatfs(&file).map_err(|error| format!("its memory file cannot be examined: {error}"))?;
        if kind.f_type as u64 != TMPFS_MAGIC {
            return Err(format!("its memory file is of kind {:#x}, not memory", kind.f_type));
        }
        // First the seals, then the size: a size that is sealed stays.
        let seals =
            fcntl_get_seals(&file).map_err(|error| format!("its memory file has no seals: {error}"))?;
        if !seals.contains(SEALS) {
            return Err("its memory file can change its size".into());
        }
        let bytes = fstat(&file).map_err(|error| error.to_string())?.st_size;
        if usize::try_from(bytes) != Ok(size.bytes()) {
            return Err(format!("its memory file has {bytes} bytes, not {}", size.bytes()));
        }
        Self::map(file, size)
    }

    fn map(file: OwnedFd, size: SegmentSize) -> Result<Self, String> {
        let region = MmapRegion::from_file(FileOffset::new(File::from(file), 0), size.bytes());
        Ok(Self { size, region: region.map_err(|error| format!("no mapping of shared memory: {error}"))? })
    }

    /// What a peer maps.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.region.file_offset().map(|at| at.file().as_fd())
    }

    pub(crate) fn size(&self) -> SegmentSize {
        self.size
    }

    /// Copies `bytes` to `at` bytes from the start of a slot.
    pub(crate) fn write(&self, slot: usize, at: usize, bytes: &[u8]) -> Result<(), &'static str> {
        let place = self.place(slot, at, bytes.len())?;
        self.region.get_slice(place, bytes.len()).map_err(|_| BEYOND)?.copy_from(bytes);
        Ok(())
    }

    /// Copies what is at `at` bytes from the start of a slot.
    pub(crate) fn read(&self, slot: usize, at: usize, into: &mut [u8]) -> Result<(), &'static str> {
        let place = self.place(slot, at, into.len())?;
        self.region.get_slice(place, into.len()).map_err(|_| BEYOND)?.copy_to(into);
        Ok(())
    }

    fn place(&self, slot: usize, at: usize, length: usize) -> Result<usize, &'static str> {
        let fits = slot < SLOTS && at.checked_add(length).is_some_and(|end| end <= self.size.chunk_bytes);
        if fits { Ok(slot * self.size.chunk_bytes + at) } else { Err(BEYOND) }
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment").field("size", &self.size).finish_non_exhaustive()
    }
}

const BEYOND: &str = "a chunk that is larger than its place in shared memory";

/// Chunks that a segment holds.
pub(crate) const SLOTS: usize = 8;

/// With fewer, a chunk costs more in wake-ups than in copies.
const LEAST_CHUNK_BYTES: usize = 64 << 10;

/// Both copies of a chunk stay in the cache of a core.
const MOST_CHUNK_BYTES: usize = 512 << 10;

/// Of all segments that a rank makes.
const TOTAL_BYTES: usize = 64 << 20;

/// The size is final.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// `TMPFS_MAGIC` of `linux/magic.h`: files of memory, without those of huge pages.
const TMPFS_MAGIC: u64 = 0x0102_1994;
