//! A chunk from the front and one from the back for every shard: equal causal work for equal
//! shards.

use super::kind::{Dealt, KindFacts, ShardShape};
use crate::error::Result;
use crate::tokens::TokenRuns;

pub(super) const FACTS: KindFacts =
    KindFacts { deal, shape: ShardShape::TwoRuns, of_one_document: None, equal_causal_hops: true };

fn deal(sizes: &[u32], _: &Dealt) -> Result<Vec<TokenRuns>> {
    Ok(chunks(sizes))
}

/// For each shard ⌈n/2⌉ tokens dealt ascending from the front, then ⌊n/2⌋ dealt descending from the
/// back.
pub(super) fn chunks(sizes: &[u32]) -> Vec<TokenRuns> {
    let mut front = 0;
    let mut back: u32 = sizes.iter().sum();
    sizes
        .iter()
        .map(|n| {
            front += n.div_ceil(2);
            back -= n / 2;
            let mut tokens = TokenRuns::contiguous(front - n.div_ceil(2)..front);
            tokens.extend(&TokenRuns::contiguous(back..back + n / 2));
            tokens
        })
        .collect()
}
