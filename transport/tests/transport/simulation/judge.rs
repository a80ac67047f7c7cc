//! Checks that must hold in every world.

use std::time::Duration;

use kyklos_transport::{Abort, AbortCause, TransportError};

use crate::simulation::program::{Call, Log, STUCK, What};
use crate::simulation::stage::{FAILURE, Played};
use crate::simulation::world::{FaultKind, World};

/// How long after its deadline a call may still end: tokio's clock ticks in milliseconds.
const GRACE: Duration = Duration::from_millis(5);

/// Time until every rank knows of a rank that reports its own failure: two trips through the
/// network, and repeats after loss.
const TOLD: Duration = Duration::from_secs(3);

/// All violations in the run of a world, and whether packet loss alone excuses something.
pub(crate) fn judge(world: &World, played: &Played) -> (Vec<String>, bool) {
    let wrong = wrong_with(world, played, true);
    let by_chance = wrong.is_empty() && !wrong_with(world, played, false).is_empty();
    (wrong, by_chance)
}

fn wrong_with(world: &World, played: &Played, excuses: bool) -> Vec<String> {
    let judge = Judge { world, played, excuses };
    let mut wrong = Vec::new();
    if played.panics > 0 {
        wrong.push(format!("{} panics", played.panics));
    }
    if played.tasks_left > 0 {
        wrong.push(format!("{} tasks are left after everybody has gone", played.tasks_left));
    }
    for log in &played.logs {
        let who = format!("rank {} (life {})", log.rank, log.life);
        wrong.extend(log.complaints.iter().map(|complaint| format!("{who}: {complaint}")));
        for call in &log.calls {
            let found = judge.bounds(call).or_else(|| judge.errors(log, call));
            wrong.extend(found.map(|text| format!("{who}: {text}: {call:?}")));
        }
    }
    wrong.extend(judge.votes());
    wrong.extend(judge.messages());
    wrong.extend(judge.aborts());
    wrong
}

/// Lost packets of 1000. Up to this rate no link becomes silent through random loss.
const LITTLE_LOSS: u64 = 100;

struct Judge<'a> {
    world: &'a World,
    played: &'a Played,
    /// Whether random loss counts as an excuse for a violation.
    excuses: bool,
}

impl Judge<'_> {
    fn kind(&self) -> Option<&FaultKind> {
        self.played.struck?;
        self.world.fault.as_ref().map(|fault| &fault.kind)
    }

    /// The view of a rank does not count after the rank is gone, or if it joins too late.
    fn is_judged(&self, log: &Log) -> bool {
        log.life == 0 && self.kind().and_then(FaultKind::gone) != Some(log.rank)
    }

    /// A rank that crashed before the group existed, restarted, and became part of the group.
    fn is_replaced(&self) -> bool {
        let joined = |call: &Call| call.what == What::Form && call.result.is_ok();
        self.played.logs.iter().any(|log| log.life == 1 && log.calls.iter().any(joined))
    }

    /// No call lasts longer than its deadline, or longer than it takes to detect the fault.
    fn bounds(&self, call: &Call) -> Option<String> {
        let grace = if call.what == What::Form { self.world.limits().form_grace } else { GRACE };
        if call.ended > call.posted + call.patience + grace {
            return Some("waited longer than its deadline".into());
        }
        let lasts = match self.kind()? {
            FaultKind::Partition { heals, .. } | FaultKind::Link { heals, .. } => heals.is_none(),
            FaultKind::Crash { .. } => !self.is_replaced(),
            FaultKind::Dropped { .. } | FaultKind::Abort { .. } => true,
            FaultKind::Computes { by, .. } => by.is_none(),
            FaultKind::Refuse { .. } | FaultKind::Slow { .. } => false,
        };
        // When loss delays heartbeats, several arrive at once and count as one.
        let found = match self.kind()? {
            FaultKind::Computes { .. } => {
                STUCK + STUCK * u32::try_from(self.world.conditions.loss_per_mille).unwrap_or(u32::MAX) / 250
            }
            _ => Duration::ZERO,
        };
        let known = self.played.struck? + found + self.news();
        // A closing rank waits for peers that still need its messages, up to its deadline.
        let leaves = call.what == What::Close && call.result.is_ok();
        (lasts && !leaves && call.what != What::Form && call.ended > known.max(call.posted + GRACE))
            .then(|| format!("had not heard of the fault by {known:?}"))
    }

    /// Time until the fault is known. The ranks know at once of a rank that reports its own
    /// failure, or a few lost packets later.
    fn news(&self) -> Duration {
        match self.kind() {
            Some(FaultKind::Abort { .. }) if self.world.conditions.loss_per_mille <= LITTLE_LOSS => TOLD,
            Some(FaultKind::Partition { one_way: true, .. } | FaultKind::Link { one_way: true, .. }) => {
                self.world.limits().one_way_news
            }
            _ => self.world.limits().news,
        }
    }

    /// Every error has a cause, and names the culprit.
    fn errors(&self, log: &Log, call: &Call) -> Option<String> {
        let error = call.result.as_ref().err()?;
        if !self.is_judged(log) {
            return None;
        }
        if self.excuses && self.is_chance(call) {
            return None;
        }
        let Some(kind) = self.kind() else { return Some("an error without any fault".into()) };
        if call.ended < self.played.struck? {
            return Some("an error before the fault".into());
        }
        match error {
            TransportError::Aborted { abort, .. } => {
                let culprit = abort.culprit.0;
                (!self.may_blame(kind, log.rank, abort)).then(|| format!("blames rank {culprit}"))
            }
            TransportError::Refused { rank, reason, .. } => {
                let right = matches!(kind, FaultKind::Refuse { rank: refused } if (rank.0, reason.code()) == (*refused, 9));
                (!right).then(|| "a refusal of nobody".into())
            }
            TransportError::Bootstrap { text, .. } => {
                // Rank A waits for rank B, and rank B waits for the dead rank. Rank A can name only rank B.
                if !text.contains("rank ") {
                    return Some("no group, and nobody to blame".into());
                }
                let may = match kind {
                    FaultKind::Partition { heals, .. } | FaultKind::Link { heals, .. } => {
                        heals.is_none_or(|heals| heals > self.world.limits().short_outage)
                    }
                    // A rank may receive the last message earlier than other ranks, and die before they have
                    // it.
                    FaultKind::Crash { .. } | FaultKind::Dropped { .. } | FaultKind::Abort { .. } => true,
                    FaultKind::Refuse { .. } | FaultKind::Slow { .. } | FaultKind::Computes { .. } => false,
                };
                (!may || call.what != What::Form).then(|| "no group, without a reason".into())
            }
            TransportError::Deadline { .. } => Some("a deadline before anybody noticed the fault".into()),
            _ => Some("an error that no fault explains".into()),
        }
    }

    /// With so much loss, a link may be silent for 5 s without another fault. That counts as a
    /// death like any other.
    fn is_chance(&self, call: &Call) -> bool {
        let silence = |text: &str| {
            ["timed out", "nothing heard", "received nothing"].iter().any(|what| text.contains(what))
        };
        self.world.conditions.loss_per_mille > LITTLE_LOSS
            && match &call.result {
                Err(TransportError::Aborted {
                    abort: Abort { cause: AbortCause::Died(text), .. }, ..
                }) => silence(text),
                Err(TransportError::Bootstrap { .. }) => call.what == What::Form,
                _ => false,
            }
    }

    fn may_blame(&self, kind: &FaultKind, who: u32, abort: &Abort) -> bool {
        let culprit = abort.culprit.0;
        match kind {
            FaultKind::Crash { rank, .. } | FaultKind::Dropped { rank } => culprit == *rank,
            FaultKind::Abort { rank } => {
                culprit == *rank && abort.cause == AbortCause::Failed(FAILURE.into())
            }
            FaultKind::Partition { side, heals, .. } => {
                let lost = |rank: u32| side.contains(&rank) != side.contains(&0);
                match heals {
                    Some(heals) if *heals <= self.world.limits().short_outage => false,
                    // A rank that was cut off may reconnect, and name a rank on the other side as the
                    // culprit.
                    Some(_) => true,
                    None if lost(who) => culprit == 0 || lost(culprit),
                    None => lost(culprit),
                }
            }
            FaultKind::Link { a, b, heals, .. } => {
                heals.is_none_or(|heals| heals > self.world.limits().short_outage)
                    && [*a, *b].contains(&culprit)
            }
            FaultKind::Computes { rank, by } => {
                let stuck = matches!(&abort.cause, AbortCause::Stuck(text) if text.contains("waited for it"));
                by.is_none() && culprit == *rank && stuck
            }
            FaultKind::Refuse { .. } | FaultKind::Slow { .. } => false,
        }
    }

    /// All ranks have the same verdict, and it includes every vote.
    fn votes(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for round in 0..self.world.operations.len() as u64 {
            let calls = |log: &Log| log.calls.iter().find(|call| call.what == What::Vote { round }).cloned();
            let of_all: Vec<Option<Call>> = self.played.logs.iter().map(calls).collect();
            let voted = |rank| {
                self.played.logs.iter().zip(&of_all).any(|(log, call)| log.rank == rank && call.is_some())
            };
            let some = |is: fn(&Call) -> bool| of_all.iter().flatten().any(is);
            let agreed = some(|call| call.result.is_ok());
            let refused = some(|call| matches!(call.result, Err(TransportError::Refused { .. })));
            if agreed && refused {
                wrong.push(format!("round {round}: some have agreed, others were refused"));
            }
            if (agreed || refused) && !(0..self.world.ranks).all(voted) {
                wrong.push(format!("round {round}: a verdict without all votes"));
            }
        }
        wrong
    }

    /// A message that the receiver reports as arrived has arrived.
    fn messages(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for log in &self.played.logs {
            for call in &log.calls {
                let What::Send { to, tag } = call.what else { continue };
                let from = log.rank;
                let arrived = self.played.logs.iter().filter(|log| log.rank == to).any(|log| {
                    let got = |call: &Call| call.what == What::Receive { from, tag } && call.result.is_ok();
                    log.calls.iter().any(got)
                });
                if call.result.is_ok() && !arrived {
                    wrong.push(format!("{tag} from rank {from} to rank {to} was confirmed and has not come"));
                }
            }
        }
        wrong
    }

    /// The same abort for all ranks that reach a living coordinator.
    fn aborts(&self) -> Option<String> {
        let cut_off = |rank: u32| match self.kind() {
            Some(FaultKind::Partition { side, .. }) => side.contains(&rank) != side.contains(&0),
            Some(FaultKind::Link { a, b, .. }) => {
                [*a, *b].contains(&0) && [*a, *b].contains(&rank) && rank != 0
            }
            _ => false,
        };
        let logs = self.played.logs.iter().filter(|log| self.is_judged(log) && !cut_off(log.rank));
        let mut aborts = logs.flat_map(|log| &log.calls).filter_map(|call| match &call.result {
            Err(TransportError::Aborted { abort, .. }) => Some(abort),
            _ => None,
        });
        let first = aborts.next()?;
        if self.kind().and_then(FaultKind::gone) == Some(0) {
            // Every rank detects the failure by itself. The culprits are checked above.
            return None;
        }
        let other = aborts.find(|abort| *abort != first)?;
        Some(format!("two aborts: {first}; and {other}"))
    }
}
