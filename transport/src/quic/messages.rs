//! Messages: one stream each, sent when it is wanted, read when it was posted.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use bytes::Bytes;
use quinn::{RecvStream, VarInt};
use tokio::sync::oneshot;

use super::core::Core;
use super::frames::{FrameError, FrameReader};
use super::payload::{Granted, Outgoing, ReadEnd, read_message, write_message};
use super::state::{Patience, Phase, RecvCall, SendCall};
use crate::error::TransportError;
use crate::history::Ended;
use crate::misuse;
use crate::recorder::EventKind;
use crate::transport::{Completer, Rank, Tag};
use crate::wire::{Frame, HEADER_BYTES, MessageHeader, part_digest};

/// Larger messages are sent only when the receiver has asked for them.
const EARLY_BYTES: u64 = 64 << 10;

/// Messages that may be under way to one rank without having been asked for. With [`EARLY_BYTES`] they fill neither
/// the connection's window nor its streams, so what is wanted always gets through.
const EARLY_MESSAGES: usize = 64;

/// Wishes of one rank for messages that have not been posted here, and messages that it took back before they came.
const MOST_NOTES: usize = 1 << 16;

/// The receiver does not take the message.
const TURNED_AWAY: VarInt = VarInt::from_u32(2);

impl Core {
    pub(crate) fn send(
        self: &Arc<Self>,
        to: Rank,
        tag: Tag,
        parts: Vec<Bytes>,
        patience: Duration,
        completer: Completer<()>,
    ) {
        let total = match misuse::check_message(self.me, self.world, to, tag, parts.iter().map(Bytes::len)) {
            Ok(total) => total,
            Err(error) => return completer.complete(Err(error)),
        };
        let mut state = self.lock();
        if let Err(error) = state.may_post() {
            return completer.complete(Err(error));
        }
        if state.sends.contains_key(&(to, tag)) {
            return completer.complete(Err(misuse::outstanding_already("send", to, tag)));
        }
        let peer = &mut state.peers[to.0 as usize];
        if let Err(error) = peer.sent.post("send", to, tag) {
            return completer.complete(Err(error));
        }
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
        let task = Arc::clone(self).send_message(to, tag, parts, total, Arc::clone(&moved), wish);
        let task = self.runtime.spawn(task).abort_handle();
        let patience = Patience::of(patience);
        state.sends.insert((to, tag), SendCall { completer, total, moved, patience, wanted, unwanted, task });
        drop(state);
        if peer_left {
            self.peer_left(to);
        }
        self.changed.notify_waiters();
    }

    pub(crate) fn recv(
        self: &Arc<Self>,
        from: Rank,
        tag: Tag,
        part_bytes: &[usize],
        patience: Duration,
        completer: Completer<Vec<Bytes>>,
    ) {
        let total = match misuse::check_message(self.me, self.world, from, tag, part_bytes.iter().copied()) {
            Ok(total) => total,
            Err(error) => return completer.complete(Err(error)),
        };
        let mut state = self.lock();
        if let Err(error) = state.may_post() {
            return completer.complete(Err(error));
        }
        let peer = &mut state.peers[from.0 as usize];
        if let Err(error) = peer.received.post("receive", from, tag) {
            return completer.complete(Err(error));
        }
        let early = peer.early.remove(&tag);
        let peer_left = peer.left;
        if state.recvs.contains_key(&(from, tag)) {
            return completer.complete(Err(misuse::outstanding_already("receive", from, tag)));
        }
        self.recorder.note(EventKind::ReceivePosted, from, tag, total);
        let call = RecvCall {
            completer,
            part_bytes: part_bytes.to_vec(),
            total,
            moved: Arc::new(AtomicU64::new(0)),
            patience: Patience::of(patience),
            reading: None,
        };
        state.recvs.insert((from, tag), call);
        drop(state);
        if let Some(link) = self.link(from) {
            link.say(Frame::Want { tag });
        }
        if let Some(early) = early {
            let _ = early.send(());
        }
        if peer_left {
            self.peer_left(from);
        }
        self.changed.notify_waiters();
    }

    /// Sends one message. Its call ends when the receiver says that it has it; a lost connection is noticed by the
    /// watcher of the link.
    async fn send_message(
        self: Arc<Self>,
        to: Rank,
        tag: Tag,
        parts: Vec<Bytes>,
        total: u64,
        moved: Arc<AtomicU64>,
        wish: Option<oneshot::Receiver<()>>,
    ) {
        if let Some(wish) = wish
            && wish.await.is_err()
        {
            return;
        }
        let Some(link) = self.link(to) else { return };
        let Ok(stream) = link.connection.open_uni().await else {
            return;
        };
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
        };
        let _ = write_message(&mut Outgoing::new(stream), &header, parts, &moved).await;
    }

    /// Handles the frames of a data connection until it ends.
    pub(crate) async fn read_link(self: Arc<Self>, peer: Rank, mut frames: FrameReader) {
        loop {
            let frame = frames.next().await;
            self.recorder.heard(peer, None);
            match frame {
                Ok(Some(Frame::Want { tag })) => {
                    if self.wanted(peer, tag).is_err() {
                        return self.misbehaved(peer, None, "wants more messages than any plan has".into());
                    }
                }
                Ok(Some(Frame::Done { tag })) => {
                    let call = self.lock().take_send(peer, tag, Ended::Done);
                    if let Some(call) = call {
                        self.recorder.note(EventKind::Sent, peer, tag, call.total);
                        call.completer.complete(Ok(()));
                    }
                    self.changed.notify_waiters();
                }
                Ok(Some(Frame::Refuse { tag, text })) => {
                    let call = {
                        let mut state = self.lock();
                        state.peers[peer.0 as usize].wants.remove(&tag);
                        state.take_send(peer, tag, Ended::GivenUp)
                    };
                    if let Some(call) = call {
                        self.recorder.note(EventKind::Refused, peer, tag, call.total);
                        call.task.abort();
                        call.completer.complete(Err(TransportError::PeerMisbehaved { peer, text }));
                    }
                    self.changed.notify_waiters();
                }
                Ok(Some(Frame::Withdraw { tag })) => {
                    if self.withdrawn(peer, tag).is_err() {
                        return self.misbehaved(
                            peer,
                            None,
                            "takes back more messages than any plan has".into(),
                        );
                    }
                }
                Ok(Some(Frame::Leave)) => self.peer_left(peer),
                Ok(Some(other)) => {
                    return self.misbehaved(
                        peer,
                        None,
                        format!("{other:?} does not belong on a data connection"),
                    );
                }
                Err(FrameError::Wire(error)) => return self.misbehaved(peer, None, error.to_string()),
                // The end of the stream follows a leave; the end of the connection has a watcher.
                Ok(None) | Err(FrameError::Stream(_)) => return,
            }
        }
    }

    fn wanted(&self, peer: Rank, tag: Tag) -> Result<(), ()> {
        self.recorder.note(EventKind::Asked, peer, tag, 0);
        let mut state = self.lock();
        let Some(call) = state.sends.get_mut(&(peer, tag)) else {
            let peer = &mut state.peers[peer.0 as usize];
            // A wish for a message that was given up comes too late, and nobody would ever look at it.
            if peer.sent.of(tag).is_none() {
                peer.wants.insert(tag);
            }
            return if peer.wants.len() > MOST_NOTES { Err(()) } else { Ok(()) };
        };
        if let Some(wanted) = call.wanted.take() {
            let _ = wanted.send(());
        }
        if std::mem::take(&mut call.unwanted) {
            state.peers[peer.0 as usize].unwanted -= 1;
        }
        Ok(())
    }

    /// The sender of a message that came early, or will, has given it up: its stream must not be kept.
    fn withdrawn(&self, peer: Rank, tag: Tag) -> Result<(), ()> {
        let mut state = self.lock();
        let posted = state.recvs.contains_key(&(peer, tag));
        self.recorder.note(EventKind::Withdrawn, peer, tag, 0);
        let peer = &mut state.peers[peer.0 as usize];
        // Who waits for the stream then lets go of it. If it is not here yet, it is turned away when it comes; if
        // its receive is posted, it is read or reset.
        if peer.early.remove(&tag).is_none() && !posted && peer.received.of(tag).is_none() {
            peer.withdrawn.insert(tag);
        }
        if peer.withdrawn.len() > MOST_NOTES { Err(()) } else { Ok(()) }
    }

    /// Takes message streams of a data connection until it ends, and then says why it did.
    pub(crate) async fn accept_messages(self: Arc<Self>, peer: Rank) {
        let Some(link) = self.link(peer) else { return };
        // At most as many at once as the peer may have streams open.
        while let Ok(stream) = link.connection.accept_uni().await {
            tokio::spawn(Arc::clone(&self).receive_message(peer, stream));
        }
        let reason = link.connection.closed().await;
        self.link_ended(peer, &reason);
    }

    async fn receive_message(self: Arc<Self>, from: Rank, mut stream: RecvStream) {
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
        let claim = loop {
            match self.claim(from, &header) {
                Claim::Granted(claim) => break claim,
                Claim::Early(posted) => {
                    if posted.await.is_err() {
                        return;
                    }
                }
                Claim::TooLate => {
                    let _ = stream.stop(TURNED_AWAY);
                    return;
                }
                Claim::Wrong(text) => {
                    let _ = stream.stop(TURNED_AWAY);
                    return self.misbehaved(from, Some(tag), text);
                }
            }
        };
        self.recorder.heard(from, None);
        self.recorder.note(EventKind::FirstByte, from, tag, header.total_bytes);
        match read_message(&mut stream, claim).await {
            Ok(parts) => {
                let call = {
                    let mut state = self.lock();
                    state.peers[from.0 as usize].received.end(tag, Ended::Done);
                    state.recvs.remove(&(from, tag))
                };
                let Some(call) = call else { return };
                self.recorder.heard(from, None);
                self.recorder.note(EventKind::Received, from, tag, call.total);
                if let Some(link) = self.link(from) {
                    link.say(Frame::Done { tag });
                }
                call.completer.complete(Ok(parts));
                self.changed.notify_waiters();
            }
            Err(ReadEnd::Cancelled) => {
                let _ = stream.stop(TURNED_AWAY);
            }
            // Who withdraws a message has given up or is being aborted; an abort is on its way then, and knows whose
            // fault it is. If not, the receive has its own deadline.
            Err(ReadEnd::ConnectionLost | ReadEnd::Withdrawn) => {}
            Err(ReadEnd::Broken(text)) => self.misbehaved(from, Some(tag), format!("{tag} has {text}")),
        }
    }

    fn check_addresses(&self, from: Rank, header: &MessageHeader) -> Result<(), String> {
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

    /// Looks for the receive that a header belongs to.
    fn claim(&self, from: Rank, header: &MessageHeader) -> Claim {
        let tag = header.tag;
        let mut state = self.lock();
        if state.phase == Phase::Closed {
            // Nobody will ever post it, and it would wait here for ever.
            return Claim::TooLate;
        }
        if let Some(call) = state.recvs.get_mut(&(from, tag)) {
            if call.reading.is_some() {
                return Claim::Wrong(format!("{tag} was sent twice"));
            }
            let expected = (call.part_bytes.len(), call.total, part_digest(call.part_bytes.iter().copied()));
            if (header.part_count as usize, header.total_bytes, header.part_digest) != expected {
                return Claim::Wrong(format!(
                    "{tag}: rank {from} sends {} parts of {} bytes in all, rank {} expects parts of {:?} bytes",
                    header.part_count, header.total_bytes, self.me, call.part_bytes
                ));
            }
            let (reading, cancelled) = oneshot::channel();
            call.reading = Some(reading);
            let (part_bytes, moved) = (call.part_bytes.clone(), Arc::clone(&call.moved));
            return Claim::Granted(Granted { part_bytes, moved, cancelled });
        }
        let peer = &mut state.peers[from.0 as usize];
        match peer.received.of(tag) {
            Some(Ended::Done) => return Claim::Wrong(format!("{tag} was sent twice")),
            Some(Ended::GivenUp) => return Claim::TooLate,
            None => {}
        }
        if peer.withdrawn.remove(&tag) {
            return Claim::TooLate;
        }
        if let Some(latest_op) = peer.received.is_past(tag) {
            return Claim::Wrong(format!("{tag} is of the past: operation {latest_op} is under way"));
        }
        if header.total_bytes > EARLY_BYTES {
            return Claim::Wrong(format!(
                "{} bytes of {tag} were sent before they were asked for",
                header.total_bytes
            ));
        }
        let (sender, posted) = oneshot::channel();
        if peer.early.insert(tag, sender).is_some() {
            return Claim::Wrong(format!("{tag} was sent twice"));
        }
        Claim::Early(posted)
    }
}

/// What a header is entitled to.
enum Claim {
    Granted(Granted),
    /// Nothing yet: wait until the receive is posted, and look again.
    Early(oneshot::Receiver<()>),
    /// Its receiver or its sender has given it up.
    TooLate,
    Wrong(String),
}
