//! What a plan that was cut off leaves, and the proof that a repair keeps nothing else.

use std::collections::BTreeSet;

use kyklos_transport::Rank;

use super::alone::RankProof;
use super::world::{RankCheck, check};
use crate::plan::{BufferId, Content, StepProgress, World};
use crate::{Error, Result, TokenRuns};

/// What a rank has after some of its steps, beside its inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Keys and values that are here whole, as they arrived or as something was made of them.
    pub blocks: Vec<BufferId>,
    /// Running states that nobody has consumed, and the keys that each has met, ascending.
    pub states: Vec<(BufferId, TokenRuns)>,
    /// Whether the output is here.
    pub finished: bool,
}

/// What `rank` has of its plan in `world` when it came so far.
///
/// # Errors
/// [`Error::Plan`] when no run of the plan comes there, or the plan is wrong up to there.
pub fn left(world: &World, rank: Rank, reached: &StepProgress) -> Result<Left> {
    RankProof::new(world, world.plan(rank)).until(reached)
}

impl RankProof<'_> {
    /// What there is after the steps that were done, each of which is proved on the way.
    fn until(mut self, reached: &StepProgress) -> Result<Left> {
        self.declarations()?;
        let Some(steps) = self.plan.steps.get(..reached.steps) else {
            let steps = self.plan.steps.len();
            return self.fault(format!("{} steps are said to be done, there are {steps}", reached.steps));
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
                    return self.fault(format!("buffer {} cannot be on its way after {done} steps", id.0));
                }
            }
        }
        let there = |id: &BufferId| {
            let life = &self.lives[id.0];
            life.live && !life.consumed && life.arriving.is_none() && !self.plan.is_own(*id)
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
        Ok(Left { blocks, states, finished })
    }
}

/// Proves that `repair` finishes for `ranks` what they began in `before`, of which each came as far as `reached` says: it
/// is about the same problem, every rank keeps its tokens, what is kept was left, and [`check`] holds from there on. So
/// every visible pair of a row that is left has been met exactly once, before or after.
///
/// # Errors
/// [`Error::Plan`] that says which rank and what is wrong; ranks are those of `repair`.
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
            format!("{} ranks are left, {told} say how far they came, {plans} have plans", ranks.len()),
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
            return fault(0, format!("{lost} are not the tokens of those who are lost"));
        }
    }
    for (at, (rank, reached)) in ranks.iter().zip(reached).enumerate() {
        kept_was_left(before, (*rank, reached), repair, at)?;
    }
    check(repair)
}

/// Everything that rank `at` of the repair keeps is what was left of its plan before.
fn kept_was_left(
    before: &World,
    (rank, reached): (Rank, &StepProgress),
    repair: &World,
    at: usize,
) -> Result<()> {
    let left = left(before, rank, reached)?;
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
                            "`{}` is said to have met {}, and has met {met}",
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
            return fault(format!(
                "`{}` is kept, which was not left after {} steps",
                was.name, reached.steps
            ));
        }
        if (was.content, &was.tokens, &was.heads) != (is.content, &is.tokens, &is.heads) {
            return fault(format!("`{}` is kept as something else", was.name));
        }
    }
    Ok(())
}
