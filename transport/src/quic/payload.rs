//! Payload on a message's stream, in both directions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use quinn::{ReadError, RecvStream, SendStream, VarInt};
use tokio::sync::oneshot;
use xxhash_rust::xxh3::Xxh3;

use super::assembly::Assembly;
use crate::wire::MessageHeader;

/// What a posted receive lends to whoever reads its stream.
pub(crate) struct Granted {
    pub(crate) part_bytes: Vec<usize>,
    pub(crate) moved: Arc<AtomicU64>,
    /// Ends with an error when the call has ended.
    pub(crate) cancelled: oneshot::Receiver<std::convert::Infallible>,
}

/// Why a message was not read to its end.
pub(crate) enum ReadEnd {
    /// The call has ended.
    Cancelled,
    ConnectionLost,
    /// The sender's call has ended.
    Withdrawn,
    Broken(&'static str),
}

pub(crate) async fn read_message(stream: &mut RecvStream, granted: Granted) -> Result<Vec<Bytes>, ReadEnd> {
    let Granted { part_bytes, moved, mut cancelled } = granted;
    let mut assembly = Assembly::new(&part_bytes);
    let mut chunks: [Bytes; 32] = std::array::from_fn(|_| Bytes::new());
    loop {
        // `read_chunks` is cancel-safe.
        let read = tokio::select! {
            biased;
            _ = &mut cancelled => return Err(ReadEnd::Cancelled),
            read = stream.read_chunks(&mut chunks) => read,
        };
        let count = match read {
            Ok(Some(count)) => count,
            Ok(None) => return assembly.finish().map_err(ReadEnd::Broken),
            Err(ReadError::Reset(_)) => return Err(ReadEnd::Withdrawn),
            Err(_) => return Err(ReadEnd::ConnectionLost),
        };
        for chunk in &mut chunks[..count] {
            let payload_bytes = assembly.push(&std::mem::take(chunk)).map_err(ReadEnd::Broken)?;
            moved.fetch_add(payload_bytes as u64, Ordering::Relaxed);
        }
    }
}

/// A stream that is reset, not ended, when its message is given up half-way.
pub(crate) struct Outgoing {
    stream: SendStream,
    finished: bool,
}

impl Outgoing {
    pub(crate) fn new(stream: SendStream) -> Self {
        Self { stream, finished: false }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if !self.finished {
            let _ = self.stream.reset(WITHDRAWN);
        }
    }
}

pub(crate) async fn write_message(
    out: &mut Outgoing,
    header: &MessageHeader,
    parts: Vec<Bytes>,
    moved: &AtomicU64,
) -> Result<(), quinn::WriteError> {
    write_piece(&mut out.stream, Bytes::copy_from_slice(&header.encode()), None).await?;
    let mut checksum = Xxh3::new();
    for mut part in parts {
        while !part.is_empty() {
            let piece = part.split_to(part.len().min(PIECE_BYTES));
            checksum.update(&piece);
            write_piece(&mut out.stream, piece, Some(moved)).await?;
        }
    }
    write_piece(&mut out.stream, Bytes::copy_from_slice(&checksum.digest().to_le_bytes()), None).await?;
    out.finished = out.stream.finish().is_ok();
    Ok(())
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

/// Payload is hashed and handed to QUIC in pieces of this size: large enough to be few, small enough to stay in cache.
const PIECE_BYTES: usize = 1 << 20;

/// The sender's call ended before the message was sent.
const WITHDRAWN: VarInt = VarInt::from_u32(1);
