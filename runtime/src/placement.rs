//! Which global tokens a rank holds, and in what order.

use std::fmt;
use std::str::FromStr;

use kyklos_transport::Rank;

use crate::{Error, Mesh, Result, Run, TokenRuns};

/// How tokens are dealt to the ring shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PlacementKind {
    /// Shard r holds the next n tokens.
    #[default]
    Contiguous,
    /// Shard r holds a chunk of ⌈n/2⌉ tokens dealt ascending from the front, and one of ⌊n/2⌋ dealt descending
    /// from the back: equal causal work for equal shards.
    Zigzag,
    /// One token at a time, round robin, full shards skipped.
    Striped,
}

/// How many tokens each rank holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Split {
    /// Sizes differ by at most one.
    #[default]
    Even,
    /// In proportion to these weights, rounded by largest remainder, ties to the lower rank.
    Weights(Vec<f64>),
    /// Exactly these.
    Tokens(Vec<u32>),
    /// So many that the pairs which the queries of a shard see are in proportion to these weights of its ranks: which that
    /// is, the mask says, so a placement by itself cannot be made of it.
    Work(Vec<f64>),
}

/// The tokens of every rank of a mesh. Every token has exactly one owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    kind: PlacementKind,
    mesh: Mesh,
    ranks: Vec<TokenRuns>,
}

impl Placement {
    /// Deals the tokens `0..total` to the ranks of `mesh`.
    ///
    /// # Errors
    /// [`Error::Request`] when the split does not fit the mesh or the tokens.
    pub fn new(kind: PlacementKind, mesh: Mesh, total: u32, split: &Split) -> Result<Self> {
        let counts = split.counts(mesh, total)?;
        let of_shard = |r: u32| &counts[(r * mesh.ulysses()) as usize..((r + 1) * mesh.ulysses()) as usize];
        let sizes: Vec<u32> = (0..mesh.ring()).map(|r| of_shard(r).iter().sum()).collect();
        let shards = match kind {
            PlacementKind::Contiguous => contiguous(&sizes),
            PlacementKind::Zigzag => zigzag(&sizes),
            PlacementKind::Striped => striped(&sizes),
        };
        let mut ranks = Vec::with_capacity(counts.len());
        for (r, shard) in (0..).zip(&shards) {
            let mut at = 0;
            for count in of_shard(r) {
                ranks.push(shard.slice(at..at + *count as usize));
                at += *count as usize;
            }
        }
        Ok(Self { kind, mesh, ranks })
    }

    /// One rank that holds these tokens, which need not be all.
    pub(crate) fn some(tokens: TokenRuns) -> Result<Self> {
        Ok(Self { kind: PlacementKind::Contiguous, mesh: Mesh::new(1, 1)?, ranks: vec![tokens] })
    }

    /// How the tokens were dealt.
    pub fn kind(&self) -> PlacementKind {
        self.kind
    }

    /// The mesh they were dealt to.
    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// The tokens that `rank` holds, in the order in which it holds them.
    pub fn of_rank(&self, rank: Rank) -> &TokenRuns {
        &self.ranks[rank.0 as usize]
    }

    /// The tokens of ring shard `r`: those of its ranks, one after the other.
    pub fn of_shard(&self, r: u32) -> TokenRuns {
        let mut tokens = TokenRuns::default();
        for u in 0..self.mesh.ulysses() {
            tokens.extend(self.of_rank(self.mesh.rank(r, u)));
        }
        tokens
    }

    /// The tokens of every rank.
    pub fn ranks(&self) -> &[TokenRuns] {
        &self.ranks
    }
}

impl Split {
    fn counts(&self, mesh: Mesh, total: u32) -> Result<Vec<u32>> {
        let world = mesh.world();
        let wrong_length = |what: &str, given: usize| {
            Error::request(
                format!("{given} {what} for {world} ranks"),
                format!("give one for each rank of the mesh {mesh}"),
            )
        };
        match self {
            Self::Even => {
                Ok((0..world).map(|rank| total / world + u32::from(rank < total % world)).collect())
            }
            Self::Weights(weights) if weights.len() != world as usize => {
                Err(wrong_length("weights", weights.len()))
            }
            Self::Weights(weights) => by_largest_remainder(weights, total),
            Self::Work(_) => Err(Error::request(
                "shares of work without a mask",
                "make plans with it (plan_world), or give token counts",
            )),
            Self::Tokens(tokens) if tokens.len() != world as usize => {
                Err(wrong_length("token counts", tokens.len()))
            }
            Self::Tokens(tokens) => {
                let sum: u64 = tokens.iter().map(|n| u64::from(*n)).sum();
                if sum == u64::from(total) {
                    return Ok(tokens.clone());
                }
                Err(Error::request(
                    format!("the token counts add up to {sum}, the sequence has {total}"),
                    "give counts that add up to the sequence length, or weights with --split",
                ))
            }
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "shares are between 0 and total, which is u32"
)]
fn by_largest_remainder(weights: &[f64], total: u32) -> Result<Vec<u32>> {
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

fn contiguous(sizes: &[u32]) -> Vec<TokenRuns> {
    let mut start = 0;
    sizes
        .iter()
        .map(|n| {
            start += n;
            TokenRuns::contiguous(start - n..start)
        })
        .collect()
}

fn zigzag(sizes: &[u32]) -> Vec<TokenRuns> {
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

fn striped(sizes: &[u32]) -> Vec<TokenRuns> {
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

impl PlacementKind {
    /// All of them, for tests and help texts.
    pub const ALL: [Self; 3] = [Self::Contiguous, Self::Zigzag, Self::Striped];

    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::Zigzag => "zigzag",
            Self::Striped => "striped",
        }
    }
}

impl fmt::Display for PlacementKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PlacementKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            Error::request(format!("placement `{text}` is not known"), "use contiguous, zigzag or striped")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(kind: PlacementKind, mesh: (u32, u32), total: u32, split: Split) -> Vec<Vec<u32>> {
        let placement = Placement::new(kind, Mesh::new(mesh.0, mesh.1).unwrap(), total, &split).unwrap();
        placement.ranks().iter().map(|tokens| tokens.iter().collect()).collect()
    }

    #[test]
    fn tokens_are_dealt_as_the_design_says() {
        use PlacementKind::*;
        assert_eq!(place(Contiguous, (1, 3), 7, Split::Even), [vec![0, 1, 2], vec![3, 4], vec![5, 6]]);
        assert_eq!(place(Zigzag, (1, 2), 7, Split::Even), [vec![0, 1, 5, 6], vec![2, 3, 4]]);
        assert_eq!(place(Zigzag, (3, 1), 5, Split::Even), [vec![0, 1], vec![2, 3], vec![4]]);
        // The pieces of a shard are consecutive in the shard's own order, also across its two chunks.
        assert_eq!(place(Zigzag, (2, 2), 8, Split::Even), [vec![0, 1], vec![6, 7], vec![2, 3], vec![4, 5]]);
        assert_eq!(place(Striped, (1, 3), 8, Split::Even), [vec![0, 3, 6], vec![1, 4, 7], vec![2, 5]]);
        let uneven = Split::Tokens(vec![4, 0, 2]);
        assert_eq!(place(Striped, (1, 3), 6, uneven), [vec![0, 2, 4, 5], vec![], vec![1, 3]]);
        let weights = Split::Weights(vec![1.0, 0.0, 1.0, 1.0]);
        assert_eq!(place(Contiguous, (1, 4), 4, weights), [vec![0, 1], vec![], vec![2], vec![3]]);
    }

    #[test]
    fn splits_that_do_not_fit_are_refused() {
        let mesh = Mesh::new(1, 2).unwrap();
        let bad = [
            Split::Tokens(vec![1, 2, 3]),
            Split::Tokens(vec![1, 2]),
            Split::Tokens(vec![u32::MAX, 9]),
            Split::Weights(vec![1.0]),
            Split::Weights(vec![0.0, 0.0]),
            Split::Weights(vec![-1.0, 2.0]),
            Split::Weights(vec![f64::NAN, 2.0]),
            Split::Weights(vec![f64::INFINITY, 2.0]),
        ];
        for split in bad {
            let error = Placement::new(PlacementKind::Contiguous, mesh, 8, &split).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{error}");
        }
    }
}
