//! One rank computes everything: nothing is sent.

use super::facts::{Extent, MeshRule, StrategyFacts};
use super::unified;

const ONE_RANK: MeshRule = MeshRule { ulysses: Extent::One, ring: Extent::One };

pub(super) const FACTS: StrategyFacts = StrategyFacts {
    meshes: ONE_RANK,
    default_on: Some(ONE_RANK),
    example_mesh: (1, 1),
    is_distinct: |_, _| true,
    streams: &[],
    ..unified::FACTS
};
