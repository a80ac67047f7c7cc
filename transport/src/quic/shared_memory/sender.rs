//! The sending side of shared memory: chunks take the slots of a segment in turn.

use std::hash::Hasher;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{Notify, Semaphore};
use twox_hash::XxHash3_64;

use super::notices::{NOTICE_BYTES, Notice};
use super::segment::{SLOTS, Segment};
use crate::quic::payload::assembly::COPY_BYTES;
use crate::wire::MessageHeader;

/// What a rank sends to one other rank through shared memory, and the notices that wait for the
/// socket between them.
#[derive(Debug)]
pub(crate) struct SharedSender {
    segment: Segment,
    /// Slots that the peer has read, or that were never used.
    free: Semaphore,
    turns: tokio::sync::Mutex<()>,
    queue: Mutex<Queue>,
    /// Chunks of the peer that have been read, and of which it has not been told.
    read: AtomicU32,
    /// Wakes [`Self::write`].
    changed: Notify,
    /// Payload bytes.
    sent: AtomicU64,
    /// Payload bytes that came the other way.
    received: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    /// The slot of the next chunk.
    slot: usize,
    /// Encoded notices, at most one for each slot.
    notices: Vec<u8>,
}

impl SharedSender {
    pub(crate) fn new(segment: Segment) -> Self {
        Self {
            segment,
            free: Semaphore::new(SLOTS),
            turns: tokio::sync::Mutex::default(),
            queue: Mutex::default(),
            read: AtomicU32::new(0),
            changed: Notify::new(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }

    /// Bytes of every chunk but the last of a message.
    pub(crate) fn chunk_bytes(&self) -> usize {
        self.segment.size().chunk_bytes
    }

    /// Payload bytes sent and received.
    pub(crate) fn moved_bytes(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }

    /// Waits for the turn of a message, which ends when the guard is dropped: messages go one after
    /// the other, as on a lane.
    pub(crate) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turns.lock().await
    }

    /// Copies a chunk into the next slot as soon as it is free. Cancelled while it waits, it has
    /// done nothing.
    pub(crate) async fn send(
        &self,
        header: &MessageHeader,
        pieces: impl Iterator<Item = Bytes>,
    ) -> Result<(), &'static str> {
        let permit = self.free.acquire().await.map_err(|_| "a link that is closed")?;
        {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            let (mut checksum, mut at) = (XxHash3_64::new(), 0);
            for piece in pieces {
                // In pieces that stay in the cache between the checksum and the copy.
                for bytes in piece.chunks(COPY_BYTES) {
                    checksum.write(bytes);
                    self.segment.write(queue.slot, at, bytes)?;
                    at += bytes.len();
                }
            }
            let notice = Notice::Chunk { header: header.encode(), checksum: checksum.finish() };
            queue.notices.extend_from_slice(&notice.encode());
            queue.slot = (queue.slot + 1) % SLOTS;
            self.sent.fetch_add(at as u64, Ordering::Relaxed);
            // The peer gives it back.
            permit.forget();
        }
        self.changed.notify_one();
        // The notice leaves before the next chunk is copied, so that the peer copies at the same time.
        tokio::task::yield_now().await;
        Ok(())
    }

    /// The peer says that it has read so many chunks.
    pub(crate) fn freed(&self, count: u32) -> Result<(), &'static str> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        // Nobody else adds permits, and taking some makes the sum smaller.
        if count > SLOTS - self.free.available_permits().min(SLOTS) {
            return Err("more chunks read than were sent through shared memory");
        }
        self.free.add_permits(count);
        Ok(())
    }

    /// A chunk of the peer with so many bytes for this rank has been read.
    pub(crate) fn has_read(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
        self.read.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Writes notices until the socket ends. `told` counts the chunks that the peer knows to be
    /// read.
    pub(crate) async fn write(&self, mut socket: OwnedWriteHalf, told: &AtomicU64) {
        let mut batch = Vec::with_capacity((SLOTS + 1) * NOTICE_BYTES);
        loop {
            batch.clear();
            batch.append(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner).notices);
            let read = self.read.swap(0, Ordering::Relaxed);
            if read > 0 {
                batch.extend_from_slice(&Notice::Free(read).encode());
                told.fetch_add(u64::from(read), Ordering::Relaxed);
            }
            if batch.is_empty() {
                self.changed.notified().await;
            } else if socket.write_all(&batch).await.is_err() {
                // The reader of the socket reports its end.
                return;
            }
        }
    }
}
