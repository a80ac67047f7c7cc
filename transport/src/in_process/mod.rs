//! Ranks of one process: the reference implementation of the contract, with no bytes copied.
//!
//! All ranks share one hub behind a mutex. A message is handed over at the moment both sides have
//! posted it. On targets without threads (wasm) nothing watches the deadlines: there all ranks
//! share one cooperative executor, so a rank that does not post is a bug that the plan's check
//! finds, not a fault of a network.

mod hub;
#[cfg_attr(
    target_family = "wasm",
    expect(dead_code, reason = "deadlines are not watched where there are no threads")
)]
mod state;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;

use crate::error::Abort;
use crate::figures::ConnectionFigures;
use crate::posted::Posted;
use crate::pulse::Pulse;
use crate::rank::{Progress, Rank, Tag, Taken, Vote};
use crate::recorder::{Outstanding, Recorder};
use crate::transport::Transport;
use crate::transport::{Group, Regroup};
use hub::Hub;

/// Makes a group of `size` ranks in this process; the n-th element belongs to rank n.
///
/// # Panics
///
/// If `size` is 0: a group has at least one rank.
pub fn in_process_group(size: u32) -> Vec<Group> {
    assert!(size > 0, "a group has at least one rank");
    ends_of(&Arc::new(Hub::new((0..size).map(Rank).collect(), 0))).into_iter().map(Group::from).collect()
}

/// The ends of all ranks of a hub.
fn ends_of(hub: &Arc<Hub>) -> Vec<Arc<dyn Transport>> {
    let end = |rank| Arc::new(InProcess { rank: Rank(rank), hub: Arc::clone(hub) }) as Arc<dyn Transport>;
    (0..hub.size()).map(end).collect()
}

/// One rank's end of a hub. Dropping it without [`Transport::close`] means that the rank died.
struct InProcess {
    rank: Rank,
    hub: Arc<Hub>,
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcess").field("rank", &self.rank).field("size", &self.hub.size()).finish()
    }
}

impl Transport for InProcess {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> u32 {
        self.hub.size()
    }

    fn post_send(&self, to: Rank, tag: Tag, parts: Vec<Bytes>, deadline: Duration) -> Posted<Taken> {
        let (completer, posted) = Posted::pair();
        self.hub.send(self.rank, to, tag, parts, deadline, completer);
        posted
    }

    fn post_recv(
        &self,
        from: Rank,
        tag: Tag,
        part_bytes: &[usize],
        deadline: Duration,
    ) -> Posted<Vec<Bytes>> {
        let (completer, posted) = Posted::pair();
        self.hub.recv(self.rank, from, tag, part_bytes, deadline, completer);
        posted
    }

    fn agree(&self, vote: Vote, deadline: Duration) -> Posted<Vec<Bytes>> {
        let (completer, posted) = Posted::pair();
        self.hub.agree(self.rank, vote, deadline, completer);
        posted
    }

    fn abort(&self, abort: Abort) {
        self.hub.abort(abort.said_by(self.rank));
    }

    fn report_progress(&self, progress: Progress) {
        self.hub.report_progress(self.rank, progress);
    }

    fn stop_flag(&self) -> Arc<AtomicBool> {
        self.hub.stop_flag()
    }

    fn pulse(&self) -> Arc<Pulse> {
        self.hub.pulse(self.rank)
    }

    fn close(&self, deadline: Duration) -> Posted<()> {
        let (completer, posted) = Posted::pair();
        self.hub.close(self.rank, deadline, completer);
        posted
    }

    fn reform(&self, who: Regroup, deadline: Duration) -> Posted<Group> {
        let (completer, posted) = Posted::pair();
        self.hub.reform(self.rank, who, deadline, completer);
        posted
    }

    fn recorder(&self) -> Arc<Recorder> {
        self.hub.recorder(self.rank)
    }

    fn outstanding(&self) -> Vec<Outstanding> {
        self.hub.outstanding(self.rank)
    }

    fn network(&self) -> Option<String> {
        None
    }

    fn connections(&self) -> Vec<Option<ConnectionFigures>> {
        vec![None; self.hub.size() as usize]
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.hub.dropped(self.rank);
    }
}
