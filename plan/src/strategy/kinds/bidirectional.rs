//! As unified, but whole shards travel both ways round the ring: forwards for one half of the
//! distance, backwards for the other half. This needs half as many hops.

use super::unified;
use crate::strategy::facts::{Extent, MeshRule, StrategyFacts};
use crate::strategy::streams::{Part, StreamShape};

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::Any, ring: Extent::AtLeastTwo },
    default_on: None,
    example_mesh: (1, 4),
    // Between two shards there is only one way.
    is_distinct: |_, mesh| mesh.ring() > 2,
    streams: &[
        StreamShape { part: Part::WHOLE, forwards: true, most_hops: |farthest, _| farthest.div_ceil(2) },
        StreamShape { part: Part::WHOLE, forwards: false, most_hops: |farthest, _| farthest / 2 },
    ],
    ..unified::FACTS
};
