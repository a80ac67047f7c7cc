//! Ways to deal tokens to shards of given sizes, and to share a number by weights.

use crate::{Error, Result, Run, TokenRuns};

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "shares are between 0 and total, which is u32"
)]
pub(super) fn by_largest_remainder(weights: &[f64], total: u32) -> Result<Vec<u32>> {
    let sum: f64 = weights.iter().sum();
    if !(sum.is_finite() && sum > 0.0 && weights.iter().all(|w| *w >= 0.0)) {
        return Err(Error::request(
            format!("the weights {weights:?} cannot share tokens"),
            "give finite weights of at least 0, one of them above 0",
        ));
    }
    let shares: Vec<f64> = weights.iter().map(|w| w / sum * f64::from(total)).collect();
    let mut counts: Vec<u32> = shares.iter().map(|share| share.floor() as u32).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    // Stable: equal remainders stay in rank order.
    order.sort_by(|a, b| shares[*b].fract().total_cmp(&shares[*a].fract()));
    let mut left = i64::from(total) - counts.iter().map(|n| i64::from(*n)).sum::<i64>();
    // Rounding in the division may leave one too many as well as some too few.
    for rank in order.iter().copied().filter(|rank| weights[*rank] > 0.0).cycle() {
        match left {
            0 => break,
            1.. => (counts[rank], left) = (counts[rank] + 1, left - 1),
            _ if counts[rank] > 0 => (counts[rank], left) = (counts[rank] - 1, left + 1),
            _ => {}
        }
    }
    Ok(counts)
}

pub(super) fn contiguous(sizes: &[u32]) -> Vec<TokenRuns> {
    let mut start = 0;
    sizes
        .iter()
        .map(|n| {
            start += n;
            TokenRuns::contiguous(start - n..start)
        })
        .collect()
}

pub(super) fn zigzag(sizes: &[u32]) -> Vec<TokenRuns> {
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

/// Each of the documents between `boundaries` zigzag, in shares of what the shards have still to get.
pub(super) fn per_document(
    sizes: &[u32],
    boundaries: impl Iterator<Item = u32>,
    total: u32,
) -> Result<Vec<TokenRuns>> {
    let mut shards = vec![TokenRuns::default(); sizes.len()];
    let mut left = sizes.to_vec();
    let mut start = 0;
    for end in boundaries.chain([total]) {
        if end > start {
            let weights: Vec<f64> = left.iter().map(|n| f64::from(*n)).collect();
            let counts = by_largest_remainder(&weights, end - start)?;
            for ((shard, left), (tokens, count)) in
                shards.iter_mut().zip(&mut left).zip(zigzag(&counts).iter().zip(&counts))
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

pub(super) fn striped(sizes: &[u32]) -> Vec<TokenRuns> {
    // Between two shards becoming full, every shard that is not takes each `open`-th token: one run for each phase.
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
    shards
}
