//! A rank that outlives its group: when the group loses ranks, those who are left finish what all had begun.
//!
//! They form a group again, tell each other how far they came, and all make the same plans from that ([`repair`]). What is on
//! their devices stays there meanwhile.

use std::sync::Arc;

use bytes::Bytes;
use kyklos_transport::{Abort, AbortCause, Posted, Progress, Rank, Tag, Taken, Transport, Vote};

use crate::backend::Backend;
use crate::collective::HostStaged;
use crate::local::RankTask;
use crate::plan::{RankCheck, Reached, World, check_repair, plan_hash};
use crate::{Error, Executor, Inputs, RankOutput, Remains, Result, repair};

/// A rank's task on a device, with what it has there.
#[derive(Debug)]
pub struct Lasting<'a, B: Backend> {
    backend: &'a B,
    task: RankTask<'a>,
    /// Once they are on the device.
    inputs: Option<Inputs<B::Buffer>>,
    remains: Remains<B::Buffer>,
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
pub struct Finished {
    /// Their plans. [`World::lost`] says which queries have no answer.
    pub world: World,
    /// What the proof of them found.
    pub checks: Vec<RankCheck>,
    /// Hash of what they have agreed on.
    pub plan_hash: [u8; 32],
    /// This rank's. Report and spans are of what was left to do: what the run spent and sent before it was cut off is in none.
    pub output: RankOutput,
}

impl<'a, B: Backend> Lasting<'a, B> {
    /// `task` on `backend`. Nothing has happened yet.
    pub fn new(backend: &'a B, task: RankTask<'a>) -> Self {
        Self { backend, task, inputs: None, remains: Remains::default() }
    }

    /// As [`RankTask::run`]. With `keeps` what is done is kept; see [`Executor::keeping`] for what that costs.
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
        let executor = if keeps { executor.keeping() } else { executor };
        let [q, k, v] = [&mut task.q, &mut task.k, &mut task.v].map(std::mem::take);
        let inputs = match executor.load(q, k, v, task.bias.take()) {
            Ok(inputs) => self.inputs.insert(inputs),
            Err(error) => {
                // The others are about to agree: they learn from this rank's vote why it cannot.
                let vote = Vote::Refuse { exit: error.exit_code(), text: format!("rank {rank}: {error}") };
                task.transport.agree(vote, task.deadline).await?;
                return Err(error);
            }
        };
        for op in 0..task.repeat {
            each(op, executor.run_from(op, inputs, &mut self.remains).await?);
        }
        Ok(())
    }

    /// Finishes the operation in which ranks were lost with those who are left, as operation 0 of their group. Once.
    ///
    /// # Errors
    /// [`Error::KeysLost`] and [`Error::Request`], the same on all of them, when it cannot be finished: the group is as good
    /// as new then. Others as [`Executor::run_from`].
    pub async fn finish(&mut self, survivors: &Survivors) -> Result<Finished> {
        let Self { backend, task, inputs, remains } = self;
        let Some(inputs) = inputs else {
            return Err(Error::request("a task that has not run is to be finished", "run it first"));
        };
        let Survivors { transport, ranks } = survivors;
        let mut reached = tell_each_other(task, survivors, remains.reached()).await?;
        Reached::in_the_same_operation(&mut reached);
        let world = repair(task.world, ranks, &reached)?;
        let checks = check_repair(task.world, ranks, &reached, &world)?;
        let plan_hash = plan_hash(&world, &[format!("finishes {:?} from {reached:?}", task.plan_hash)]);
        let rank = transport.rank();
        let collective = HostStaged::new(transport.clone(), task.deadline);
        let peak_bytes = checks[rank.0 as usize].peak_bytes;
        let options = task.options.clone();
        let executor = Executor::new(*backend, &collective, &world, rank, plan_hash, peak_bytes, options);
        let output = executor.run_from(0, inputs, remains).await?;
        drop(executor);
        Ok(Finished { world, checks, plan_hash, output })
    }
}

/// How far each of those who are left came, by their rank.
async fn tell_each_other(
    task: &RankTask<'_>,
    Survivors { transport, ranks }: &Survivors,
    mine: &Reached,
) -> Result<Vec<Reached>> {
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
            let size = Reached::encoded_bytes(plan_of(*from));
            transport.post_recv(*from, REACHED, &[size], task.deadline)
        })
        .collect();
    let mut all = Vec::with_capacity(ranks.len());
    for (from, heard) in others.iter().zip(heard) {
        let parts = heard.await?;
        let bytes = parts.first().map_or(&[][..], |bytes| &bytes[..]);
        all.push(Reached::decode(bytes, plan_of(*from)).inspect_err(|error| {
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
