//! One rank computes everything: nothing is sent.

use super::unified;
use crate::strategy::facts::{Extent, MeshRule, StrategyFacts};

const ONE_RANK: MeshRule = MeshRule { ulysses: Extent::One, ring: Extent::One };

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: ONE_RANK,
    default_on: Some(ONE_RANK),
    example_mesh: (1, 1),
    is_distinct: |_, _| true,
    streams: &[],
    ..unified::FACTS
};
