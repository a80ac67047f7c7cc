//! As unified, but the front halves of all shards travel forwards and the back halves backwards:
//! half of the bytes in each direction. Over a zigzag placement a causal mask hides every back half
//! from all higher shards, and 75 % of a ring's bytes are sent.

use super::unified;
use crate::strategy::facts::{EqualHops, Extent, MeshRule, StrategyFacts};
use crate::strategy::streams::{Part, StreamShape};

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::Any, ring: Extent::AtLeastTwo },
    default_on: None,
    example_mesh: (1, 4),
    is_distinct: |_, _| true,
    streams: &[
        StreamShape { part: Part::FRONT, forwards: true, most_hops: |farthest, _| farthest },
        StreamShape { part: Part::BACK, forwards: false, most_hops: |farthest, _| farthest },
    ],
    equal_hops: EqualHops::Full,
    ..unified::FACTS
};
