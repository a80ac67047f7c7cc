//! Proved plans, and the task of each rank.

use std::sync::Arc;
use std::time::Duration;

use kyklos::RunOptions;
use kyklos::local::{RankTask, Tensors};
use kyklos::plan::{self, RankCheck, World};
use kyklos_transport::{Rank, Transport};

use crate::failure::Result;

/// The plans of all ranks, their proof, and the hash on which the ranks agree before they start.
#[derive(Clone, Debug)]
pub(crate) struct Plans {
    pub(crate) world: Arc<World>,
    /// By rank; empty for some rows only.
    pub(crate) checks: Vec<RankCheck>,
    pub(crate) hash: [u8; 32],
}

/// How often a plan is run, and under which conditions.
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    pub(crate) repeat: u64,
    /// Longest wait for one message.
    pub(crate) deadline: Duration,
    pub(crate) options: RunOptions,
}

impl Plans {
    /// Proves the plans of `world`.
    pub(crate) fn prove(world: World) -> Result<Self> {
        let checks = plan::check(&world)?;
        Ok(Self::proved((world, checks), &[]))
    }

    /// The plan of one rank that attends from some queries only (`kyklos::plan_rows`). It has no proof: a proof covers
    /// every query.
    pub(crate) fn of_rows(world: World) -> Self {
        Self::proved((world, Vec::new()), &[])
    }

    /// Plans with their proof. `inputs` is what else must be the same on all ranks: the hash covers it.
    pub(crate) fn proved((world, checks): (World, Vec<RankCheck>), inputs: &[String]) -> Self {
        let ranks = (0..world.mesh.world()).map(|rank| format!("rank-{rank}"));
        let identities: Vec<String> = ranks.chain(inputs.iter().cloned()).collect();
        Self { hash: plan::plan_hash(&world, &identities), world: Arc::new(world), checks }
    }

    /// Steps of all ranks together.
    pub(crate) fn steps(&self) -> u64 {
        self.world.plans.iter().map(|plan| plan.steps.len() as u64).sum()
    }

    /// Most bytes that `rank` has on its device at one time; 0 where there is no proof.
    pub(crate) fn peak_bytes(&self, rank: Rank) -> u64 {
        self.checks.get(rank.0 as usize).map_or(0, |check| check.peak_bytes)
    }

    /// What the rank of `transport` runs, on its own part of the tensors.
    pub(crate) fn task(
        &self,
        transport: Arc<dyn Transport>,
        Tensors { q, k, v, bias: pairs }: Tensors,
        Runs { repeat, deadline, options }: &Runs,
    ) -> RankTask<'_> {
        RankTask {
            world: &self.world,
            plan_hash: self.hash,
            peak_bytes: self.peak_bytes(transport.rank()),
            transport,
            q,
            k,
            v,
            bias: pairs,
            repeat: *repeat,
            deadline: *deadline,
            options: options.clone(),
        }
    }
}
