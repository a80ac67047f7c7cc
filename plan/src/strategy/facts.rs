//! The facts of a strategy that other modules need.

use std::fmt;

use super::backward::Sums;
use super::build::{Inputs, PlanBuilder};
use super::price::Traffic;
use super::streams::{Routes, StreamShape};
use crate::mesh::Mesh;
use crate::plan::BufferId;
use crate::problem::AttentionProblem;

/// All facts of a strategy that other modules need. Each strategy has one constant of this type,
/// `FACTS`, in its own file.
pub(crate) struct StrategyFacts {
    /// The meshes that it runs on.
    pub(super) meshes: MeshRule,
    /// The meshes for which it is the default strategy.
    pub(super) default_on: Option<MeshRule>,
    /// A mesh of at most four ranks, as (U, R), that shows the strategy: for examples and tables.
    pub(super) example_mesh: (u32, u32),
    /// Whether its plans differ from those of every strategy before it in the list. The planner
    /// tries only those.
    pub(crate) is_distinct: fn(&AttentionProblem, Mesh) -> bool,
    /// The data that travel between shards.
    pub(super) moves: Moves,
    /// Whether it has a round for queries that every rank holds.
    pub(super) same_queries: bool,
    /// How keys and values travel from neighbour to neighbour; empty if they do not.
    pub(super) streams: &'static [StreamShape],
    /// Whether the heads of a rank cross the all-to-all in chunks.
    pub(super) chunks_heads: bool,
    /// The round over the shards: writes its steps for one rank, frees the inputs and returns the
    /// running state.
    pub(super) attend_round: fn(&mut PlanBuilder<'_>, &Routes, Inputs) -> BufferId,
    /// The round of a backward pass: writes its steps for one rank, frees the inputs and returns
    /// the sums of gradients. `None` for a strategy without a backward pass.
    pub(super) backward_round: Option<fn(&mut PlanBuilder<'_>, &Routes, Inputs) -> Sums>,
    /// Payload in bytes that all ranks together send in this round.
    pub(super) round_bytes: fn(&Traffic<'_>, &Routes) -> u128,
    /// Whether a rank posts all messages of the round at once. Simulating them takes longer: each
    /// message that starts or ends changes the speed of all others.
    pub(crate) posts_all_at_once: bool,
    /// Under which masks every hop of a ring costs the same, so that a long ring is extrapolated
    /// from two shorter ones.
    pub(crate) equal_hops: EqualHops,
}

/// The data that travel between shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moves {
    /// Keys and values. A rank processes keys one block after the other, so the order of sums can
    /// be fixed, and a wire format applies.
    Keys,
    /// Queries in one direction, and running states back.
    Queries,
}

/// Under which masks every hop of a ring costs the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EqualHops {
    /// Without a mask, and under a causal mask over shards that are not contiguous.
    FullAndCausal,
    /// Without a mask.
    Full,
    /// Under none.
    Never,
}

/// The extents that a mesh may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MeshRule {
    pub(crate) ulysses: Extent,
    pub(crate) ring: Extent,
}

/// The values that one extent of a mesh may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    One,
    Any,
    AtLeastTwo,
}

impl MeshRule {
    pub(crate) fn takes(self, mesh: Mesh) -> bool {
        self.ulysses.takes(mesh.ulysses()) && self.ring.takes(mesh.ring())
    }
}

impl Extent {
    fn takes(self, extent: u32) -> bool {
        match self {
            Self::One => extent == 1,
            Self::Any => true,
            Self::AtLeastTwo => extent >= 2,
        }
    }
}

/// As in `a mesh UxR with R of at least 2`.
impl fmt::Display for MeshRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |extent: Extent, name: &'static str| if extent == Extent::One { "1" } else { name };
        write!(f, "a mesh {}x{}", side(self.ulysses, "U"), side(self.ring, "R"))?;
        match (self.ulysses, self.ring) {
            (Extent::AtLeastTwo, Extent::AtLeastTwo) => f.write_str(" with U and R of at least 2"),
            (Extent::AtLeastTwo, _) => f.write_str(" with U of at least 2"),
            (_, Extent::AtLeastTwo) => f.write_str(" with R of at least 2"),
            _ => Ok(()),
        }
    }
}
