//! The buffers that an interrupted plan leaves, and the proof that a repair keeps no others.

use std::collections::BTreeSet;

use kyklos_transport::Rank;

use super::proof::RankProof;
use super::world::{RankCheck, check};
use crate::plan::{BufferId, Content, StepProgress, World};
use crate::{Error, Result, TokenRuns};

/// The buffers of a rank after some of its steps, without its inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemainingBuffers {
    /// Complete blocks of keys and values, as they arrived or as the rank converted them.
    pub blocks: Vec<BufferId>,
    /// Running states that no step has consumed, and the keys that each has met, ascending.
    pub states: Vec<(BufferId, TokenRuns)>,
    /// Whether the output is complete.
    pub finished: bool,
}

/// The buffers that `rank` holds of its plan in `world` after this progress.
///
/// # Errors
/// [`Error::Plan`] when no run of the plan reaches this point, or the plan is wrong before it.
pub fn remaining_buffers(world: &World, rank: Rank, reached: &StepProgress) -> Result<RemainingBuffers> {
    RankProof::new(world, world.plan(rank)).until(reached)
}

impl RankProof<'_> {
    /// The buffers after the completed steps. Each step is proved on the way.
    fn until(mut self, reached: &StepProgress) -> Result<RemainingBuffers> {
        self.declarations()?;
        let Some(steps) = self.plan.steps.get(..reached.steps) else {
            let steps = self.plan.steps.len();
            return self.fault(format!("{} steps are reported as done, the plan has {steps}", reached.steps));
        };
        for (index, step) in steps.iter().enumerate() {
            self.step = Some(index);
            self.step(step)?;
        }
        self.step = None;
        for id in &reached.arrived {
            match self.lives.get_mut(id.0).and_then(|life| life.arriving.take()) {
                Some(_) => {}
                None => {
                    let done = reached.steps;
                    return self.fault(format!("buffer {} cannot be in flight after {done} steps", id.0));
                }
            }
        }
        let there = |id: &BufferId| {
            let life = &self.lives[id.0];
            life.live && !life.consumed && !life.sent && life.arriving.is_none() && !self.plan.is_own(*id)
        };
        let (mut blocks, mut states) = (Vec::new(), Vec::new());
        for id in (0..self.lives.len()).map(BufferId).filter(there) {
            match self.plan.buffer(id).content {
                Content::State => states.push((id, self.lives[id.0].met.keys())),
                Content::KeyValue | Content::WireKeyValue
                    if self.must_be_written(&self.plan.whole(id)).is_ok() =>
                {
                    blocks.push(id);
                }
                _ => {}
            }
        }
        let finished = self.must_be_written(&self.plan.whole(self.plan.output)).is_ok();
        Ok(RemainingBuffers { blocks, states, finished })
    }
}

/// Proves that `repair` completes for `ranks` the operation that they began with the plans of `before`, where `reached`
/// is the progress of each rank: the problem is the same, every rank keeps its tokens, every kept buffer exists after
/// the interrupted run, and [`check`] holds from there on. So the rows of survivors meet every visible pair exactly
/// once, before or after.
///
/// # Errors
/// [`Error::Plan`] that names the rank and the fault; ranks are numbered as in `repair`.
pub fn check_repair(
    before: &World,
    ranks: &[Rank],
    reached: &[StepProgress],
    repair: &World,
) -> Result<Vec<RankCheck>> {
    let fault = |rank: usize, fault: String| {
        Err(Error::plan(Rank(u32::try_from(rank).unwrap_or(u32::MAX)), None, fault))
    };
    let known = before.plans.len();
    let ascending = ranks.windows(2).all(|pair| pair[0] < pair[1]);
    if !ascending || ranks.last().is_some_and(|rank| rank.0 as usize >= known) || ranks.is_empty() {
        return fault(0, format!("{ranks:?} are not some of {known} ranks, in their order"));
    }
    if [reached.len(), repair.plans.len()] != [ranks.len(); 2] {
        let (told, plans) = (reached.len(), repair.plans.len());
        return fault(
            0,
            format!("{} ranks survive, {told} report their progress, {plans} have plans", ranks.len()),
        );
    }
    if repair.problem != before.problem {
        return fault(0, "the repair is of another problem".to_owned());
    }
    for (ours, theirs, lost) in [
        (&repair.q_placement, &before.q_placement, &repair.lost.queries),
        (&repair.kv_placement, &before.kv_placement, &repair.lost.keys),
    ] {
        let moved =
            ranks.iter().enumerate().find(|(at, rank)| ours.ranks().get(*at) != Some(theirs.of_rank(**rank)));
        if let Some((at, rank)) = moved {
            return fault(at, format!("has other tokens than as rank {rank}"));
        }
        if *lost != theirs.without(ranks) {
            return fault(0, format!("{lost} are not the tokens of the lost ranks"));
        }
    }
    for (at, (rank, reached)) in ranks.iter().zip(reached).enumerate() {
        kept_was_left(before, (*rank, reached), repair, at)?;
    }
    check(repair)
}

/// Checks that rank `at` of the repair keeps only buffers that its interrupted plan left.
fn kept_was_left(
    before: &World,
    (rank, reached): (Rank, &StepProgress),
    repair: &World,
    at: usize,
) -> Result<()> {
    let left = remaining_buffers(before, rank, reached)?;
    let (old, plan) = (before.plan(rank), &repair.plans[at]);
    let fault = |fault: String| Err(Error::plan(Rank(plan.rank), None, fault));
    let mut taken = BTreeSet::new();
    for kept in &plan.kept {
        let (Some(was), Some(is)) = (old.buffers.get(kept.was.0), plan.buffers.get(kept.buffer.0)) else {
            return fault(format!("keeps buffer {} as {}, which is no buffer", kept.was.0, kept.buffer.0));
        };
        let there = match was.content {
            Content::State => {
                let state = left.states.iter().find(|(id, _)| *id == kept.was);
                match state {
                    Some((_, met)) if *met != is.met => {
                        return fault(format!(
                            "`{}` is declared to have met {}, and has met {met}",
                            is.name, is.met
                        ));
                    }
                    state => state.is_some(),
                }
            }
            Content::Output => left.finished && kept.was == old.output && kept.buffer == plan.output,
            _ => left.blocks.contains(&kept.was),
        };
        if !there || !taken.insert(kept.was) {
            return fault(format!("`{}` is kept, and was not left after {} steps", was.name, reached.steps));
        }
        if (was.content, &was.tokens, &was.heads) != (is.content, &is.tokens, &is.heads) {
            return fault(format!("`{}` is kept as something else", was.name));
        }
    }
    Ok(())
}
