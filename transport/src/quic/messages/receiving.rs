//! The receiver's side of messages: a posted receive asks for its message and reads it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use bytes::Bytes;
use quinn::{Connection, RecvStream, VarInt};
use tokio::sync::{oneshot, watch};
use tracing::Instrument;

use super::sending::EARLY_BYTES;
use crate::calls::{Ended, check_message};
use crate::posted::Completer;
use crate::quic::control::core::Core;
use crate::quic::control::state::{Deadline, Incoming, Phase, Reading, ReceiveCall};
use crate::quic::network::connection::is_leave;
use crate::quic::payload::assembly::{Assembly, Filled};
use crate::quic::payload::chunks::{ChunkLease, ReadEnd, chunk_bytes, read_chunk};
use crate::rank::{Rank, Tag};
use crate::recorder::EventKind;
use crate::spans;
use crate::wire::{Frame, HEADER_BYTES, MessageHeader, part_digest};

/// The receiver does not take the message.
const REFUSED: VarInt = VarInt::from_u32(2);

impl Core {
    pub(crate) fn recv(
        self: &Arc<Self>,
        from: Rank,
        tag: Tag,
        part_bytes: &[usize],
        patience: Duration,
        completer: Completer<Vec<Bytes>>,
    ) {
        let total = match check_message(self.me, self.size, from, tag, part_bytes.iter().copied()) {
            Ok(total) => total,
            Err(error) => return completer.complete(Err(error)),
        };
        let mut state = self.lock();
        if let Err(error) = state.may_post() {
            return completer.complete(Err(error));
        }
        if let Err(error) = state.calls.begin_receive(from, tag) {
            return completer.complete(Err(error));
        }
        let peer = state.peer(from);
        let early = peer.early.remove(&tag);
        let peer_left = peer.left;
        self.recorder.note(EventKind::ReceivePosted, from, tag, total);
        let span = spans::receive(self.me, from, tag, total);
        let transfer = Incoming { moved: Arc::new(AtomicU64::new(0)), reading: None, span };
        let (part_bytes, deadline) = (part_bytes.to_vec(), Deadline::after(patience));
        let call = ReceiveCall { completer, part_bytes, total, deadline, transfer };
        state.calls.receives.insert((from, tag), call);
        drop(state);
        match early {
            // On its way already: the sender hears next that it is done.
            Some(early) => _ = early.send(()),
            None => {
                if let Some(link) = self.link(from) {
                    link.say(Frame::Want { tag });
                }
            }
        }
        if peer_left {
            self.peer_left(from);
        }
        self.posted(deadline);
    }

    /// Accepts the streams of a lane until its connection ends, and then reports the reason of the
    /// end.
    pub(crate) async fn accept_chunks(self: Arc<Self>, peer: Rank, lane: usize, connection: Connection) {
        // At most as many at once as the peer may have streams open.
        while let Ok(stream) = connection.accept_uni().await {
            tokio::spawn(Arc::clone(&self).receive_chunk(peer, lane, stream));
        }
        let reason = connection.closed().await;
        // A peer that leaves in order announces it in its last frame on the first lane.
        if lane == 0 || !is_leave(&reason) {
            self.link_ended(peer, &reason);
        }
    }

    async fn receive_chunk(self: Arc<Self>, from: Rank, lane: usize, mut stream: RecvStream) {
        let mut header = [0; HEADER_BYTES];
        match stream.read_exact(&mut header).await {
            Ok(()) => {}
            Err(quinn::ReadExactError::FinishedEarly(_)) => {
                return self.misbehaved(from, None, "a message that ends within its header".into());
            }
            // Withdrawn, or the connection is gone.
            Err(quinn::ReadExactError::ReadError(_)) => return,
        }
        let header = match MessageHeader::decode(&header) {
            Ok(header) => header,
            Err(error) => return self.misbehaved(from, None, error.to_string()),
        };
        if let Err(text) = self.check_addresses(from, &header) {
            return self.misbehaved(from, None, text);
        }
        let tag = header.tag;
        let lanes = self.link(from).map_or(1, |link| link.lanes.len());
        let (claim, span) = loop {
            match self.claim(from, &header, chunk_bytes(header.total_bytes, lanes)) {
                HeaderMatch::Granted(claim, message) => {
                    break (
                        claim,
                        tracing::trace_span!(parent: message, "chunk", lane, chunk = header.chunk),
                    );
                }
                HeaderMatch::Early(posted) => {
                    if posted.await.is_err() {
                        return;
                    }
                }
                HeaderMatch::TooLate => {
                    let _ = stream.stop(REFUSED);
                    return;
                }
                HeaderMatch::Wrong(text) => {
                    let _ = stream.stop(REFUSED);
                    return self.misbehaved(from, Some(tag), text);
                }
            }
        };
        self.recorder.heard(from, None);
        match read_chunk(&mut stream, claim).instrument(span).await {
            Ok(filled) => self.received(from, tag, header.chunk, filled),
            Err(ReadEnd::Cancelled) => {
                let _ = stream.stop(REFUSED);
            }
            // A sender withdraws a message if it has given up or is being aborted. In the second case an
            // abort is in flight and names the culprit. In the first case the receive has its own
            // deadline.
            Err(ReadEnd::ConnectionLost | ReadEnd::Withdrawn) => {}
            Err(ReadEnd::Broken(text)) => self.misbehaved(from, Some(tag), format!("{tag} has {text}")),
        }
    }

    /// A chunk is complete, and perhaps its message.
    pub(super) fn received(&self, from: Rank, tag: Tag, chunk: u32, filled: Filled) {
        self.recorder.heard(from, None);
        let (call, reading) = {
            let mut state = self.lock();
            let call = state.calls.receives.get_mut(&(from, tag));
            let Some(reading) = call.and_then(|call| call.transfer.reading.as_mut()) else { return };
            if !reading.assembly.put_back(chunk as usize, filled) {
                return;
            }
            let Some(mut call) = state.calls.take_receive(from, tag, Ended::Done) else { return };
            let Some(reading) = call.transfer.reading.take() else { return };
            (call, reading)
        };
        self.recorder.note(EventKind::Received, from, tag, call.total);
        if let Some(link) = self.link(from) {
            link.say(Frame::Done { tag });
        }
        call.completer.complete(Ok(reading.assembly.finish()));
        self.call_ended();
    }

    pub(super) fn check_addresses(&self, from: Rank, header: &MessageHeader) -> Result<(), String> {
        if header.from != from || header.to != self.me {
            let MessageHeader { from: said_from, to, .. } = header;
            return Err(format!(
                "a message from rank {said_from} to rank {to} on the connection from rank {from} to rank {}",
                self.me
            ));
        }
        if header.job_low != self.job.low() || header.epoch != self.epoch {
            return Err(format!("{} of another job or epoch ({})", header.tag, header.epoch));
        }
        Ok(())
    }

    /// Looks for the receive that a header belongs to. Every chunk but the last of a message has
    /// `chunk_bytes` on the way by which this one has come.
    pub(super) fn claim(&self, from: Rank, header: &MessageHeader, chunk_bytes: u64) -> HeaderMatch {
        let tag = header.tag;
        let mut state = self.lock();
        if state.phase == Phase::Closed {
            // No receive will be posted, and the stream would wait here for ever.
            return HeaderMatch::TooLate;
        }
        if let Some(call) = state.calls.receives.get_mut(&(from, tag)) {
            let expected = (call.part_bytes.len(), call.total, part_digest(call.part_bytes.iter().copied()));
            if (header.part_count as usize, header.total_bytes, header.part_digest) != expected {
                return HeaderMatch::Wrong(format!(
                    "{tag}: rank {from} sends {} parts of {} bytes in all, rank {} expects parts of {:?} bytes",
                    header.part_count, header.total_bytes, self.me, call.part_bytes
                ));
            }
            let reading = call.transfer.reading.get_or_insert_with(|| {
                self.recorder.note(EventKind::FirstByte, from, tag, header.total_bytes);
                let bytes = usize::try_from(chunk_bytes).unwrap_or(usize::MAX);
                let going_on = watch::Sender::new(());
                Reading { assembly: Assembly::new(&call.part_bytes, bytes), chunk_bytes, going_on }
            });
            if reading.chunk_bytes != chunk_bytes {
                return HeaderMatch::Wrong(format!(
                    "{tag} came in parts over QUIC and through shared memory"
                ));
            }
            return match reading.assembly.take(header.chunk as usize) {
                Ok(chunk) => {
                    let (moved, cancelled) = (Arc::clone(&call.transfer.moved), reading.going_on.subscribe());
                    HeaderMatch::Granted(ChunkLease { chunk, moved, cancelled }, call.transfer.span.id())
                }
                Err(text) => HeaderMatch::Wrong(format!("{tag} has {text}")),
            };
        }
        match state.calls.receive_ended(from, tag) {
            Some(Ended::Done) => return HeaderMatch::Wrong(format!("{tag} was sent twice")),
            Some(Ended::GivenUp) => return HeaderMatch::TooLate,
            None => {}
        }
        if state.peer(from).withdrawn.remove(&tag) {
            return HeaderMatch::TooLate;
        }
        if let Some(latest_op) = state.calls.receive_is_past(from, tag) {
            return HeaderMatch::Wrong(format!(
                "{tag} is of an operation that has ended: operation {latest_op} is under way"
            ));
        }
        if header.total_bytes > EARLY_BYTES {
            return HeaderMatch::Wrong(format!(
                "{} bytes of {tag} were sent before they were asked for",
                header.total_bytes
            ));
        }
        let (sender, posted) = oneshot::channel();
        if state.peer(from).early.insert(tag, sender).is_some() {
            return HeaderMatch::Wrong(format!("{tag} was sent twice"));
        }
        HeaderMatch::Early(posted)
    }
}

/// The receive that a message header belongs to.
pub(super) enum HeaderMatch {
    /// With the span of its message.
    Granted(ChunkLease, Option<tracing::Id>),
    /// No receive yet: wait until it is posted, and look again.
    Early(oneshot::Receiver<()>),
    /// Its receiver or its sender has given it up.
    TooLate,
    Wrong(String),
}
