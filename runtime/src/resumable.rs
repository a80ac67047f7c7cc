//! A rank that can resume: when its group loses ranks, the survivors complete the current operation (ADR 0021).
//!
//! The survivors form a new group ([`Transport::reform`]), exchange the number of steps that each of them has done, and
//! all compute the same plans from it ([`repair`]). Inputs, received keys and running states stay on their devices in
//! the meantime.

use std::sync::Arc;

use bytes::Bytes;
use kyklos_transport::{
    Abort, AbortCause, Posted, Progress, Rank, RefusalReason, Tag, Taken, Transport, Vote,
};

use crate::backend::Backend;
use crate::collective::HostStaged;
use crate::plan::{RankCheck, StepProgress, World, check_repair, plan_hash};
use crate::rank_task::RankTask;
use crate::{Carryover, Error, Executor, Inputs, RankOutput, Result, repair};

/// A rank's task on a device, with the buffers that outlive the task's group.
///
/// ```text
/// new -> run -> Ok
///           \-> Err(Group): Transport::reform -> finish
/// ```
#[derive(Debug)]
pub struct ResumableRank<'a, B: Backend> {
    backend: &'a B,
    task: RankTask<'a>,
    /// `None` until the inputs are on the device.
    inputs: Option<Inputs<B::Buffer>>,
    carryover: Carryover<B::Buffer>,
}

/// The group that survivors have formed.
#[derive(Clone, Debug)]
pub struct Survivors {
    /// This rank's endpoint in the new group. No message has been sent in the group yet.
    pub transport: Arc<dyn Transport>,
    /// For each rank of this group: its rank in the interrupted world.
    pub ranks: Vec<Rank>,
}

/// A completed recovery.
#[derive(Debug)]
pub struct Recovery {
    /// The plans of the survivors. [`World::lost`] lists the queries whose output rows are missing.
    pub world: World,
    /// The results of the proof of those plans, by rank.
    pub checks: Vec<RankCheck>,
    /// Hash of those plans, on which the survivors agreed.
    pub plan_hash: [u8; 32],
    /// This rank's output. Its report and spans cover the recovery only, not the interrupted run.
    pub output: RankOutput,
}

impl<'a, B: Backend> ResumableRank<'a, B> {
    /// Binds `task` to `backend`. Does not touch the device.
    pub fn new(backend: &'a B, task: RankTask<'a>) -> Self {
        Self { backend, task, inputs: None, carryover: Carryover::default() }
    }

    /// As [`RankTask::run`]. With `keep` an interrupted run leaves its intermediate results on the device, so that
    /// [`Self::finish`] can continue; [`Executor::resumable`] says what that costs.
    ///
    /// # Errors
    /// As [`RankTask::run`]. After [`Error::Group`] the survivors may call [`Self::finish`].
    pub async fn run(&mut self, keep: bool, mut each: impl FnMut(u64, RankOutput)) -> Result<()> {
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
        let executor = if keep { executor.resumable() } else { executor };
        let [q, k, v] = [&mut task.q, &mut task.k, &mut task.v].map(std::mem::take);
        let inputs = match executor.load(q, k, v, task.bias.take()) {
            Ok(inputs) => self.inputs.insert(inputs),
            Err(error) => {
                // The other ranks wait for an agreement: this rank's vote gives them the reason why it cannot run.
                task.transport.agree(refusal(rank, &error), task.deadline).await?;
                return Err(error);
            }
        };
        for op in 0..task.repeat {
            each(op, executor.run_from(op, inputs, &mut self.carryover).await?);
        }
        Ok(())
    }

    /// Completes, together with the other survivors, the operation in which ranks were lost. It is operation 0 of the new
    /// group. Call it once.
    ///
    /// # Errors
    /// [`Error::KeysLost`] and [`Error::Request`] when the operation cannot be completed. They are the same on all survivors,
    /// no operation has run in the new group, and it can be used for another call. Other errors as [`Executor::run_from`].
    pub async fn finish(&mut self, survivors: &Survivors) -> Result<Recovery> {
        let Self { backend, task, inputs, carryover } = self;
        let Some(inputs) = inputs else {
            return Err(Error::request(
                "ResumableRank::finish without an interrupted run",
                "call ResumableRank::run first",
            ));
        };
        let Survivors { transport, ranks } = survivors;
        let mut reached = exchange_progress(task, survivors, carryover.progress()).await?;
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

    /// Runs the rank's plan on `backend`; `each` gets the output of every run. The transport stays open, so that the
    /// caller can send other messages afterwards.
    ///
    /// # Errors
    /// Any; an error of this rank ends the operation on all ranks.
    pub async fn run<B: Backend>(self, backend: &B, each: impl FnMut(u64, RankOutput)) -> Result<()> {
        ResumableRank::new(backend, self).run(false, each).await
    }
}

/// A vote against the operation, with the error of this rank.
fn refusal(rank: Rank, error: &Error) -> Vote {
    let reason = if error.is_request() { RefusalReason::WrongRequest } else { RefusalReason::Failed };
    Vote::Refuse { reason, text: format!("rank {rank}: {error}") }
}

/// The inputs of a recovery, for the hash of its plans. All ranks must compose the same text, also ranks with another
/// release: so the text does not depend on the names of types.
fn origin(plan_hash: [u8; 32], reached: &[StepProgress]) -> String {
    let ranks: Vec<String> = reached
        .iter()
        .map(|StepProgress { op, steps, arrived }| {
            format!("Reached {{ op: {op}, steps: {steps}, arrived: {arrived:?} }}")
        })
        .collect();
    format!("finishes {plan_hash:?} from [{}]", ranks.join(", "))
}

/// The progress of each survivor in the interrupted plan, by its rank in the new group.
async fn exchange_progress(
    task: &RankTask<'_>,
    Survivors { transport, ranks }: &Survivors,
    mine: &StepProgress,
) -> Result<Vec<StepProgress>> {
    let me = transport.rank();
    let plan_of = |rank: Rank| task.world.plan(ranks[rank.0 as usize]);
    let bytes = Bytes::from(mine.encode(plan_of(me)));
    let others: Vec<Rank> = (0..transport.world()).map(Rank).filter(|rank| *rank != me).collect();
    // All messages are posted before the first wait.
    let sent: Vec<Posted<Taken>> = others
        .iter()
        .map(|to| transport.post_send(*to, PROGRESS, vec![bytes.clone()], task.deadline))
        .collect();
    let received: Vec<Posted<Vec<Bytes>>> = others
        .iter()
        .map(|from| {
            let size = StepProgress::encoded_bytes(plan_of(*from));
            transport.post_recv(*from, PROGRESS, &[size], task.deadline)
        })
        .collect();
    let mut all = Vec::with_capacity(ranks.len());
    for (from, received) in others.iter().zip(received) {
        let parts = received.await?;
        let bytes = parts.first().map_or(&[][..], |bytes| &bytes[..]);
        all.push(StepProgress::decode(bytes, plan_of(*from)).inspect_err(|error| {
            // The sender does not know that its message is malformed, so this rank reports it.
            let cause = AbortCause::Failed(error.to_string());
            transport.abort(Abort { culprit: *from, cause, progress: Progress::default() });
        })?);
    }
    for sent in sent {
        sent.await?;
    }
    all.insert(me.0 as usize, mine.clone());
    Ok(all)
}

/// A number apart from the messages of the recovery, which count from 0.
const PROGRESS: Tag = Tag { op: 0, message: u32::MAX };

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
