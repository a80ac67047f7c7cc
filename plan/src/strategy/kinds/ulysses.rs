//! An all-to-all exchanges tokens for heads, and another one back (Jacobs et al. 2023, arXiv
//! 2309.14509): unified without a ring. The steps are in [`all_to_all`](super::all_to_all).

use super::unified;
use crate::strategy::facts::{Extent, MeshRule, StrategyFacts};

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::Any, ring: Extent::One },
    default_on: Some(MeshRule { ulysses: Extent::AtLeastTwo, ring: Extent::One }),
    example_mesh: (4, 1),
    is_distinct: |_, _| true,
    streams: &[],
    ..unified::FACTS
};
