//! One token at a time to every shard in turn: equal work under any mask that changes slowly.

use super::kind::{Dealt, KindFacts, ShardShape};
use crate::error::Result;
use crate::tokens::{Run, TokenRuns};

pub(super) const FACTS: KindFacts =
    KindFacts { deal, shape: ShardShape::ManyRuns, of_one_document: None, equal_causal_hops: true };

fn deal(sizes: &[u32], _: &Dealt) -> Result<Vec<TokenRuns>> {
    // A phase ends when a shard is full. In a phase, each of the `open` shards that are not full takes
    // each `open`-th token: one run for each phase.
    let mut shards = vec![TokenRuns::default(); sizes.len()];
    let mut levels: Vec<u32> = sizes.to_vec();
    levels.sort_unstable();
    levels.dedup();
    let (mut next, mut done) = (0, 0);
    for level in levels {
        let open: Vec<usize> = (0..sizes.len()).filter(|r| sizes[*r] > done).collect();
        let stride = u32::try_from(open.len()).expect("no more shards than ranks");
        for (start, r) in (next..).zip(&open) {
            shards[*r].push(Run { start, count: level - done, stride });
        }
        next += stride * (level - done);
        done = level;
    }
    Ok(shards)
}
