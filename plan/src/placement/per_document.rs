//! Every document is zigzag by itself: equal shards get equal work, for documents of any length.

use super::kind::{Dealt, KindFacts, ShardShape};
use super::shares::by_largest_remainder;
use super::zigzag::chunks;
use crate::error::Result;
use crate::placement::PlacementKind;
use crate::tokens::TokenRuns;

pub(super) const FACTS: KindFacts = KindFacts {
    deal,
    shape: ShardShape::ManyRuns,
    of_one_document: Some(PlacementKind::Zigzag),
    equal_causal_hops: true,
};

/// Deals each document zigzag, in proportion to the number of tokens that each shard still needs.
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
                // Positions count from the document's start.
                shard.extend(&tokens.around(&(0..start)));
                *left -= count;
            }
            start = end;
        }
    }
    Ok(shards)
}
