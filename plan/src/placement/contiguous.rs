//! Every shard holds the tokens that follow the tokens of the shard before it.

use super::kind::{Dealt, KindFacts, ShardShape};
use crate::error::Result;
use crate::tokens::TokenRuns;

pub(super) const FACTS: KindFacts =
    KindFacts { deal, shape: ShardShape::OneRun, of_one_document: None, equal_causal_hops: false };

fn deal(sizes: &[u32], _: &Dealt) -> Result<Vec<TokenRuns>> {
    let mut start = 0;
    let next = |n: &u32| {
        start += n;
        TokenRuns::contiguous(start - n..start)
    };
    Ok(sizes.iter().map(next).collect())
}
