//! Payload on the streams of a message, in both directions.

use std::hash::Hasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use quinn::{ReadError, RecvStream, SendStream, VarInt};
use tokio::sync::watch;
use twox_hash::XxHash3_64;

use super::assembly::{Chunk, Filled};
use crate::wire::MessageHeader;

/// Bytes of every chunk but the last of a message of `total_bytes` between ranks with this many
/// lanes: large enough that few streams are needed, small enough that a lane with lost packets
/// delays little. Both sides compute the same number.
pub(crate) fn chunk_bytes(total_bytes: u64, lanes: usize) -> u64 {
    if lanes > 1 { CHUNK_BYTES } else { total_bytes.max(1) }
}

/// Chunks of a message that is cut like this; an empty one has a chunk as well.
pub(crate) fn chunk_count(total_bytes: u64, chunk_bytes: u64) -> u32 {
    // No message has more than 2^32 chunks.
    u32::try_from(total_bytes.div_ceil(chunk_bytes.max(1)).max(1)).unwrap_or(u32::MAX)
}

/// The memory of a posted receive, lent to the task that reads one of its streams.
pub(crate) struct ChunkLease {
    pub(crate) chunk: Chunk,
    pub(crate) moved: Arc<AtomicU64>,
    /// Ends with an error when the call has ended.
    pub(crate) cancelled: watch::Receiver<()>,
}

/// Why a chunk was not read to its end.
pub(crate) enum ReadEnd {
    /// The call has ended.
    Cancelled,
    ConnectionLost,
    /// The sender's call has ended.
    Withdrawn,
    Broken(&'static str),
}

pub(crate) async fn read_chunk(stream: &mut RecvStream, lease: ChunkLease) -> Result<Filled, ReadEnd> {
    let ChunkLease { mut chunk, moved, mut cancelled } = lease;
    let mut pieces: [Bytes; 32] = std::array::from_fn(|_| Bytes::new());
    loop {
        // `read_chunks` is cancel-safe.
        let read = tokio::select! {
            biased;
            _ = cancelled.changed() => return Err(ReadEnd::Cancelled),
            read = stream.read_chunks(&mut pieces) => read,
        };
        let count = match read {
            Ok(Some(count)) => count,
            Ok(None) => return chunk.finish().map_err(ReadEnd::Broken),
            Err(ReadError::Reset(_)) => return Err(ReadEnd::Withdrawn),
            Err(_) => return Err(ReadEnd::ConnectionLost),
        };
        for piece in &mut pieces[..count] {
            let payload_bytes = chunk.push(&std::mem::take(piece)).map_err(ReadEnd::Broken)?;
            moved.fetch_add(payload_bytes as u64, Ordering::Relaxed);
        }
    }
}

/// A stream that is reset, not ended, when its message is given up half-way.
pub(crate) struct OutgoingChunk {
    stream: SendStream,
    finished: bool,
}

impl OutgoingChunk {
    pub(crate) fn new(stream: SendStream) -> Self {
        Self { stream, finished: false }
    }
}

impl Drop for OutgoingChunk {
    fn drop(&mut self) {
        if !self.finished {
            let _ = self.stream.reset(WITHDRAWN);
        }
    }
}

/// Writes the chunk that the header names.
pub(crate) async fn write_chunk(
    out: &mut OutgoingChunk,
    header: &MessageHeader,
    chunk_bytes: u64,
    parts: &[Bytes],
    moved: &AtomicU64,
) -> Result<(), quinn::WriteError> {
    write_piece(&mut out.stream, Bytes::copy_from_slice(&header.encode()), None).await?;
    let mut checksum = XxHash3_64::new();
    for mut part in cut(parts, u64::from(header.chunk) * chunk_bytes, chunk_bytes) {
        while !part.is_empty() {
            let piece = part.split_to(part.len().min(PIECE_BYTES));
            checksum.write(&piece);
            write_piece(&mut out.stream, piece, Some(moved)).await?;
        }
    }
    write_piece(&mut out.stream, Bytes::copy_from_slice(&checksum.finish().to_le_bytes()), None).await?;
    out.finished = out.stream.finish().is_ok();
    Ok(())
}

/// The bytes `first..first + length` of all parts one after the other, as far as there are so many.
pub(crate) fn cut(parts: &[Bytes], first: u64, length: u64) -> impl Iterator<Item = Bytes> {
    let end = first.saturating_add(length);
    let mut at = 0;
    parts.iter().filter_map(move |part| {
        let (start, stop) = (at, at + part.len() as u64);
        at = stop;
        let within =
            |position: u64| usize::try_from(position.clamp(start, stop) - start).unwrap_or(usize::MAX);
        let range = within(first)..within(end);
        (!range.is_empty()).then(|| part.slice(range))
    })
}

/// Hands a piece to QUIC, which keeps a reference and copies nothing until it builds packets.
async fn write_piece(
    stream: &mut SendStream,
    piece: Bytes,
    moved: Option<&AtomicU64>,
) -> Result<(), quinn::WriteError> {
    let mut pieces = [piece];
    while !pieces[0].is_empty() {
        let written = stream.write_chunks(&mut pieces).await?;
        if let Some(moved) = moved {
            moved.fetch_add(written.bytes as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Payload is hashed and handed to QUIC in pieces of this size: large enough to be few, small
/// enough to stay in cache.
const PIECE_BYTES: usize = 1 << 20;

/// Size of a chunk of a message that several lanes share. It is larger than the largest message
/// that may be sent unrequested, so one stream carries an unrequested message.
const CHUNK_BYTES: u64 = 256 << 10;

/// The sender's call ended before the message was sent.
const WITHDRAWN: VarInt = VarInt::from_u32(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_all_parts_once() {
        let parts = [3, 0, 5, 1, 0].map(|length| Bytes::from(vec![length as u8; length]));
        for chunk_bytes in 1..12 {
            let chunks: Vec<Vec<u8>> = (0..9_u64.div_ceil(chunk_bytes))
                .map(|chunk| cut(&parts, chunk * chunk_bytes, chunk_bytes).flatten().collect())
                .collect();
            assert!(chunks[..chunks.len() - 1].iter().all(|chunk| chunk.len() as u64 == chunk_bytes));
            assert_eq!(chunks.concat(), parts.concat());
        }
    }

    #[test]
    fn messages_of_one_lane_are_one_chunk_and_those_of_several_lanes_are_cut() {
        assert_eq!([0, 1, 5 << 20].map(|bytes| chunk_count(bytes, chunk_bytes(bytes, 1))), [1, 1, 1]);
        let bytes = [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 << 20];
        assert_eq!(bytes.map(|bytes| chunk_count(bytes, chunk_bytes(bytes, 2))), [1, 1, 1, 2, 20]);
    }
}
