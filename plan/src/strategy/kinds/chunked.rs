//! As unified, but the heads of a rank form up to four chunks: the next chunk crosses the
//! all-to-all while the current one is attended.

use super::unified;
use crate::strategy::facts::{Extent, MeshRule, StrategyFacts};

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::AtLeastTwo, ring: Extent::Any },
    default_on: None,
    is_distinct: |_, _| true,
    chunks_heads: true,
    ..unified::FACTS
};
