//! Keys and values travel round the ring, queries stay (Liu et al. 2023, arXiv 2310.01889): unified
//! without Ulysses.

use super::unified;
use crate::strategy::facts::{Extent, MeshRule, StrategyFacts};

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::One, ring: Extent::Any },
    default_on: Some(MeshRule { ulysses: Extent::One, ring: Extent::AtLeastTwo }),
    example_mesh: (1, 4),
    is_distinct: |_, _| true,
    ..unified::FACTS
};
