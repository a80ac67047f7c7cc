//! Completing an operation in which ranks were lost (ADR 0021).
//!
//! The survivors form a new group ([`Transport::reform`]), exchange the number of steps that each of them has done, and
//! all compute the same plans from it ([`repair`]). Inputs, received keys and running states stay on their devices in
//! the meantime.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::{Abort, AbortCause, Posted, Progress, Rank, Tag, Taken, Transport, TransportError};

use super::Session;
use crate::backend::DeviceBuffer;
use crate::collective::HostStaged;
use crate::exec::{AbortOnDrop, refusal};
use crate::plan::{ProvedPlans, StepProgress, World};
use crate::{Executor, Inputs, LoweredPlan, RankOutput, Result, repair};

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
    /// The plans of the survivors. [`World::lost`](crate::plan::World::lost) lists the queries whose output rows are missing.
    pub plans: Arc<ProvedPlans>,
    /// This rank's output. Its report and spans cover the recovery only, not the interrupted run.
    pub output: RankOutput,
}

impl Session {
    /// Completes, together with the other survivors, the run of `plans` on `inputs` in which ranks were lost. It is operation 0
    /// of the new group, in which the session then continues. Call it once, on a session with [`SessionOptions::resumable`](super::SessionOptions::resumable), after a
    /// run that ended with [`Error::Group`](crate::Error::Group). If the future is dropped after its first poll and before its
    /// end, the new group is aborted on all ranks; the inputs stay.
    ///
    /// # Errors
    /// [`Error::KeysLost`](crate::Error::KeysLost) and [`Error::Request`](crate::Error::Request) when the operation cannot be
    /// completed. They are the same on all survivors, no operation has run in the new group, and it can be used for another
    /// call. Other errors as [`Session::run`].
    pub async fn finish(
        &mut self,
        plans: &Arc<ProvedPlans>,
        inputs: &mut Inputs<DeviceBuffer>,
        survivors: &Survivors,
    ) -> Result<Recovery> {
        let Survivors { transport, ranks } = survivors;
        let deadline = self.options.deadline;
        let mine = self.carryover.progress();
        let guard = AbortOnDrop::new(|abort| transport.abort(abort), transport.rank(), 0);
        let exchanged = exchange_progress(plans.world(), survivors, deadline, mine).await;
        guard.end();
        let mut reached = exchanged?;
        StepProgress::align_operations(&mut reached);
        let world = repair(plans.world(), ranks, &reached)?;
        let plans = Arc::new(ProvedPlans::of_repair(plans, ranks, &reached, world)?);
        let lowered = LoweredPlan::new(plans.clone(), transport.rank(), &self.device);
        let collective = HostStaged::new(transport.clone(), deadline);
        let executor = Executor::new(&self.device, &collective, &lowered, self.options.run.clone());
        if let Err(error) = self.check_device(inputs) {
            let vote = transport.agree(refusal(transport.rank(), &error), deadline).await;
            return Err(vote
                .err()
                .filter(|of_group| !matches!(of_group, TransportError::Refused { .. }))
                .map_or(error, Into::into));
        }
        let output = executor.run_from(0, inputs, &mut self.carryover).await?;
        // The session continues in the new group, in which this was operation 0.
        self.transport = transport.clone();
        self.collective = Arc::new(collective);
        (self.op, self.lowered) = (1, Vec::new());
        Ok(Recovery { plans, output })
    }
}

/// The progress of each survivor in the interrupted plan, by its rank in the new group.
async fn exchange_progress(
    interrupted: &World,
    Survivors { transport, ranks }: &Survivors,
    deadline: Duration,
    mine: &StepProgress,
) -> Result<Vec<StepProgress>> {
    let me = transport.rank();
    let plan_of = |rank: Rank| interrupted.plan(ranks[rank.0 as usize]);
    let bytes = Bytes::from(mine.encode(plan_of(me)));
    let others: Vec<Rank> = (0..transport.world()).map(Rank).filter(|rank| *rank != me).collect();
    // All messages are posted before the first wait.
    let sent: Vec<Posted<Taken>> =
        others.iter().map(|to| transport.post_send(*to, PROGRESS, vec![bytes.clone()], deadline)).collect();
    let received: Vec<Posted<Vec<Bytes>>> = others
        .iter()
        .map(|from| {
            let size = StepProgress::encoded_bytes(plan_of(*from));
            transport.post_recv(*from, PROGRESS, &[size], deadline)
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
