//! Control frames over a QUIC stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use quinn::{RecvStream, SendStream};
use tokio::sync::mpsc;

use crate::wire::{Frame, FrameStream, WireError};

/// Why the stream of frames ended.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum FrameError {
    /// The received bytes are not a frame.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The stream or its connection is gone.
    #[error("{0}")]
    Stream(quinn::ReadError),
}

/// Reads frames; holds at most one of them.
#[derive(Debug)]
pub(crate) struct FrameReader {
    stream: RecvStream,
    come: FrameStream,
}

impl FrameReader {
    pub(crate) fn new(stream: RecvStream) -> Self {
        Self { stream, come: FrameStream::default() }
    }

    /// The next frame, or `None` at the end of the stream. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        loop {
            if let Some(frame) = self.come.take()? {
                return Ok(Some(frame.with_harmless_texts()));
            }
            match self.stream.read_chunk(READ_BYTES, true).await.map_err(FrameError::Stream)? {
                Some(chunk) => self.come.put(&chunk.bytes),
                None if self.come.is_empty() => return Ok(None),
                None => return Err(WireError::UnexpectedEnd.into()),
            }
        }
    }
}

/// Most bytes taken from the stream at once.
const READ_BYTES: usize = 4096;

/// The sending end of a link's frames, which are encoded already.
///
/// Unbounded, because only this rank's own calls put frames in: at most a few per outstanding call
/// and heartbeat. A peer that reads none of them is found by their number, with the next heartbeat.
pub(crate) type FrameSender = mpsc::UnboundedSender<Bytes>;

/// For how many frames these bytes count while they wait for their peer: one for each KiB, so that
/// memory is bounded too.
pub(crate) fn weight(frames: &Bytes) -> usize {
    1 + frames.len() / 1024
}

/// Writes queued frames, and ends the stream after all senders are gone and the peer has every
/// frame.
pub(crate) async fn write_frames(
    mut stream: SendStream,
    mut frames: mpsc::UnboundedReceiver<Bytes>,
    queued: Arc<AtomicUsize>,
) {
    // Small and urgent: ahead of payload on the same connection.
    let _ = stream.set_priority(10);
    let mut batch = Vec::new();
    while let Some(first) = frames.recv().await {
        batch.clear();
        let (mut next, mut large, mut taken) = (Some(first), None, 0);
        while let Some(frame) = next.take() {
            taken += weight(&frame);
            if frame.len() >= READ_BYTES {
                // Not copied: other links may send the same bytes.
                large = Some(frame);
                break;
            }
            batch.extend_from_slice(&frame);
            if batch.len() < READ_BYTES {
                next = frames.try_recv().ok();
            }
        }
        queued.fetch_sub(taken, Ordering::Relaxed);
        // The task that watches the connection notices its end, with the reason.
        if !batch.is_empty() && stream.write_all(&batch).await.is_err() {
            return;
        }
        if let Some(large) = large
            && stream.write_chunk(large).await.is_err()
        {
            return;
        }
    }
    if stream.finish().is_ok() {
        let _ = stream.stopped().await;
    }
}
