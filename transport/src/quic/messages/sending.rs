//! The sender's side of messages: each is sent when its receiver asks for it, over all lanes at
//! once if it is large. Large ones leave one after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Instrument;

use crate::calls::check_message;
use crate::posted::Completer;
use crate::quic::control::core::Core;
use crate::quic::control::link::Lane;
use crate::quic::control::state::{Deadline, Outgoing, SendCall};
use crate::quic::payload::chunks::{OutgoingChunk, chunk_bytes, chunk_count, cut, write_chunk};
use crate::quic::shared_memory::sender::SharedSender;
use crate::rank::{Rank, Tag, Taken};
use crate::recorder::EventKind;
use crate::spans;
use crate::wire::{MessageHeader, part_digest};

/// Larger messages are sent only after the receiver has requested them.
pub(crate) const EARLY_BYTES: u64 = 64 << 10;

/// Unrequested messages that may be in flight to one rank. With [`EARLY_BYTES`] they fill neither
/// the connection's window nor its streams, so requested messages can always be sent.
const EARLY_MESSAGES: usize = 64;

impl Core {
    pub(crate) fn send(
        self: &Arc<Self>,
        to: Rank,
        tag: Tag,
        parts: Vec<Bytes>,
        timeout: Duration,
        completer: Completer<Taken>,
    ) {
        let total = match check_message(self.me, self.size, to, tag, parts.iter().map(Bytes::len)) {
            Ok(total) => total,
            Err(error) => return completer.complete(Err(error)),
        };
        let mut state = self.lock();
        if let Err(error) = state.may_post() {
            return completer.complete(Err(error));
        }
        if let Err(error) = state.calls.begin_send(to, tag) {
            return completer.complete(Err(error));
        }
        let peer = state.peer(to);
        let wanted_already = peer.wants.remove(&tag);
        let unwanted = !wanted_already && total <= EARLY_BYTES && peer.unwanted < EARLY_MESSAGES;
        if unwanted {
            peer.unwanted += 1;
        }
        let peer_left = peer.left;
        self.recorder.note(EventKind::SendPosted, to, tag, total);
        let (wanted, wish) = if wanted_already || unwanted {
            (None, None)
        } else {
            let (sender, receiver) = oneshot::channel();
            (Some(sender), Some(receiver))
        };
        let moved = Arc::new(AtomicU64::new(0));
        let told = (Arc::clone(&moved), spans::send(self.me, to, tag, total));
        let task = Arc::clone(self).send_message(to, tag, parts, total, told, wish);
        let task = self.runtime.spawn(task).abort_handle();
        let asked = wanted_already.then(Instant::now);
        let transfer = Outgoing { moved, asked, wanted, unwanted, task };
        let deadline = Deadline::after(timeout);
        let call = SendCall { completer, total, deadline, transfer };
        state.calls.sends.insert((to, tag), call);
        drop(state);
        if peer_left {
            self.peer_left(to);
        }
        self.posted(deadline);
    }

    /// Sends one message. Its call ends when the receiver confirms the message. The watcher of the
    /// link detects a lost connection.
    async fn send_message(
        self: Arc<Self>,
        to: Rank,
        tag: Tag,
        parts: Vec<Bytes>,
        total: u64,
        (moved, span): (Arc<AtomicU64>, tracing::Span),
        wish: Option<oneshot::Receiver<()>>,
    ) {
        if let Some(wish) = wish
            && wish.await.is_err()
        {
            return;
        }
        let Some(link) = self.link(to) else { return };
        let header = MessageHeader {
            job_low: self.job.low(),
            epoch: self.epoch,
            from: self.me,
            to,
            tag,
            // A list of parts that has more than 2^32 entries does not exist.
            part_count: u32::try_from(parts.len()).unwrap_or(u32::MAX),
            part_digest: part_digest(parts.iter().map(Bytes::len)),
            total_bytes: total,
            chunk: 0,
        };
        let shared = if total > EARLY_BYTES { link.sharing.sender().await } else { None };
        let chunk_bytes = match &shared {
            Some(shared) => shared.chunk_bytes() as u64,
            None => chunk_bytes(total, link.lanes.len()),
        };
        let chunks = chunk_count(total, chunk_bytes);
        let sending = Sending { header, chunk_bytes, chunks, next: AtomicU32::new(0), parts, moved, span };
        if let Some(shared) = shared {
            return sending.run_shared(&shared).await;
        }
        if sending.chunks == 1 {
            return sending.run(0, &link.lanes[0]).await;
        }
        let sending = Arc::new(sending);
        // The lanes' tasks end with this task if the message is given up.
        let mut lanes = JoinSet::new();
        for (index, lane) in link.lanes.clone().into_iter().enumerate() {
            let (sending, runtime) = (Arc::clone(&sending), lane.runtime.clone());
            let run = async move { sending.run(index, &lane).await };
            lanes.spawn_on(run, &runtime);
        }
        lanes.join_all().await;
    }
}

/// A message that all lanes send at the same time. Each lane takes the next chunk when it has sent
/// its last one. So a lane that has lost packets does not delay the other lanes.
struct Sending {
    header: MessageHeader,
    chunk_bytes: u64,
    chunks: u32,
    /// The next chunk that no lane has taken.
    next: AtomicU32,
    parts: Vec<Bytes>,
    moved: Arc<AtomicU64>,
    span: tracing::Span,
}

impl Sending {
    /// Sends all chunks through shared memory. Ends early if the connection does.
    async fn run_shared(&self, shared: &SharedSender) {
        let _turn = shared.turn().await;
        for chunk in 0..self.chunks {
            let header = MessageHeader { chunk, ..self.header };
            let pieces = || cut(&self.parts, u64::from(chunk) * self.chunk_bytes, self.chunk_bytes);
            let span = tracing::trace_span!(parent: &self.span, "chunk", lane = "shared memory", chunk);
            if shared.send(&header, pieces()).instrument(span).await.is_err() {
                return;
            }
            let bytes: usize = pieces().map(|piece| piece.len()).sum();
            self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// Sends chunks on one lane while there are any. Ends early if the connection does.
    async fn run(&self, index: usize, lane: &Lane) {
        // A small message does not wait behind large ones.
        let turn = if self.header.total_bytes > EARLY_BYTES { Some(lane.turn().await) } else { None };
        let priority = turn.as_deref().copied().unwrap_or_default();
        loop {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.chunks {
                return;
            }
            let Ok(stream) = lane.connection.open_uni().await else { return };
            let _ = stream.set_priority(priority);
            let header = MessageHeader { chunk, ..self.header };
            let mut out = OutgoingChunk::new(stream);
            let span = tracing::trace_span!(parent: &self.span, "chunk", lane = index, chunk);
            let written = write_chunk(&mut out, &header, self.chunk_bytes, &self.parts, &self.moved);
            if written.instrument(span).await.is_err() {
                return;
            }
        }
    }
}
