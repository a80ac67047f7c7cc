//! Puts a message together from the pieces in which it comes.

use bytes::Bytes;
use xxhash_rust::xxh3::Xxh3;

/// Bytes of the checksum after the payload.
pub(crate) const TRAILER_BYTES: usize = 8;

/// Alignment of each part, in bytes: a cache line, and more than any element of a tensor needs.
const ALIGNMENT: usize = 64;

/// The parts of one message, whose lengths the local plan knows.
pub(crate) struct Assembly {
    parts: Vec<Part>,
    /// Index of the part that is being filled, and bytes of it that are there.
    part: usize,
    filled: usize,
    checksum: Box<Xxh3>,
    trailer: Vec<u8>,
}

/// Memory of one part: `bytes[start..start + length]`, where `start` makes it aligned.
#[derive(Debug)]
struct Part {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Assembly {
    pub(crate) fn new(part_bytes: &[usize]) -> Self {
        let parts = part_bytes.iter().map(|&length| {
            let bytes = vec![0; length + ALIGNMENT - 1];
            let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT - 1);
            Part { bytes, start, length }
        });
        Self {
            parts: parts.collect(),
            part: 0,
            filled: 0,
            checksum: Box::new(Xxh3::new()),
            trailer: Vec::new(),
        }
    }

    /// Takes the next bytes of the stream and returns how many of them were payload.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> Result<usize, &'static str> {
        let mut payload_bytes = 0;
        while let Some(part) = self.parts.get_mut(self.part) {
            let count = bytes.len().min(part.length - self.filled);
            let (now, later) = bytes.split_at(count);
            let at = part.start + self.filled;
            part.bytes[at..at + count].copy_from_slice(now);
            self.checksum.update(now);
            self.filled += count;
            payload_bytes += count;
            bytes = later;
            if self.filled < part.length {
                return Ok(payload_bytes);
            }
            (self.part, self.filled) = (self.part + 1, 0);
        }
        self.trailer.extend_from_slice(&bytes[..bytes.len().min(TRAILER_BYTES + 1)]);
        if self.trailer.len() > TRAILER_BYTES {
            Err("more bytes than its header says")
        } else {
            Ok(payload_bytes)
        }
    }

    /// The parts, if all bytes have come and the checksum fits.
    pub(crate) fn finish(self) -> Result<Vec<Bytes>, &'static str> {
        let trailer = <[u8; TRAILER_BYTES]>::try_from(self.trailer.as_slice());
        let trailer = trailer.map_err(|_| "fewer bytes than its header says")?;
        if u64::from_le_bytes(trailer) != self.checksum.digest() {
            return Err("bytes that do not fit their checksum");
        }
        // The vector becomes the shared memory as it is: nothing is copied, and nothing moves.
        Ok(self
            .parts
            .into_iter()
            .map(|part| Bytes::from(part.bytes).slice(part.start..part.start + part.length))
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xxhash_rust::xxh3::xxh3_64;

    fn message(part_bytes: &[usize]) -> (Vec<u8>, Vec<u8>) {
        let payload: Vec<u8> = (0..part_bytes.iter().sum()).map(|at: usize| (at % 251) as u8).collect();
        let mut stream = payload.clone();
        stream.extend_from_slice(&xxh3_64(&payload).to_le_bytes());
        (payload, stream)
    }

    #[test]
    fn parts_come_out_whole_and_aligned_however_the_stream_is_cut() {
        for part_bytes in [&[1][..], &[0, 5, 0, 70, 0], &[64, 64], &[1000]] {
            let (payload, stream) = message(part_bytes);
            for piece in [1, 7, 64, 10_000] {
                let mut assembly = Assembly::new(part_bytes);
                let taken: usize = stream.chunks(piece).map(|bytes| assembly.push(bytes).unwrap()).sum();
                assert_eq!(taken, payload.len());
                let parts = assembly.finish().unwrap();
                assert_eq!(parts.iter().map(Bytes::len).collect::<Vec<_>>(), part_bytes);
                assert_eq!(parts.concat(), payload);
                assert!(
                    parts.iter().all(|part| part.is_empty() || part.as_ptr().align_offset(ALIGNMENT) == 0)
                );
            }
        }
    }

    #[test]
    fn every_flipped_byte_and_every_wrong_length_is_noticed() {
        let part_bytes = [5, 9];
        let (_, stream) = message(&part_bytes);
        for at in 0..stream.len() {
            let mut corrupt = stream.clone();
            corrupt[at] ^= 0x10;
            let mut assembly = Assembly::new(&part_bytes);
            assembly.push(&corrupt).unwrap();
            assert!(assembly.finish().is_err(), "byte {at}");
            let mut assembly = Assembly::new(&part_bytes);
            assembly.push(&stream[..at]).unwrap();
            assert!(assembly.finish().is_err(), "cut at {at}");
        }
        let mut assembly = Assembly::new(&part_bytes);
        assembly.push(&stream).unwrap();
        assert!(assembly.push(&[0]).is_err());
    }
}
