//! What a rank does when its group loses a rank: end, or continue in the next group.

use std::sync::Arc;
use std::time::Duration;

use kyklos_transport::{
    Abort, AbortCause, Group, Progress, Rank, RefusalReason, Regroup, Transport, TransportError, Vote,
};

use crate::failure::{Failure, Result, note};
use crate::interrupt;
use crate::options::OnLoss;
use crate::request::Request;

/// What the operator wants when the group loses a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LossPolicy {
    pub(crate) on_loss: OnLoss,
    /// How long the next group may take to form.
    pub(crate) patience: Duration,
}

/// The end of a group that lost a rank.
pub(crate) struct GroupLoss {
    abort: Abort,
    members: Vec<Rank>,
}

impl GroupLoss {
    /// The abort behind `failure`, unless this rank caused it.
    pub(crate) fn of(group: &Group, failure: &Failure) -> Option<Self> {
        // A rank that is interrupted has told the others, and does not go on.
        if !failure.of_group || interrupt::is_interrupted() {
            return None;
        }
        // The abort of the group may still be on its way to this rank: the vote waits for it.
        let vote =
            Vote::Refuse { reason: RefusalReason::from_code(failure.exit), text: failure.text.clone() };
        match pollster::block_on(group.agree(vote, ABORT_UNDER_WAY)) {
            Err(TransportError::Aborted { abort, .. }) => {
                let own = abort.culprit == group.rank() && matches!(abort.cause, AbortCause::Failed(_));
                (!own).then(|| Self { abort, members: group.members.clone() })
            }
            _ => None,
        }
    }

    /// Forms the next group by the policy.
    pub(crate) fn go_on(&self, policy: LossPolicy, transport: &dyn Transport) -> Result<Group> {
        let LossPolicy { on_loss, patience } = policy;
        let who = on_loss.next_group(patience).unwrap_or(Regroup::Survivors);
        pollster::block_on(transport.reform(who, patience)).map_err(|error| self.then(error.into()))
    }

    /// The failure of what came after the loss.
    fn then(&self, failure: Failure) -> Failure {
        Failure { text: format!("{}; {}", self.abort, failure.text), ..failure }
    }

    /// Ends the group of a rank whose device has failed, such as a browser tab that was closed.
    /// Without this the other ranks know of a refusal only, and end too.
    pub(crate) fn cause(policy: LossPolicy, transport: &dyn Transport, failure: &Failure) {
        if policy.on_loss != OnLoss::Stop && failure.of_device {
            let cause = AbortCause::Failed(failure.text.clone());
            transport.abort(Abort { culprit: transport.rank(), cause, progress: Progress::default() });
        }
    }

    /// Reports the loss and the next group on standard error.
    pub(crate) fn tell(&self, next: &Group, request: &Request) {
        note(&format!("{}; {}", self.in_words(next), in_words(next, request)));
    }

    fn in_words(&self, next: &Group) -> String {
        let Abort { culprit, cause, .. } = &self.abort;
        let culprit = self.members.get(culprit.0 as usize).copied().unwrap_or(*culprit);
        let gone = list(self.members.iter().filter(|rank| !next.members.contains(rank)));
        let gone = if gone.is_empty() { "no rank is lost".to_owned() } else { format!("without {gone}") };
        format!("rank {culprit} {cause}; {gone}")
    }
}

/// Ends this process if the others have declared this rank stuck and it stays stuck. The others
/// continue without it, but the launcher still waits for this process.
pub(crate) fn end_if_stuck(group: &Group) {
    let (transport, recorder, me) = (Arc::downgrade(&group.transport), group.recorder(), group.rank());
    std::thread::spawn(move || {
        while transport.strong_count() > 0 {
            std::thread::sleep(LOOK);
            let is_stuck = || {
                let abort = recorder.look().abort.map(|(_, abort)| abort);
                abort.is_some_and(|abort| abort.culprit == me && matches!(abort.cause, AbortCause::Stuck(_)))
            };
            if recorder.is_aborted() && is_stuck() {
                std::thread::sleep(STUCK_FOR_GOOD);
                if transport.strong_count() > 0 {
                    let why = "this rank is stuck, and the others continue without it: ended";
                    interrupt::end(1, Some(why.to_owned()));
                }
            }
        }
    });
}

/// Reports on standard error that this rank has replaced a lost one.
pub(crate) fn tell_rejoined(next: &Group, request: &Request) {
    note(&format!("joined the group; {}", in_words(next, request)));
}

/// Reports on standard error that a rank was lost while the group formed.
pub(crate) fn tell_smaller(next: &Group, request: &Request) {
    note(&format!("a rank was lost while the group formed; {}", in_words(next, request)));
}

fn in_words(next: &Group, request: &Request) -> String {
    format!(
        "{} ranks start again (epoch {}: {}), mesh {}, strategy {}",
        next.members.len(),
        next.epoch,
        list(next.members.iter()),
        request.mesh,
        request.strategy
    )
}

fn list<'a>(ranks: impl Iterator<Item = &'a Rank>) -> String {
    let ranks: Vec<String> = ranks.map(Rank::to_string).collect();
    match ranks.len() {
        0 => String::new(),
        1 => format!("rank {}", ranks[0]),
        _ => format!("ranks {}", ranks.join(", ")),
    }
}

/// The failure when the request does not fit the smaller group.
pub(crate) fn does_not_fit(size: u32, failure: &Failure) -> Failure {
    Failure::run(format!(
        "the group continues with {size} ranks, and the request does not fit them ({}): leave --mesh, --split, token \
         counts and --strategy away, or use --on-loss stop",
        failure.text
    ))
}

/// Interval between two checks for an abort of this rank.
const LOOK: Duration = Duration::from_secs(1);

/// Time after which a stuck rank counts as stuck for ever.
const STUCK_FOR_GOOD: Duration = Duration::from_secs(10);

/// Longest wait for the abort of the group: longer than a rank may be silent over any links before
/// it counts as dead.
const ABORT_UNDER_WAY: Duration = Duration::from_secs(30);
