//! Messages between two ranks on one host: they go through shared memory as soon as the two have
//! found that they can.
//!
//! The lower of two ranks offers memory, in its first frame on the data connection. So each rank
//! knows, when the other one requests a message, whether there was an offer; the message waits
//! until the offer is answered.

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, BufReader};
use tokio::net::unix::OwnedReadHalf;
use tokio::time::timeout;

use super::receiving::HeaderMatch;
use crate::quic::control::core::Core;
use crate::quic::control::link::Link;
use crate::quic::control::state::Phase;
use crate::quic::shared_memory::meeting::{Meeting, MeetingPlace, accept};
use crate::quic::shared_memory::notices::{NOTICE_BYTES, Notice};
use crate::quic::shared_memory::segment::{SLOTS, Segment, SegmentSize};
use crate::quic::shared_memory::sender::SharedSender;
use crate::rank::Rank;
use crate::wire::{Frame, MemoryOffer, MessageHeader};

impl Core {
    /// The size of shared memory, unless this rank shares none.
    fn shares(&self) -> Option<SegmentSize> {
        let may = self.endpoint.config.link.shared_memory && !self.endpoint.is_simulated;
        SegmentSize::of_group(self.size).filter(|_| may)
    }

    /// Offers memory to the higher ranks whose address is one of this host. Nothing may be sent to
    /// them before.
    pub(crate) fn offer_memory(self: &Arc<Self>) {
        let Some(size) = self.shares() else { return };
        for (peer, link) in (0..).map(Rank).zip(&self.links).skip(self.me.0 as usize + 1) {
            let Some(link) = link.as_ref().filter(|link| is_at_this_host(link)) else { continue };
            match MeetingPlace::open() {
                Ok((place, offer)) => {
                    link.sharing.offered();
                    link.say(Frame::ShareMemory { offer });
                    let core = Arc::clone(self);
                    self.until_over(async move {
                        let met = timeout(LONGEST_MEETING, place.meet(size)).await;
                        core.met(peer, met.unwrap_or_else(|_| Err("it did not come".into())));
                    });
                }
                Err(text) => self.shares_not(peer, &text),
            }
        }
    }

    /// The peer offers memory to this rank.
    pub(crate) fn offered_memory(self: &Arc<Self>, peer: Rank, offer: MemoryOffer) {
        let Some(link) = self.link(peer) else { return };
        if peer > self.me || !link.sharing.offered() {
            return self.misbehaved(peer, None, "offers shared memory out of turn".into());
        }
        let core = Arc::clone(self);
        self.until_over(async move {
            // The rank that offers has the clock: when it ends the meeting, the socket ends here.
            let met = match core.shares() {
                Some(size) => accept(offer, size).await,
                None => Err("shared memory is switched off there".into()),
            };
            if let (Err(text), Some(link)) = (&met, core.link(peer)) {
                link.say(Frame::NoSharedMemory { text: text.clone() });
            }
            core.met(peer, met);
        });
    }

    /// The peer does not take the memory that this rank has offered.
    pub(crate) fn declined_memory(&self, peer: Rank, text: &str) {
        if self.me < peer {
            self.shares_not(peer, text);
        }
    }

    fn shares_not(&self, peer: Rank, text: &str) {
        tracing::debug!(rank = %self.me, %peer, text, "no shared memory");
        if let Some(link) = self.link(peer) {
            link.sharing.declined();
        }
    }

    /// Begins to share memory with a peer, if there was a meeting.
    pub(crate) fn met(self: &Arc<Self>, peer: Rank, met: Result<Meeting, String>) {
        let Meeting { socket, outgoing, incoming } = match met {
            Ok(meeting) => meeting,
            Err(text) => return self.shares_not(peer, &text),
        };
        let Some(link) = self.link(peer) else { return };
        tracing::debug!(rank = %self.me, %peer, "shared memory");
        let (reader, writer) = socket.into_split();
        let sender = Arc::new(SharedSender::new(outgoing));
        let told = Arc::new(AtomicU64::new(0));
        link.sharing.begins(Arc::clone(&sender));
        let writing = (Arc::clone(&sender), Arc::clone(&told));
        self.until_over(async move { writing.0.write(writer, &writing.1).await });
        let core = Arc::clone(self);
        self.until_over(async move {
            match core.read_notices(peer, reader, &incoming, (&sender, &told)).await {
                Ok(()) => core.sharing_ended(peer).await,
                Err(text) => core.misbehaved(peer, None, text.into()),
            }
        });
    }

    /// Runs a task that ends at the latest when this rank has left the group.
    fn until_over(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut over = self.over.subscribe();
        self.runtime.spawn(async move {
            tokio::select! {
                () = task => {}
                () = async { _ = over.wait_for(|over| *over).await } => {}
            }
        });
    }

    /// Handles the notices of a peer until its socket ends or it breaks the protocol.
    async fn read_notices(
        self: &Arc<Self>,
        peer: Rank,
        socket: OwnedReadHalf,
        incoming: &Segment,
        (sender, told): (&SharedSender, &AtomicU64),
    ) -> Result<(), &'static str> {
        let mut socket = BufReader::with_capacity(2 * SLOTS * NOTICE_BYTES, socket);
        let mut notice = [0; NOTICE_BYTES];
        let mut chunks = 0_u64;
        while socket.read_exact(&mut notice).await.is_ok() {
            match Notice::decode(&notice)? {
                Notice::Free(count) => sender.freed(count)?,
                Notice::Chunk { header, checksum } => {
                    let slot = usize::try_from(chunks % SLOTS as u64).unwrap_or_default();
                    chunks += 1;
                    if chunks - told.load(Ordering::Relaxed) > SLOTS as u64 {
                        return Err("more chunks than its shared memory holds");
                    }
                    if self.receive_shared(peer, (incoming, slot), (&header, checksum), sender).is_none() {
                        return Ok(());
                    }
                }
            }
            // Other tasks of this thread run between two copies.
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Takes a chunk out of shared memory, and frees its slot; `None` if the group is aborted for
    /// it.
    fn receive_shared(
        &self,
        from: Rank,
        (incoming, slot): (&Segment, usize),
        (header, checksum): (&[u8], u64),
        sender: &SharedSender,
    ) -> Option<()> {
        let wrong = |tag, text| {
            self.misbehaved(from, tag, text);
            None
        };
        let header = match MessageHeader::decode(header) {
            Ok(header) => header,
            Err(error) => return wrong(None, error.to_string()),
        };
        if let Err(text) = self.check_addresses(from, &header) {
            return wrong(None, text);
        }
        let tag = header.tag;
        let (lease, message) = match self.claim(from, &header, incoming.size().chunk_bytes as u64) {
            HeaderMatch::Granted(lease, message) => (lease, message),
            HeaderMatch::TooLate => {
                sender.has_read(0);
                return Some(());
            }
            HeaderMatch::Early(_) => {
                return wrong(Some(tag), format!("{tag} came through shared memory before it was asked for"));
            }
            HeaderMatch::Wrong(text) => return wrong(Some(tag), text),
        };
        self.recorder.heard(from, None);
        let span =
            tracing::trace_span!(parent: message, "chunk", lane = "shared memory", chunk = header.chunk);
        let bytes = lease.chunk.len();
        let filled = span.in_scope(|| lease.chunk.fill(checksum, |at, space| incoming.read(slot, at, space)));
        match filled {
            Ok(filled) => {
                lease.moved.fetch_add(bytes as u64, Ordering::Relaxed);
                // First, so that whoever waits for the message finds its bytes counted.
                sender.has_read(bytes);
                self.received(from, tag, header.chunk, filled);
                Some(())
            }
            Err(text) => wrong(Some(tag), format!("{tag} has {text}")),
        }
    }

    /// The socket has ended. A rank that leaves, dies or gives up is noticed over its connection.
    async fn sharing_ended(&self, peer: Rank) {
        let Some(link) = self.link(peer) else { return };
        let _ = timeout(self.endpoint.timing.idle * 2, link.connection.closed()).await;
        let is_over = {
            let state = self.lock();
            state.phase != Phase::Open || state.calls.aborted().is_some() || state.peers[peer.0 as usize].left
        };
        if !is_over && link.connection.close_reason().is_none() {
            self.misbehaved(peer, None, "left its shared memory and not the group".into());
        }
    }
}

/// Whether the peer has an address of this host, as far as this process sees; the meeting decides.
fn is_at_this_host(link: &Link) -> bool {
    let address = link.connection.remote_address().ip().to_canonical();
    address.is_loopback() || UdpSocket::bind((address, 0)).is_ok()
}

/// How long a rank may take to come to the meeting. Until then messages to it wait.
const LONGEST_MEETING: Duration = Duration::from_secs(3);
