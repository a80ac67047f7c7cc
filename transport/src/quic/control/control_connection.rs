//! The control connections between rank 0 and every other rank: heartbeats, and the one abort that
//! counts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quinn::{ApplicationClose, ConnectionError};
use tokio::time::MissedTickBehavior;

use super::coordinator::{DeadLink, MissingVote, PathSigns, Silence};
use super::core::Core;
use super::link::Link;
use super::notes::ArrivingNotes;
use super::stalls::{Report, Stall};
use crate::ballot::Refusal;
use crate::error::{Abort, AbortCause, BootstrapKind};
use crate::quic::network::connection::{close_code, describe, is_leave};
use crate::quic::network::frames::{FrameError, FrameReader};
use crate::rank::{Progress, Rank, Tag};
use crate::recorder::EventKind;
use crate::wire::Frame;

impl Core {
    fn died(&self, rank: Rank, text: String) {
        self.decide(Abort { culprit: rank, cause: AbortCause::Died(text), progress: Progress::default() });
    }

    /// On the coordinator: handles the frames of one rank's control connection until it ends.
    pub(crate) async fn read_member(self: Arc<Self>, rank: Rank, mut frames: FrameReader) {
        let Some(coordinator) = &self.coordinator else {
            return;
        };
        loop {
            let frame = frames.next().await;
            coordinator.heard(rank);
            self.recorder.heard(rank, None);
            match frame {
                Ok(Some(Frame::Ping { progress, beats, works, waits_for })) => {
                    coordinator.report(rank, Report { progress, beats, works, waits_for });
                    self.recorder.heard(rank, Some(progress));
                }
                Ok(Some(Frame::Vote { vote })) => self.count_vote(coordinator, rank, vote),
                Ok(Some(Frame::Abort { abort })) if abort.culprit.0 < self.size => {
                    self.decide(abort.said_by(rank));
                }
                Ok(Some(Frame::LinkLost { peer, text })) if peer.0 < self.size => {
                    // A rank that has left in order owes nothing: the other rank would have aborted
                    // otherwise.
                    if peer == self.me || !coordinator.left(peer) {
                        let text = format!("rank {rank} lost its link to it: {text}");
                        self.died(peer, text);
                    }
                }
                Ok(Some(Frame::Leave)) => {
                    if coordinator.leaves(rank) {
                        return self.failed(rank, "broke the protocol: it left twice".to_owned());
                    }
                    if let Some(control) = self.control(rank) {
                        control.say(Frame::Goodbye);
                    }
                    self.changed.notify_waiters();
                    self.check_open_rounds(coordinator);
                }
                Ok(Some(other)) => return self.failed(rank, format!("broke the protocol: {other:?}")),
                Err(FrameError::Wire(error)) => {
                    return self.failed(rank, format!("broke the protocol: {error}"));
                }
                Ok(None) | Err(FrameError::Stream(_)) => break,
            }
        }
        let Some(control) = self.control(rank) else { return };
        let reason = control.connection.closed().await;
        if !coordinator.left(rank) {
            // The rank may have given up by itself, such as when no packet from here reaches it.
            let text = match abort_in(&reason) {
                Some(Abort { culprit, cause, .. }) => format!("it gave up: rank {culprit} {cause}"),
                None => describe(&reason),
            };
            self.died(rank, text);
        }
    }

    /// On every other rank: handles the frames of the control connection until it ends.
    pub(crate) async fn read_coordinator(
        self: Arc<Self>,
        heard: Arc<CoordinatorSilence>,
        mut frames: FrameReader,
    ) {
        let mut notes = ArrivingNotes::new(self.size);
        loop {
            let frame = frames.next().await;
            heard.reset();
            self.recorder.heard(Rank::COORDINATOR, None);
            match frame {
                Ok(Some(Frame::Pong)) => {}
                Ok(Some(Frame::Notes { round, notes: next })) => {
                    if let Err(text) = notes.add(round, &next) {
                        return self.coordinator_failed(format!("broke the protocol: {text}"));
                    }
                }
                Ok(Some(Frame::Verdict { round, refusal })) => {
                    let verdict = match refusal {
                        None => notes.take(round).map(Ok),
                        Some((rank, reason, text)) => {
                            notes.none(round).map(|()| Err(Refusal { rank, reason, text }))
                        }
                    };
                    match verdict {
                        Ok(verdict) => self.agreed(round, verdict),
                        Err(text) => return self.coordinator_failed(format!("broke the protocol: {text}")),
                    }
                }
                Ok(Some(Frame::Missing { round, rank, left })) if rank.0 < self.size => {
                    self.note_missing(MissingVote { round, rank, left });
                }
                Ok(Some(Frame::Abort { abort })) => self.aborted(abort),
                Ok(Some(Frame::Goodbye)) => {
                    self.lock().goodbye = true;
                    self.changed.notify_waiters();
                }
                Ok(Some(other)) => return self.coordinator_failed(format!("broke the protocol: {other:?}")),
                Err(FrameError::Wire(error)) => {
                    return self.coordinator_failed(format!("broke the protocol: {error}"));
                }
                Ok(None) | Err(FrameError::Stream(_)) => break,
            }
        }
        let Some(control) = self.control(Rank::COORDINATOR) else {
            return;
        };
        let reason = control.connection.closed().await;
        if self.lock().goodbye {
            return;
        }
        if let Some(abort) = abort_in(&reason) {
            return self.aborted(abort);
        }
        self.coordinator_died(describe(&reason));
    }

    fn coordinator_failed(&self, text: String) {
        let progress = Progress::default();
        self.aborted(Abort { culprit: Rank::COORDINATOR, cause: AbortCause::Failed(text), progress });
    }

    fn coordinator_died(&self, text: String) {
        let progress = Progress::default();
        self.aborted(Abort { culprit: Rank::COORDINATOR, cause: AbortCause::Died(text), progress });
    }

    /// On the coordinator: sends heartbeats to every rank, and counts the ticks for which each is
    /// silent.
    pub(crate) async fn beat_as_coordinator(self: Arc<Self>) {
        let Some(coordinator) = &self.coordinator else {
            return;
        };
        let mut ticks = ticks(self.endpoint.timing.heartbeat);
        let mut over = self.over.subscribe();
        loop {
            tokio::select! {
                biased;
                _ = ticks.tick() => {}
                _ = over.wait_for(|over| *over) => return,
            }
            for (rank, member) in (0..).map(Rank).zip(&self.control) {
                if let Some(member) = member
                    && !coordinator.left(rank)
                {
                    member.say(Frame::Pong);
                }
            }
            self.send_missing(coordinator.missing_in_first_round());
            if let Some((rank, link)) = coordinator.tick(|rank| self.path_signs(rank)) {
                self.died(rank, self.silence(rank, link));
            }
            self.abort_unresponsive_peers();
            self.know_stream_peers();
            coordinator.report(self.me, self.report());
            if let Some(stall) = coordinator.stalled() {
                self.report_stall(stall);
            }
        }
    }

    /// On the coordinator: reports a rank that makes no progress while others wait for it.
    fn report_stall(&self, Stall { rank, progress, ticks, waiting, stuck }: Stall) {
        let seconds = (self.endpoint.timing.heartbeat * ticks).as_secs_f64();
        let waiting = ranks_in_words(&waiting);
        if stuck {
            let text = format!("no progress for {seconds:.1} s while {waiting} waited for it");
            return self.decide(Abort { culprit: rank, cause: AbortCause::Stuck(text), progress });
        }
        self.recorder.note(EventKind::Slow, rank, Tag { op: progress.op, message: 0 }, 0);
        let Progress { op, step } = progress;
        let text = format!(
            "rank {rank} has made no progress for {seconds:.1} s (operation {op}, step {step}) while {waiting} waited for it"
        );
        (self.warn)(&text, BootstrapKind::Other);
    }

    /// The report of this rank.
    fn report(&self) -> Report {
        let works = self.pulse.works();
        let waits_for = if works { Vec::new() } else { self.lock().calls.waits_for() };
        Report { progress: self.progress(), beats: self.pulse.beats(), works, waits_for }
    }

    /// On every other rank: sends heartbeats with this rank's report, and counts the ticks for
    /// which the coordinator is silent.
    pub(crate) async fn beat_as_member(self: Arc<Self>, heard: Arc<CoordinatorSilence>) {
        let mut ticks = ticks(self.endpoint.timing.heartbeat);
        let mut over = self.over.subscribe();
        loop {
            tokio::select! {
                biased;
                _ = ticks.tick() => {}
                _ = over.wait_for(|over| *over) => return,
            }
            if self.lock().goodbye {
                return;
            }
            if let Some(control) = self.control(Rank::COORDINATOR) {
                let Report { progress, beats, works, waits_for } = self.report();
                control.say(Frame::Ping { progress, beats, works, waits_for });
            }
            self.abort_unresponsive_peers();
            self.know_stream_peers();
            if let Some(link) = heard.tick(self.path_signs(Rank::COORDINATOR)) {
                self.coordinator_died(self.silence(Rank::COORDINATOR, link));
            }
        }
    }

    /// Over TCP: a peer whose address has changed is no stranger there.
    fn know_stream_peers(&self) {
        for (lane, end) in self.endpoint.lane_endpoints.iter().enumerate() {
            let Some(streams) = &end.streams else { return };
            for link in self.all_links() {
                let connection = link.lanes.get(lane).map(|lane| &lane.connection);
                let control = (lane == 0).then_some(&link.connection);
                if let Some(connection) = connection.or(control) {
                    streams.prove(connection.remote_address());
                }
            }
        }
    }

    fn path_signs(&self, rank: Rank) -> PathSigns {
        let control = self.control(rank);
        let round_trip = control.map_or(Duration::ZERO, |control| control.connection.rtt());
        PathSigns {
            signs_of_life: control.map_or(0, Link::signs_of_life),
            acknowledged: control.map_or(0, Link::acknowledged),
            dead_after: self.endpoint.timing.silent_ticks(round_trip),
        }
    }

    fn silence(&self, rank: Rank, link: DeadLink) -> String {
        let seconds = |ticks| (self.endpoint.timing.heartbeat * ticks).as_secs_f64();
        match link {
            DeadLink::FromPeer => {
                format!("nothing heard of it for {:.1} s", seconds(self.path_signs(rank).dead_after))
            }
            DeadLink::ToPeer { ticks } => {
                format!("it is heard, and has received nothing for {:.1} s", seconds(ticks))
            }
        }
    }

    /// A data connection has ended.
    pub(crate) fn link_ended(&self, peer: Rank, reason: &ConnectionError) {
        match reason {
            ConnectionError::LocallyClosed => {}
            reason if is_leave(reason) => self.peer_left(peer),
            // The abort itself comes from the coordinator, or its silence does.
            ConnectionError::ApplicationClosed(ApplicationClose { error_code, .. })
                if *error_code == close_code::ABORTED => {}
            _ => {
                if self.lock().peers[peer.0 as usize].left {
                    return;
                }
                self.recorder.note(EventKind::LinkLost, peer, Tag { op: 0, message: 0 }, 0);
                let text = describe(reason);
                if self.is_coordinator() {
                    let cause = AbortCause::Died(format!("rank 0 lost its link to it: {text}"));
                    self.decide(Abort { culprit: peer, cause, progress: Progress::default() });
                } else if let Some(control) = self.control(Rank::COORDINATOR) {
                    control.say(Frame::LinkLost { peer, text });
                }
            }
        }
    }
}

/// For how long the coordinator has been silent.
#[derive(Debug, Default)]
pub(crate) struct CoordinatorSilence(Mutex<Silence>);

impl CoordinatorSilence {
    fn lock(&self) -> MutexGuard<'_, Silence> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reset(&self) {
        self.lock().reset();
    }

    fn tick(&self, path: PathSigns) -> Option<DeadLink> {
        self.lock().tick(path)
    }
}

fn ticks(heartbeat: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(heartbeat);
    // After a stall the next tick is a whole period away: the frames that have queued up are read
    // first.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// The abort that a coordinator put into the close of a connection.
fn abort_in(reason: &ConnectionError) -> Option<Abort> {
    let ConnectionError::ApplicationClosed(close) = reason else {
        return None;
    };
    if close.error_code != close_code::ABORTED {
        return None;
    }
    match Frame::decode(&close.reason) {
        Ok(Some((frame, _))) => match frame.with_harmless_texts() {
            Frame::Abort { abort } => Some(abort),
            _ => None,
        },
        _ => None,
    }
}

/// `rank 1`, or `ranks 1, 2 and 5 more`.
fn ranks_in_words(ranks: &[Rank]) -> String {
    let shown: Vec<String> = ranks.iter().take(8).map(Rank::to_string).collect();
    let more = match ranks.len() - shown.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, shown.join(", "))
}
