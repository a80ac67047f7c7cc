//! A number of tokens, shared by weights.

use crate::error::{Error, Result};

/// Counts that add up to `total`, in proportion to `weights`, rounded by largest remainder, ties to
/// the lower index.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "shares are between 0 and total, which is u32"
)]
pub(crate) fn by_largest_remainder(weights: &[f64], total: u32) -> Result<Vec<u32>> {
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
    // Rounding in the division may make the sum too small, or too large by one.
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
