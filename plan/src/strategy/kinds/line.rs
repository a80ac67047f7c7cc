//! As unified, with whole shards sent to the last shard forwards and to the first one backwards: no
//! link closes the ring.

use super::unified;
use crate::strategy::facts::{EqualHops, Extent, MeshRule, StrategyFacts};
use crate::strategy::streams::{Part, StreamShape};

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::Any, ring: Extent::AtLeastTwo },
    default_on: None,
    example_mesh: (1, 4),
    // Between two shards there is only one way.
    is_distinct: |_, mesh| mesh.ring() > 2,
    streams: &[
        StreamShape { part: Part::WHOLE, forwards: true, most_hops: |farthest, owner| farthest - owner },
        StreamShape { part: Part::WHOLE, forwards: false, most_hops: |_, owner| owner },
    ],
    equal_hops: EqualHops::Never,
    ..unified::FACTS
};
