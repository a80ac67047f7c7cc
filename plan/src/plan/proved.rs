//! Plans that a proof has accepted.

use kyklos_rank::Rank;

use super::{PlanSet, RankCheck, check, plan_hash};
use crate::error::Result;

/// The plans of all ranks of a group, with their proof and their hash. Only a proof makes this
/// type, and executors accept nothing else: so no rank runs a plan that was not proved.
///
/// ```
/// use kyklos_plan::plan::ProvedPlans;
/// use kyklos_plan::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_forward};
///
/// let problem = AttentionProblem::new([1, 64, 4, 2, 32], Dtype::F32, Mask::causal())?;
/// let mesh = Mesh::new(1, 2)?;
/// let set = plan_forward(&problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Ring)?;
/// let plans = ProvedPlans::new(set)?;
/// assert_eq!(plans.checks().len(), 2);
/// assert!(plans.checks()[0].bytes_sent > 0);
/// # Ok::<(), kyklos_plan::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ProvedPlans {
    set: PlanSet,
    /// By rank.
    checks: Vec<RankCheck>,
    hash: [u8; 32],
}

impl ProvedPlans {
    /// Proves the plans of `set`.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) that names the rank, the step and the fault.
    pub fn new(set: PlanSet) -> Result<Self> {
        let checks = check(&set)?;
        let hash = plan_hash(&set, &identities(&set));
        Ok(Self { set, checks, hash })
    }

    /// Plans without a proof, for tests that plant bugs: a proof would refuse them.
    #[cfg(feature = "planted-bugs")]
    #[doc(hidden)]
    pub fn unproved(set: PlanSet) -> Self {
        let checks = vec![RankCheck::default(); set.plans.len()];
        Self { set, checks, hash: [0; 32] }
    }

    /// The plans.
    pub fn set(&self) -> &PlanSet {
        &self.set
    }

    /// The figures that the proof found, by rank.
    pub fn checks(&self) -> &[RankCheck] {
        &self.checks
    }

    /// The hash on which all ranks agree before they run the plans.
    pub fn hash(&self) -> [u8; 32] {
        self.hash
    }

    /// Most bytes of plan buffers that `rank` has on its device at one time, its inputs and output
    /// among them.
    pub fn peak_bytes(&self, rank: Rank) -> u64 {
        self.checks[rank.0 as usize].peak_bytes
    }

    /// Steps of all ranks together.
    pub fn steps(&self) -> u64 {
        self.set.plans.iter().map(|plan| plan.steps.len() as u64).sum()
    }
}

fn identities(set: &PlanSet) -> Vec<String> {
    (0..set.mesh.size()).map(|rank| format!("rank-{rank}")).collect()
}
