//! As unified, but every shard travels in four parts: each is sent on and attended as soon as it
//! has arrived, while the others travel. So a rank does not wait for whole blocks: links are busy
//! without a break, also where their latency is long, and of the last block only a quarter is
//! attended after all messages have arrived. Four times as many messages and attention steps are
//! the price.

use super::unified;
use crate::strategy::facts::{EqualHops, Extent, MeshRule, StrategyFacts};
use crate::strategy::streams::{Part, StreamShape};

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::Any, ring: Extent::AtLeastTwo },
    default_on: None,
    example_mesh: (1, 4),
    is_distinct: |_, _| true,
    streams: &[quarter(0), quarter(1), quarter(2), quarter(3)],
    equal_hops: EqualHops::Full,
    ..unified::FACTS
};

const fn quarter(number: usize) -> StreamShape {
    StreamShape { part: Part::new(number, 4), forwards: true, most_hops: |farthest, _| farthest }
}
