//! How a rank starts to work in a group, closes, or is dropped.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use quinn::VarInt;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};

use crate::error::{Abort, AbortCause, Pending, TransportError};
use crate::membership::Claim;
use crate::posted::Completer;
use crate::quic::control::control_connection::CoordinatorSilence;
use crate::quic::control::core::{Core, CoreParts};
use crate::quic::control::link::{Lane, Link};
use crate::quic::control::state::{Deadline, Phase};
use crate::quic::forming::addresses::advertised::once_each;
use crate::quic::forming::endpoint::RankEndpoint;
use crate::quic::forming::peer_connection::PeerConnection;
use crate::quic::forming::prior_group::PriorGroup;
use crate::quic::forming::regroup::NextGroup;
use crate::quic::network::connection::close_code;
use crate::quic::network::frames::{FrameReader, write_frames};
use crate::rank::{Rank, Tag};
use crate::wire::Frame;

/// Turns the connections of a rank into a working core. Must be called in a tokio context.
pub(crate) fn start(endpoint: Arc<RankEndpoint>, NextGroup { epoch, members, mesh }: NextGroup) -> Arc<Core> {
    let me = members.iter().position(|&member| member == endpoint.config.rank).unwrap_or_default();
    let me = Rank(u32::try_from(me).unwrap_or(u32::MAX));
    for joined in &mesh.data {
        endpoint.path.open_for_data(&joined.connection);
    }
    let table = mesh.table;
    let (control, control_frames) = by_rank(members.len(), mesh.control);
    // The other lanes follow the first.
    let (first, beside): (Vec<_>, Vec<_>) = mesh.data.into_iter().partition(|joined| joined.lane == 0);
    let (mut links, data_frames) = by_rank(members.len(), first);
    for (rank, link) in (0..).map(Rank).zip(&mut links) {
        let Some(link) = link else { continue };
        let beside = beside.iter().filter(|joined| joined.rank == rank);
        let beside = beside.map(|joined| (joined.lane, joined.connection.clone()));
        let all = std::iter::once((0, link.connection.clone())).chain(beside);
        link.lanes = all
            .map(|(lane, connection)| Lane::new(connection, endpoint.lane_endpoints[lane].runtime.clone()))
            .collect();
    }
    let core = Arc::new(Core::new(CoreParts { endpoint, me, epoch, members, table, links, control }));
    core.offer_memory();
    tokio::spawn(Arc::clone(&core).watch_deadlines());
    for (rank, frames) in data_frames {
        tokio::spawn(Arc::clone(&core).read_link(rank, frames));
        let lanes = core.link(rank).map(|link| link.lanes.clone()).unwrap_or_default();
        for (index, Lane { connection, runtime, .. }) in lanes.into_iter().enumerate() {
            runtime.spawn(Arc::clone(&core).accept_chunks(rank, index, connection));
        }
    }
    if me == Rank::COORDINATOR {
        tokio::spawn(Arc::clone(&core).beat_as_coordinator());
        for (rank, frames) in control_frames {
            tokio::spawn(Arc::clone(&core).read_member(rank, frames));
        }
    } else {
        let silence = Arc::new(CoordinatorSilence::default());
        tokio::spawn(Arc::clone(&core).beat_as_member(Arc::clone(&silence)));
        for (_, frames) in control_frames {
            tokio::spawn(Arc::clone(&core).read_coordinator(Arc::clone(&silence), frames));
        }
    }
    core
}

/// Links by rank, and the readers of their frames.
fn by_rank(size: usize, joined: Vec<PeerConnection>) -> (Vec<Option<Link>>, Vec<(Rank, FrameReader)>) {
    let mut links: Vec<Option<Link>> = (0..size).map(|_| None).collect();
    let mut readers = Vec::new();
    for joined in joined {
        let (rank, link, reader) = link(joined);
        links[rank.0 as usize] = Some(link);
        readers.push((rank, reader));
    }
    (links, readers)
}

fn link(joined: PeerConnection) -> (Rank, Link, FrameReader) {
    let PeerConnection { rank, connection, send, frames, .. } = joined;
    let (sender, receiver) = mpsc::unbounded_channel();
    let (flushed, is_flushed) = watch::channel(false);
    let queued = Arc::new(AtomicUsize::new(0));
    let written = Arc::clone(&queued);
    tokio::spawn(async move {
        write_frames(send, receiver, written).await;
        let _ = flushed.send(true);
    });
    (rank, Link::new(connection, (sender, queued), is_flushed), frames)
}

impl Core {
    /// Starts to close; the completion ends when this rank has left the group.
    pub(crate) fn close(self: &Arc<Self>, patience: Duration, completer: Completer<()>) {
        let mut state = self.lock();
        if state.phase != Phase::Open {
            return completer.complete(Err(TransportError::Closed));
        }
        state.phase = Phase::Closing;
        state.calls.end_receives();
        drop(state);
        let core = Arc::clone(self);
        let deadline = Deadline::after(patience);
        self.runtime.spawn(async move {
            // The end of the time belongs to the last frames and packets.
            let farewell = (SHORTEST_FLUSH + LONGEST_DRAIN).min(deadline.asked() / 2);
            let result = core.say_goodbye(deadline.at() - farewell, deadline.asked()).await;
            let code =
                if core.lock().calls.aborted().is_some() { close_code::ABORTED } else { close_code::LEFT };
            let hang_up_until = deadline.at() - farewell / 2;
            let mut hanging_up = std::pin::pin!(async {
                core.close_links(code, hang_up_until).await;
                core.close_endpoint().await;
            });
            let late = timeout_at(deadline.at(), &mut hanging_up).await.is_err();
            completer.complete(result);
            if late {
                // The caller waits no longer; the peers may still hear why.
                hanging_up.await;
            }
        });
    }

    async fn say_goodbye(&self, end: Instant, asked: Duration) -> Result<(), TransportError> {
        // The peers first get all messages that this rank has sent.
        self.until((end, asked), || {
            let state = self.lock();
            let (&(to, tag), call) = state.calls.sends.iter().next()?;
            Some(Pending { operation: "close", ..call.pending(to, tag) })
        })
        .await?;
        // A rank cannot leave an aborted group in order, and the others must not take it for that.
        if let Some(abort) = self.lock().calls.aborted().cloned() {
            return Err(TransportError::Aborted { abort, pending: None });
        }
        for link in self.links.iter().flatten() {
            link.say(Frame::Leave);
        }
        match &self.coordinator {
            // The coordinator goes last: the others need it to find out about each other.
            Some(coordinator) => {
                coordinator.leaves(self.me);
                self.check_open_rounds(coordinator);
                self.until((end, asked), || coordinator.lowest_present().map(pending_close)).await
            }
            None => {
                if let Some(control) = self.control(Rank::COORDINATOR) {
                    control.say(Frame::Leave);
                }
                self.until((end, asked), || (!self.lock().goodbye).then(|| pending_close(Rank::COORDINATOR)))
                    .await
            }
        }
    }

    /// Waits until nothing is `pending`, the group aborts, or the time ends; `asked` is the
    /// caller's timeout, for the error.
    async fn until(
        &self,
        (end, asked): (Instant, Duration),
        pending: impl Fn() -> Option<Pending>,
    ) -> Result<(), TransportError> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let Some(pending) = pending() else { return Ok(()) };
            if let Some(abort) = self.lock().calls.aborted().cloned() {
                return Err(TransportError::Aborted { abort, pending: Some(pending) });
            }
            if timeout_at(end, changed).await.is_err() {
                return Err(TransportError::Deadline { pending, waited: asked });
            }
        }
    }

    /// Closes all connections after the peers have read the last frames, and ends all tasks.
    async fn close_links(&self, code: VarInt, until: Instant) {
        let flush_until = until.max(Instant::now() + SHORTEST_FLUSH);
        // When a rank leaves in order, it waits until its last frames have arrived, such as an
        // acknowledgement of a message. After an abort several other ranks tell each rank of the
        // abort.
        let flush_until = match code {
            close_code::LEFT => flush_until,
            _ => flush_until.min(Instant::now() + LONGEST_FLUSH),
        };
        let abort = self.lock().calls.aborted().cloned().filter(|_| code == close_code::ABORTED);
        let dead = match &abort {
            Some(Abort { culprit, cause: AbortCause::Died(_), .. }) => Some(*culprit),
            _ => None,
        };
        for link in self.all_links() {
            link.close_links();
        }
        for links in [&self.links, &self.control] {
            // A dead rank acknowledges nothing.
            let alive = (0..).map(Rank).zip(links).filter(|(rank, _)| Some(*rank) != dead);
            for link in alive.filter_map(|(_, link)| link.as_ref()) {
                let mut flushed = link.flushed.clone();
                let _ = timeout_at(flush_until, flushed.wait_for(|flushed| *flushed)).await;
            }
        }
        let reason = abort.map(short).unwrap_or_default();
        for link in self.all_links() {
            link.close(code, &reason);
        }
        self.end_tasks();
    }

    fn end_tasks(&self) {
        {
            let mut state = self.lock();
            state.phase = Phase::Closed;
            for peer in &mut state.peers {
                peer.early.clear();
            }
            state.calls.end_sends();
            state.calls.end_receives();
        }
        self.over.send_replace(true);
    }

    /// Closes the endpoint: this rank forms no other group.
    async fn close_endpoint(&self) {
        self.endpoint.close(close_code::LEFT, b"", LONGEST_DRAIN).await;
    }

    /// Begins to leave an aborted group, so that this rank can form the next one; the endpoint is
    /// kept.
    pub(crate) fn leave_aborted(&self) -> Result<Abort, TransportError> {
        let mut state = self.lock();
        let abort = match (state.phase, state.calls.aborted()) {
            (Phase::Open, Some(abort)) => abort.clone(),
            (Phase::Open, None) => {
                let text = "only a group that has been aborted can be formed again: call abort first".into();
                return Err(TransportError::Misuse { text });
            }
            _ => return Err(TransportError::Closed),
        };
        state.phase = Phase::Closing;
        state.calls.end_receives();
        Ok(abort)
    }

    /// Closes the connections of a group that [`Self::leave_aborted`] has left.
    pub(crate) async fn close_aborted_links(&self) {
        self.close_links(close_code::ABORTED, Instant::now() + LONGEST_FLUSH).await;
    }

    /// The knowledge of this rank when its group is aborted.
    pub(crate) fn prior(&self, abort: &Abort) -> PriorGroup {
        // Where a rank is reached now, and then where else it may be.
        let mut addresses: BTreeMap<Rank, Vec<SocketAddr>> = BTreeMap::new();
        for (place, (&rank, link)) in self.members.iter().zip(&self.links).enumerate() {
            let Some(link) = link else { continue };
            let also = self.table.get(place).map_or(&[][..], Vec::as_slice);
            addresses.insert(rank, once_each([&[link.connection.remote_address()], also].concat()));
        }
        if self.endpoint.config.rank != Rank::COORDINATOR {
            let known = addresses.remove(&Rank::COORDINATOR).unwrap_or_default();
            let all = [self.endpoint.config.coordinator_candidates(), known].concat();
            addresses.insert(Rank::COORDINATOR, once_each(all));
        }
        let claim = Claim { epoch: self.epoch, started: true, members: self.members.clone() };
        let lost = match abort.cause {
            AbortCause::Died(_) | AbortCause::Stuck(_) => self.members.get(abort.culprit.0 as usize).copied(),
            // It may take part in the next group.
            AbortCause::Failed(_) => None,
        };
        PriorGroup { claims: vec![claim], addresses, lost }
    }

    /// The transport was dropped without a close: for the others this rank has died.
    pub(crate) fn dropped(self: &Arc<Self>) {
        let phase = self.lock().phase;
        if phase != Phase::Open {
            return;
        }
        let aborted_before = self.lock().calls.aborted().is_some();
        let cause = AbortCause::Died("its endpoint was dropped without close".into());
        let abort = Abort { culprit: self.me, cause, progress: self.progress() };
        if self.is_coordinator() {
            self.decide(abort);
        } else {
            self.aborted(abort);
        }
        self.lock().phase = Phase::Closing;
        let code =
            if aborted_before || self.is_coordinator() { close_code::ABORTED } else { close_code::DROPPED };
        let core = Arc::clone(self);
        self.runtime.spawn(async move {
            core.close_links(code, Instant::now() + LONGEST_FLUSH).await;
            core.close_endpoint().await;
        });
    }
}

/// The frame of an abort, cut so that it fits the close of a connection.
fn short(mut abort: Abort) -> Vec<u8> {
    let (AbortCause::Died(text) | AbortCause::Failed(text) | AbortCause::Stuck(text)) = &mut abort.cause;
    let mut end = text.len().min(600);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    Frame::Abort { abort }.encode()
}

fn pending_close(peer: Rank) -> Pending {
    Pending { operation: "close", peer, tag: Tag { op: 0, message: 0 }, bytes_done: 0, bytes_expected: 0 }
}

/// Even a close whose deadline has passed gives its last frames this long, though its caller is not
/// kept waiting.
const SHORTEST_FLUSH: Duration = Duration::from_millis(300);

/// After an abort, a peer that does not acknowledge last frames for this long is not going to.
const LONGEST_FLUSH: Duration = Duration::from_secs(1);

/// For the last packets to leave this host.
const LONGEST_DRAIN: Duration = Duration::from_millis(300);
