//! Ulysses inside a shard, a ring over the shards (Fang & Zhao 2024, arXiv 2405.07719). Runs on any
//! mesh.
//!
//! The facts of the other strategies of a U×R mesh name their differences from it.

use crate::strategy::facts::{EqualHops, Extent, MeshRule, Moves, StrategyFacts};
use crate::strategy::streams::{Part, StreamShape};
use crate::strategy::{backward, streams};

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::Any, ring: Extent::Any },
    default_on: Some(MeshRule { ulysses: Extent::AtLeastTwo, ring: Extent::AtLeastTwo }),
    example_mesh: (2, 2),
    // On other meshes it is dense, ring or ulysses.
    is_distinct: |_, mesh| mesh.ulysses() > 1 && mesh.ring() > 1,
    moves: Moves::Keys,
    same_queries: false,
    streams: &[StreamShape { part: Part::WHOLE, forwards: true, most_hops: |farthest, _| farthest }],
    chunks_heads: false,
    attend_round: streams::attend_round,
    backward_round: Some(backward::streams_round),
    round_bytes: streams::round_bytes,
    posts_all_at_once: false,
    equal_hops: EqualHops::FullAndCausal,
};
