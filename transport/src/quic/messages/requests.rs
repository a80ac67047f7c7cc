//! The frames that two ranks exchange about their messages.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::calls::Ended;
use crate::error::TransportError;
use crate::quic::control::core::Core;
use crate::quic::network::frames::{FrameError, FrameReader};
use crate::rank::{Rank, Tag, Taken};
use crate::recorder::EventKind;
use crate::wire::Frame;

/// Most notes about one peer: its requests for messages that are not posted here, and messages
/// withdrawn before they came.
const MAX_PEER_NOTES: usize = 1 << 16;

impl Core {
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
                        // A peer that has the message has requested it.
                        let under_way = call.transfer.asked.map_or(Duration::ZERO, |asked| asked.elapsed());
                        call.completer.complete(Ok(Taken { under_way }));
                    }
                    self.call_ended();
                }
                Ok(Some(Frame::Refuse { tag, text })) => {
                    let call = {
                        let mut state = self.lock();
                        state.peer(peer).wants.remove(&tag);
                        state.take_send(peer, tag, Ended::GivenUp)
                    };
                    if let Some(call) = call {
                        self.recorder.note(EventKind::Refused, peer, tag, call.total);
                        call.transfer.task.abort();
                        call.completer.complete(Err(TransportError::PeerMisbehaved { peer, text }));
                    }
                    self.call_ended();
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
                Ok(Some(Frame::ShareMemory { offer })) => self.offered_memory(peer, offer),
                Ok(Some(Frame::NoSharedMemory { text })) => self.declined_memory(peer, &text),
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
        let Some(call) = state.calls.sends.get_mut(&(peer, tag)) else {
            // The request is too late: the sender has given up the message, and will never answer the
            // request.
            let is_given_up = state.calls.send_ended(peer, tag).is_some();
            let wants = &mut state.peer(peer).wants;
            if !is_given_up {
                wants.insert(tag);
            }
            return if wants.len() > MAX_PEER_NOTES { Err(()) } else { Ok(()) };
        };
        call.transfer.asked.get_or_insert_with(Instant::now);
        if let Some(wanted) = call.transfer.wanted.take() {
            let _ = wanted.send(());
        }
        if std::mem::take(&mut call.transfer.unwanted) {
            state.peer(peer).unwanted -= 1;
        }
        Ok(())
    }

    /// The sender has given up a message that arrived early or may still arrive. Its stream must
    /// not be kept.
    fn withdrawn(&self, peer: Rank, tag: Tag) -> Result<(), ()> {
        let mut state = self.lock();
        let is_known =
            state.calls.receives.contains_key(&(peer, tag)) || state.calls.receive_ended(peer, tag).is_some();
        self.recorder.note(EventKind::Withdrawn, peer, tag, 0);
        let peer = state.peer(peer);
        // The task that holds the stream then releases it. If the stream is not here yet, it is refused
        // when it arrives. If its receive is posted, it is read or reset.
        if peer.early.remove(&tag).is_none() && !is_known {
            peer.withdrawn.insert(tag);
        }
        if peer.withdrawn.len() > MAX_PEER_NOTES { Err(()) } else { Ok(()) }
    }
}
