//! A rank that outlives its group: when the group loses ranks, those who are left finish what all had begun.
//!
//! They form a group again, tell each other how far they came, and all make the same plans from that ([`repair`]). What is on
//! their devices stays there meanwhile.

use std::sync::Arc;

use bytes::Bytes;
use kyklos_transport::{Abort, AbortCause, Posted, Progress, Rank, Tag, Taken, Transport, Vote};

use crate::backend::Backend;
use crate::collective::HostStaged;
use crate::plan::{RankCheck, StepProgress, World, check_repair, plan_hash};
use crate::rank_task::RankTask;
use crate::{Carryover, Error, Executor, Inputs, RankOutput, Result, repair};

/// A rank's task on a device, with what it has there.
#[derive(Debug)]
pub struct ResumableRank<'a, B: Backend> {
    backend: &'a B,
    task: RankTask<'a>,
    /// Once they are on the device.
    inputs: Option<Inputs<B::Buffer>>,
    carryover: Carryover<B::Buffer>,
}

/// The group of those who are left.
#[derive(Clone, Debug)]
pub struct Survivors {
    /// This rank's end of it, which nobody has used yet.
    pub transport: Arc<dyn Transport>,
    /// By rank of this group, its rank in the world that was cut off.
    pub ranks: Vec<Rank>,
}

/// What those who are left have finished.
#[derive(Debug)]
pub struct Recovery {
    /// Their plans. [`World::lost`] says which queries have no answer.
    pub world: World,
    /// What the proof of them found.
    pub checks: Vec<RankCheck>,
    /// Hash of what they have agreed on.
    pub plan_hash: [u8; 32],
    /// This rank's. Report and spans are of what was left to do: what the run spent and sent before it was cut off is in none.
    pub output: RankOutput,
}

impl<'a, B: Backend> ResumableRank<'a, B> {
    /// `task` on `backend`. Nothing has happened yet.
    pub fn new(backend: &'a B, task: RankTask<'a>) -> Self {
        Self { backend, task, inputs: None, carryover: Carryover::default() }
    }

    /// As [`RankTask::run`]. With `keeps` what is done is kept; see [`Executor::resumable`] for what that costs.
    ///
    /// # Errors
    /// As [`RankTask::run`]. After one of the group [`Self::finish`] may do.
    pub async fn run(&mut self, keeps: bool, mut each: impl FnMut(u64, RankOutput)) -> Result<()> {
        let Self { backend, task, .. } = self;
        let rank = task.transport.rank();
        let collective = HostStaged::new(task.transport.clone(), task.deadline);
        let executor = Executor::new(
            *backend,
            &collective,
            task.world,
            rank,
            task.plan_hash,
            task.peak_bytes,
            task.options.clone(),
        );
        let executor = if keeps { executor.resumable() } else { executor };
        let [q, k, v] = [&mut task.q, &mut task.k, &mut task.v].map(std::mem::take);
        let inputs = match executor.load(q, k, v, task.pairs.take()) {
            Ok(inputs) => self.inputs.insert(inputs),
            Err(error) => {
                // The other ranks are about to agree: this rank's vote tells them why it cannot run.
                task.transport.agree(refusal(rank, &error), task.deadline).await?;
                return Err(error);
            }
        };
        for op in 0..task.repeat {
            each(op, executor.run_from(op, inputs, &mut self.carryover).await?);
        }
        Ok(())
    }

    /// Finishes the operation in which ranks were lost with those who are left, as operation 0 of their group. Once.
    ///
    /// # Errors
    /// [`Error::KeysLost`] and [`Error::Request`], the same on all of them, when it cannot be finished: the group is as good
    /// as new then. Others as [`Executor::run_from`].
    pub async fn finish(&mut self, survivors: &Survivors) -> Result<Recovery> {
        let Self { backend, task, inputs, carryover } = self;
        let Some(inputs) = inputs else {
            return Err(Error::request("a task that has not run is to be finished", "run it first"));
        };
        let Survivors { transport, ranks } = survivors;
        let mut reached = tell_each_other(task, survivors, carryover.progress()).await?;
        StepProgress::align_operations(&mut reached);
        let world = repair(task.world, ranks, &reached)?;
        let checks = check_repair(task.world, ranks, &reached, &world)?;
        let plan_hash = plan_hash(&world, &[origin(task.plan_hash, &reached)]);
        let rank = transport.rank();
        let collective = HostStaged::new(transport.clone(), task.deadline);
        let peak_bytes = checks[rank.0 as usize].peak_bytes;
        let options = task.options.clone();
        let executor = Executor::new(*backend, &collective, &world, rank, plan_hash, peak_bytes, options);
        let output = executor.run_from(0, inputs, carryover).await?;
        drop(executor);
        Ok(Recovery { world, checks, plan_hash, output })
    }
}

impl RankTask<'_> {
    /// [`Self::run`], on this thread until it is done.
    ///
    /// # Errors
    /// As [`Self::run`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn run_on<B: Backend>(self, backend: &B, each: impl FnMut(u64, RankOutput)) -> Result<()> {
        pollster::block_on(self.run(backend, each))
    }

    /// Runs the rank's plan on `backend`; `each` sees the output of every run. The transport stays open for what the
    /// caller may want to send afterwards.
    ///
    /// # Errors
    /// Any; an error of this rank ends the operation on all ranks.
    pub async fn run<B: Backend>(self, backend: &B, each: impl FnMut(u64, RankOutput)) -> Result<()> {
        ResumableRank::new(backend, self).run(false, each).await
    }
}

/// A vote against the operation, for what went wrong on this rank.
fn refusal(rank: Rank, error: &Error) -> Vote {
    Vote::Refuse { exit: if error.is_request() { 2 } else { 1 }, text: format!("rank {rank}: {error}") }
}

/// What a recovery starts from, for the hash of its plans. All ranks must compose the same text, also those of other
/// releases: it does not change with the names of types.
fn origin(plan_hash: [u8; 32], reached: &[StepProgress]) -> String {
    let ranks: Vec<String> = reached
        .iter()
        .map(|StepProgress { op, steps, arrived }| {
            format!("Reached {{ op: {op}, steps: {steps}, arrived: {arrived:?} }}")
        })
        .collect();
    format!("finishes {plan_hash:?} from [{}]", ranks.join(", "))
}

/// How far each of those who are left came, by their rank.
async fn tell_each_other(
    task: &RankTask<'_>,
    Survivors { transport, ranks }: &Survivors,
    mine: &StepProgress,
) -> Result<Vec<StepProgress>> {
    let me = transport.rank();
    let plan_of = |rank: Rank| task.world.plan(ranks[rank.0 as usize]);
    let bytes = Bytes::from(mine.encode(plan_of(me)));
    let others: Vec<Rank> = (0..transport.world()).map(Rank).filter(|rank| *rank != me).collect();
    // All are posted before any is waited for.
    let told: Vec<Posted<Taken>> = others
        .iter()
        .map(|to| transport.post_send(*to, REACHED, vec![bytes.clone()], task.deadline))
        .collect();
    let heard: Vec<Posted<Vec<Bytes>>> = others
        .iter()
        .map(|from| {
            let size = StepProgress::encoded_bytes(plan_of(*from));
            transport.post_recv(*from, REACHED, &[size], task.deadline)
        })
        .collect();
    let mut all = Vec::with_capacity(ranks.len());
    for (from, heard) in others.iter().zip(heard) {
        let parts = heard.await?;
        let bytes = parts.first().map_or(&[][..], |bytes| &bytes[..]);
        all.push(StepProgress::decode(bytes, plan_of(*from)).inspect_err(|error| {
            // Who has said it does not know that it is wrong.
            let cause = AbortCause::Failed(error.to_string());
            transport.abort(Abort { culprit: *from, cause, progress: Progress::default() });
        })?);
    }
    for told in told {
        told.await?;
    }
    all.insert(me.0 as usize, mine.clone());
    Ok(all)
}

/// Beside the messages of the repair, which count from 0.
const REACHED: Tag = Tag { op: 0, message: u32::MAX };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::BufferId;

    #[test]
    fn the_text_that_enters_the_hash_is_that_of_earlier_releases() {
        let reached = [
            StepProgress { op: 3, steps: 7, arrived: vec![BufferId(1), BufferId(4)] },
            StepProgress { op: 3, ..StepProgress::default() },
        ];
        let ranks = "[Reached { op: 3, steps: 7, arrived: [BufferId(1), BufferId(4)] }, \
                     Reached { op: 3, steps: 0, arrived: [] }]";
        assert_eq!(origin([7; 32], &reached), format!("finishes {:?} from {ranks}", [7; 32]));
    }
}
