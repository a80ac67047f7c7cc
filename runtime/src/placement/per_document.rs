//! Every document zigzag by itself: equal work for equal shards however long the documents are.

use super::kind::{Dealt, KindFacts, ShardShape};
use super::shares::by_largest_remainder;
use super::zigzag::chunks;
use crate::{PlacementKind, Result, TokenRuns};

pub(super) const FACTS: KindFacts = KindFacts {
    deal,
    shape: ShardShape::ManyRuns,
    of_one_document: Some(PlacementKind::Zigzag),
    equal_causal_hops: true,
};

/// Each document zigzag, in proportion to the tokens that the shards still lack.
fn deal(sizes: &[u32], dealt: &Dealt) -> Result<Vec<TokenRuns>> {
    let mut shards = vec![TokenRuns::default(); sizes.len()];
    let mut left = sizes.to_vec();
    let mut start = 0;
    for end in dealt.documents.iter().copied().chain([dealt.total]) {
        if end > start {
            let weights: Vec<f64> = left.iter().map(|n| f64::from(*n)).collect();
            let counts = by_largest_remainder(&weights, end - start)?;
            for ((shard, left), (tokens, count)) in
                shards.iter_mut().zip(&mut left).zip(chunks(&counts).iter().zip(&counts))
            {
                // Counted from the document's start.
                shard.extend(&tokens.around(&(0..start)));
                *left -= count;
            }
            start = end;
        }
    }
    Ok(shards)
}
