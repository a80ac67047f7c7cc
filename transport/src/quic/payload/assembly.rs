//! Assembles a message from its chunks, and each chunk from the pieces of its stream.
//!
//! A message is one allocation for each part, cut into chunks that several streams fill at the same
//! time; put together again, nothing is copied and nothing moves.

use std::hash::Hasher;

use bytes::{Buf, Bytes, BytesMut};
use twox_hash::XxHash3_64;

/// Bytes of the checksum after the payload.
pub(crate) const TRAILER_BYTES: usize = 8;

/// Alignment of each part, in bytes: a cache line, and more than any element of a tensor needs.
const ALIGNMENT: usize = 64;

/// Copied, and hashed, at a time.
#[cfg_attr(
    not(all(target_os = "linux", target_pointer_width = "64")),
    allow(dead_code, reason = "no other system shares memory")
)]
pub(crate) const COPY_BYTES: usize = 32 << 10;

/// Memory of a message, of which chunks are taken and brought back filled.
#[derive(Debug)]
pub(crate) struct Assembly {
    part_count: usize,
    chunks: Vec<ChunkState>,
    /// Chunks that are not back yet.
    missing: usize,
}

/// Where a chunk is.
#[derive(Debug)]
enum ChunkState {
    /// Not received yet.
    Empty(Vec<Segment>),
    /// Its stream is being read.
    Taken,
    Filled(Vec<Segment>),
}

/// The bytes of a chunk that belong to one part.
#[derive(Debug)]
struct Segment {
    part: usize,
    bytes: BytesMut,
}

impl Assembly {
    /// Memory for parts of these lengths, in chunks of `chunk_bytes`, of which there is at least
    /// one.
    pub(crate) fn new(part_bytes: &[usize], chunk_bytes: usize) -> Self {
        let mut chunks = vec![Vec::new()];
        let mut space = chunk_bytes;
        for (part, &length) in part_bytes.iter().enumerate() {
            let mut rest = aligned(length);
            while !rest.is_empty() {
                if space == 0 {
                    chunks.push(Vec::new());
                    space = chunk_bytes;
                }
                let bytes = rest.split_to(rest.len().min(space));
                space -= bytes.len();
                if let Some(chunk) = chunks.last_mut() {
                    chunk.push(Segment { part, bytes });
                }
            }
        }
        let missing = chunks.len();
        Self {
            part_count: part_bytes.len(),
            chunks: chunks.into_iter().map(ChunkState::Empty).collect(),
            missing,
        }
    }

    /// A chunk to be filled, once.
    pub(crate) fn take(&mut self, index: usize) -> Result<Chunk, &'static str> {
        let place = self.chunks.get_mut(index).ok_or("more chunks than its bytes fill")?;
        match std::mem::replace(place, ChunkState::Taken) {
            ChunkState::Empty(segments) => Ok(Chunk::new(segments)),
            other => {
                *place = other;
                Err("a chunk that was sent twice")
            }
        }
    }

    /// Takes a filled chunk back; whether all are here now.
    pub(crate) fn put_back(&mut self, index: usize, filled: Filled) -> bool {
        if let Some(place @ ChunkState::Taken) = self.chunks.get_mut(index) {
            *place = ChunkState::Filled(filled.0);
            self.missing -= 1;
        }
        self.missing == 0
    }

    /// The parts, of a message whose chunks are all back.
    pub(crate) fn finish(self) -> Vec<Bytes> {
        let mut parts: Vec<BytesMut> = (0..self.part_count).map(|_| BytesMut::new()).collect();
        for place in self.chunks {
            if let ChunkState::Filled(segments) = place {
                for Segment { part, bytes } in segments {
                    // Adjacent in memory: the two become one again.
                    parts[part].unsplit(bytes);
                }
            }
        }
        parts.into_iter().map(BytesMut::freeze).collect()
    }
}

fn aligned(length: usize) -> BytesMut {
    let mut bytes = BytesMut::zeroed(length + ALIGNMENT - 1);
    bytes.advance(bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT - 1));
    bytes.truncate(length);
    bytes
}

/// A chunk that is being filled from its stream.
pub(crate) struct Chunk {
    segments: Vec<Segment>,
    /// Index of the segment that is being filled, and bytes of it that are there.
    segment: usize,
    filled: usize,
    checksum: Box<XxHash3_64>,
    trailer: Vec<u8>,
}

/// A chunk that is complete.
#[derive(Debug)]
pub(crate) struct Filled(Vec<Segment>);

impl Chunk {
    fn new(segments: Vec<Segment>) -> Self {
        Self { segments, segment: 0, filled: 0, checksum: Box::new(XxHash3_64::new()), trailer: Vec::new() }
    }

    /// Takes the next bytes of the stream and returns how many of them were payload.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> Result<usize, &'static str> {
        let mut payload_bytes = 0;
        while let Some(Segment { bytes: space, .. }) = self.segments.get_mut(self.segment) {
            let count = bytes.len().min(space.len() - self.filled);
            let (now, later) = bytes.split_at(count);
            space[self.filled..self.filled + count].copy_from_slice(now);
            self.checksum.write(now);
            self.filled += count;
            payload_bytes += count;
            bytes = later;
            if self.filled < space.len() {
                return Ok(payload_bytes);
            }
            (self.segment, self.filled) = (self.segment + 1, 0);
        }
        self.trailer.extend_from_slice(&bytes[..bytes.len().min(TRAILER_BYTES + 1)]);
        if self.trailer.len() > TRAILER_BYTES {
            Err("more bytes than its header says")
        } else {
            Ok(payload_bytes)
        }
    }

    /// Fills the chunk by `copy`, which copies the bytes from a position of the chunk on; their
    /// checksum must be this one.
    #[cfg_attr(
        not(all(target_os = "linux", target_pointer_width = "64")),
        allow(dead_code, reason = "no other system shares memory")
    )]
    pub(crate) fn fill(
        mut self,
        checksum: u64,
        mut copy: impl FnMut(usize, &mut [u8]) -> Result<(), &'static str>,
    ) -> Result<Filled, &'static str> {
        let mut at = 0;
        for Segment { bytes, .. } in &mut self.segments {
            // In pieces that stay in the cache between the copy and the checksum.
            for space in bytes.chunks_mut(COPY_BYTES) {
                copy(at, space)?;
                self.checksum.write(space);
                at += space.len();
            }
        }
        self.trailer.extend_from_slice(&checksum.to_le_bytes());
        self.finish()
    }

    /// Bytes of the chunk.
    #[cfg_attr(
        not(all(target_os = "linux", target_pointer_width = "64")),
        allow(dead_code, reason = "no other system shares memory")
    )]
    pub(crate) fn len(&self) -> usize {
        self.segments.iter().map(|segment| segment.bytes.len()).sum()
    }

    /// The chunk, if all bytes have arrived and the checksum matches.
    pub(crate) fn finish(self) -> Result<Filled, &'static str> {
        let trailer = <[u8; TRAILER_BYTES]>::try_from(self.trailer.as_slice());
        let trailer = trailer.map_err(|_| "fewer bytes than its header says")?;
        if u64::from_le_bytes(trailer) != self.checksum.finish() {
            return Err("bytes that do not fit their checksum");
        }
        Ok(Filled(self.segments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(part_bytes: &[usize]) -> Vec<u8> {
        (0..part_bytes.iter().sum()).map(|at: usize| (at % 251) as u8).collect()
    }

    fn stream(payload: &[u8]) -> Vec<u8> {
        [payload, &XxHash3_64::oneshot(payload).to_le_bytes()].concat()
    }

    #[test]
    fn parts_come_out_whole_and_aligned_however_they_are_cut() {
        for part_bytes in [&[1][..], &[0, 5, 0, 70, 0], &[64, 64], &[1000], &[0], &[]] {
            let payload = payload(part_bytes);
            for (chunk_bytes, piece) in [(10_000, 1), (10_000, 64), (7, 3), (64, 10_000), (69, 7)] {
                let mut assembly = Assembly::new(part_bytes, chunk_bytes);
                let mut chunks: Vec<&[u8]> = payload.chunks(chunk_bytes).collect();
                if chunks.is_empty() {
                    chunks.push(&[]);
                }
                // The last chunk first, and all of them are started before any is put back.
                let mut filled: Vec<_> =
                    (0..chunks.len()).map(|at| (at, assembly.take(at).unwrap())).collect();
                filled.reverse();
                for (at, mut chunk) in filled {
                    let stream = stream(chunks[at]);
                    let taken: usize = stream.chunks(piece).map(|bytes| chunk.push(bytes).unwrap()).sum();
                    assert_eq!(taken, chunks[at].len());
                    assert_eq!(assembly.put_back(at, chunk.finish().unwrap()), at == 0);
                }
                let parts = assembly.finish();
                assert_eq!(parts.iter().map(Bytes::len).collect::<Vec<_>>(), part_bytes);
                assert_eq!(parts.concat(), payload);
                assert!(
                    parts.iter().all(|part| part.is_empty() || part.as_ptr().align_offset(ALIGNMENT) == 0)
                );
            }
        }
    }

    #[test]
    fn a_chunk_that_is_copied_is_the_same_as_one_that_is_read() {
        let part_bytes = [5, 0, 100_000, 9];
        let payload = payload(&part_bytes);
        let filled = |checksum, copied: &[u8]| {
            let mut assembly = Assembly::new(&part_bytes, 70_000);
            let rest = assembly.take(1).unwrap();
            assert_eq!(rest.len(), payload.len() - 70_000);
            let rest = rest.fill(XxHash3_64::oneshot(&payload[70_000..]), |at, space| {
                space.copy_from_slice(&payload[70_000 + at..][..space.len()]);
                Ok(())
            });
            assert!(!assembly.put_back(1, rest.unwrap()));
            let first = assembly.take(0).unwrap().fill(checksum, |at, space| {
                space.copy_from_slice(&copied[at..][..space.len()]);
                Ok(())
            });
            assert!(assembly.put_back(0, first?));
            Ok::<_, &str>(assembly.finish())
        };
        let checksum = XxHash3_64::oneshot(&payload[..70_000]);
        assert_eq!(filled(checksum, &payload).unwrap().concat(), payload);
        let mut other = payload.clone();
        other[69_999] ^= 1;
        assert_eq!(filled(checksum, &other).unwrap_err(), "bytes that do not fit their checksum");
        let chunk = Assembly::new(&part_bytes, 70_000).take(0).unwrap();
        assert_eq!(chunk.fill(checksum, |_, _| Err("nothing")).unwrap_err(), "nothing");
    }

    #[test]
    fn chunks_are_put_together_where_they_are() {
        let mut assembly = Assembly::new(&[100, 200], 64);
        let mut places = Vec::new();
        for at in 0..5 {
            let chunk = assembly.take(at).unwrap();
            places.extend(chunk.segments.iter().map(|segment| (segment.part, segment.bytes.as_ptr())));
            assembly.put_back(at, Filled(chunk.segments));
        }
        for (part, bytes) in assembly.finish().iter().enumerate() {
            let first = places.iter().find(|(of, _)| *of == part).unwrap();
            assert_eq!(bytes.as_ptr(), first.1);
        }
    }

    #[test]
    fn a_chunk_that_there_is_not_or_that_came_before_is_refused() {
        let mut assembly = Assembly::new(&[100], 64);
        assembly.take(1).unwrap();
        assert_eq!(assembly.take(1).err().unwrap(), "a chunk that was sent twice");
        assert_eq!(assembly.take(2).err().unwrap(), "more chunks than its bytes fill");
        let first = assembly.take(0).unwrap();
        assert!(!assembly.put_back(0, Filled(first.segments)));
        assert_eq!(assembly.take(0).err().unwrap(), "a chunk that was sent twice");
    }

    #[test]
    fn every_flipped_byte_and_every_wrong_length_is_noticed() {
        let part_bytes = [5, 9];
        let stream = stream(&payload(&part_bytes));
        let chunk = || Assembly::new(&part_bytes, 1000).take(0).unwrap();
        for at in 0..stream.len() {
            let mut corrupt = stream.clone();
            corrupt[at] ^= 0x10;
            let mut whole = chunk();
            whole.push(&corrupt).unwrap();
            assert!(whole.finish().is_err(), "byte {at}");
            let mut cut = chunk();
            cut.push(&stream[..at]).unwrap();
            assert!(cut.finish().is_err(), "cut at {at}");
        }
        let mut whole = chunk();
        whole.push(&stream).unwrap();
        assert!(whole.push(&[0]).is_err());
    }
}
