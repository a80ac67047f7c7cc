//! The global tokens that each rank holds, and their order.

mod contiguous;
pub(crate) mod explicit;
mod kind;
mod per_document;
mod shares;
mod striped;
mod zigzag;

use std::ops::Range;

use kyklos_rank::Rank;

use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::remedy::Remedy;
use crate::tokens::TokenRuns;
use kind::Dealt;
pub use kind::PlacementKind;
pub(crate) use kind::ShardShape;
pub(crate) use shares::by_largest_remainder;

/// The tokens that a placement deals to the ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Deal {
    /// Number of tokens: `0..total`.
    pub total: u32,
    /// Tokens that every rank holds; they are not dealt.
    pub replicated: Range<u32>,
    /// Ascending tokens at which documents begin or end.
    pub documents: Vec<u32>,
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
    /// Token counts for which the visible (query, key) pairs of each shard are in proportion to the
    /// weights of its ranks. These counts depend on the mask, so [`Placement::new`] refuses
    /// this variant and [`plan_forward`](crate::plan_forward) accepts it.
    Work(Vec<f64>),
    /// One split for the queries and another one for the keys and values, of which replicated keys
    /// are not dealt. A placement is of one side, so [`Placement::new`] refuses this variant
    /// and [`plan_forward`](crate::plan_forward) accepts it.
    ///
    /// ```
    /// use kyklos_plan::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_forward};
    ///
    /// // Two new queries, both on rank 0, over a cache of 600 keys on three ranks.
    /// let problem = AttentionProblem::new([1, 600, 8, 2, 64], Dtype::F32, Mask::causal())?.with_queries(2, 598)?;
    /// let split = Split::Separate {
    ///     queries: Box::new(Split::Tokens(vec![2, 0, 0])),
    ///     keys: Box::new(Split::Tokens(vec![100, 250, 250])),
    /// };
    /// let set = plan_forward(&problem, Mesh::new(1, 3)?, PlacementKind::Contiguous, &split, Strategy::PassQ)?;
    /// assert_eq!(set.kv_placement.ranks()[1].to_string(), "100..350");
    /// # Ok::<(), kyklos_plan::Error>(())
    /// ```
    Separate {
        /// Of the queries.
        queries: Box<Self>,
        /// Of the keys and values. [`Split::Work`] is taken as weights: work is counted by query.
        keys: Box<Self>,
    },
}

/// The tokens of every rank of a mesh. Every token has exactly one owner, except replicated tokens,
/// which all ranks hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The dealer of the lists; none: the caller gave them.
    kind: Option<PlacementKind>,
    mesh: Mesh,
    /// Number of tokens: `0..total`.
    total: u32,
    /// Tokens that all ranks hold and none owns.
    replicated: TokenRuns,
    ranks: Vec<TokenRuns>,
    /// Rows behind the tokens of each rank's tensors that hold nothing; empty: none.
    spare: Vec<u32>,
}

impl Placement {
    /// Deals the tokens `0..total` to the ranks of `mesh`.
    ///
    /// # Errors
    /// [`Error::Request`] when the split does not fit the mesh or the tokens.
    pub fn new(kind: PlacementKind, mesh: Mesh, total: u32, split: &Split) -> Result<Self> {
        Self::deal(&Deal { total, ..Deal::default() }, kind, mesh, split)
    }

    /// Deals tokens, with replicated tokens and documents.
    ///
    /// # Errors
    /// As [`Self::new`]; exact token counts must add up to the number of dealt tokens.
    pub fn deal(deal: &Deal, kind: PlacementKind, mesh: Mesh, split: &Split) -> Result<Self> {
        let Deal { total, replicated, .. } = deal;
        let Deal { total: dealt, documents, .. } = deal.without_replicated();
        let counts = split.counts(mesh, dealt)?;
        let of_shard = |r: u32| &counts[(r * mesh.ulysses()) as usize..((r + 1) * mesh.ulysses()) as usize];
        let sizes: Vec<u32> = (0..mesh.ring()).map(|r| of_shard(r).iter().sum()).collect();
        let shards = (kind.facts().deal)(&sizes, &Dealt { total: dealt, documents })?;
        let mut ranks = Vec::with_capacity(counts.len());
        for (r, shard) in (0..).zip(&shards) {
            let mut at = 0;
            for count in of_shard(r) {
                ranks.push(shard.slice(at..at + *count as usize).around(replicated));
                at += *count as usize;
            }
        }
        let replicated = TokenRuns::contiguous(replicated.clone());
        Ok(Self { kind: Some(kind), mesh, total: *total, replicated, ranks, spare: Vec::new() })
    }

    /// One rank that holds these tokens of `0..total`, possibly not all of them.
    pub(crate) fn some(total: u32, tokens: TokenRuns) -> Result<Self> {
        Ok(Self {
            kind: Some(PlacementKind::Contiguous),
            mesh: Mesh::new(1, 1)?,
            total,
            replicated: TokenRuns::default(),
            ranks: vec![tokens],
            spare: Vec::new(),
        })
    }

    /// This placement with other tokens in front of each rank's list. They must be tokens that no
    /// rank owns.
    pub(crate) fn with_more(self, total: u32, more: Vec<TokenRuns>) -> Self {
        let joined = |(mut front, own): (TokenRuns, &TokenRuns)| {
            front.extend(own);
            front
        };
        let ranks = more.into_iter().zip(&self.ranks).map(joined).collect();
        Self { total, replicated: TokenRuns::default(), ranks, ..self }
    }

    /// The kind by which the tokens were dealt; none for the lists of [`Self::explicit`].
    pub fn kind(&self) -> Option<PlacementKind> {
        self.kind
    }

    /// For reports: the name of the kind, or `explicit`.
    pub fn name(&self) -> &'static str {
        self.kind.map_or("explicit", PlacementKind::name)
    }

    /// The mesh whose ranks hold the tokens.
    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// Number of tokens, replicated ones included.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// The tokens that every rank holds. In each rank's list they come before its own tokens.
    pub fn replicated(&self) -> &TokenRuns {
        &self.replicated
    }

    /// All tokens of `rank` at the start: replicated tokens, then its own.
    pub fn held_by(&self, rank: Rank) -> TokenRuns {
        let mut tokens = self.replicated.clone();
        tokens.extend(self.of_rank(rank));
        tokens
    }

    /// Rows of each batch entry, behind the tokens of `rank`, that hold nothing.
    pub fn spare(&self, rank: Rank) -> u32 {
        self.spare.get(rank.0 as usize).copied().unwrap_or(0)
    }

    /// The tokens that `rank` owns, in the order in which it holds them.
    pub fn of_rank(&self, rank: Rank) -> &TokenRuns {
        &self.ranks[rank.0 as usize]
    }

    /// The tokens of ring shard `r`: the tokens of its ranks, one after the other.
    pub fn of_shard(&self, r: u32) -> TokenRuns {
        let mut tokens = TokenRuns::default();
        for u in 0..self.mesh.ulysses() {
            tokens.extend(self.of_rank(self.mesh.rank(r, u)));
        }
        tokens
    }

    /// The tokens that each rank owns, in rank order.
    pub fn ranks(&self) -> &[TokenRuns] {
        &self.ranks
    }
}

impl Deal {
    /// The tokens that are dealt, numbered without a gap, with their documents.
    pub(crate) fn without_replicated(&self) -> Self {
        let Self { total, replicated, documents } = self;
        let missing = |token: u32| token.clamp(replicated.start, replicated.end) - replicated.start;
        let inside = documents.iter().filter(|token| **token < *total).map(|token| token - missing(*token));
        Self { total: total - missing(*total), replicated: 0..0, documents: inside.collect() }
    }

    /// The replicated tokens, numbered from 0, with their documents.
    pub(crate) fn only_replicated(&self) -> Self {
        let Range { start, end } = self.replicated;
        let inside = self.documents.iter().map(|token| *token.clamp(&start, &end) - start);
        Self { total: end - start, replicated: 0..0, documents: inside.collect() }
    }
}

impl Split {
    /// Tokens of each rank of `mesh`, which add up to `total`.
    pub(crate) fn counts(&self, mesh: Mesh, total: u32) -> Result<Vec<u32>> {
        let size = mesh.size();
        let wrong_length = |what: &str, given: usize| {
            Error::request(
                format!("{given} {what} for {size} ranks"),
                format!("give one for each rank of the mesh {mesh}"),
            )
        };
        match self {
            Self::Even => Ok((0..size).map(|rank| total / size + u32::from(rank < total % size)).collect()),
            Self::Weights(weights) if weights.len() != size as usize => {
                Err(wrong_length("weights", weights.len()))
            }
            Self::Weights(weights) => by_largest_remainder(weights, total),
            Self::Work(_) => Err(Error::request(
                "a split by work without a mask",
                "make plans with it (plan_forward), or give token counts",
            )),
            Self::Separate { .. } => Err(Error::request(
                "a split of queries and keys for the tokens of one side",
                "make plans with it (plan_forward), or give the split of this side",
            )),
            Self::Tokens(tokens) if tokens.len() != size as usize => {
                Err(wrong_length("token counts", tokens.len()))
            }
            Self::Tokens(tokens) => {
                let sum: u64 = tokens.iter().map(|n| u64::from(*n)).sum();
                if sum == u64::from(total) {
                    return Ok(tokens.clone());
                }
                Err(Error::request(
                    format!("the token counts add up to {sum}, the sequence has {total}"),
                    Remedy::CompleteTokensOrUseWeights,
                ))
            }
        }
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
    fn what_every_rank_holds_is_not_dealt() {
        let held = |replicated, kind, split| {
            let mesh = Mesh::new(1, 2).unwrap();
            let placement =
                Placement::deal(&Deal { total: 9, replicated, documents: vec![] }, kind, mesh, &split)
                    .unwrap();
            [0, 1].map(|rank| placement.held_by(Rank(rank)).iter().collect::<Vec<u32>>())
        };
        use PlacementKind::*;
        assert_eq!(held(0..3, Contiguous, Split::Even), [vec![0, 1, 2, 3, 4, 5], vec![0, 1, 2, 6, 7, 8]]);
        // A shard may hold tokens on both sides of the replicated ones.
        let tokens = Split::Tokens(vec![5, 1]);
        assert_eq!(held(3..6, Contiguous, tokens), [vec![3, 4, 5, 0, 1, 2, 6, 7], vec![3, 4, 5, 8]]);
        assert_eq!(held(4..7, Striped, Split::Even), [vec![4, 5, 6, 0, 2, 7], vec![4, 5, 6, 1, 3, 8]]);
        assert_eq!(held(0..9, Zigzag, Split::Even), [(0..9).collect::<Vec<_>>(), (0..9).collect()]);
        let too_many = Split::Tokens(vec![5, 4]);
        let mesh = Mesh::new(1, 2).unwrap();
        let deal = Deal { total: 9, replicated: 0..3, documents: vec![] };
        assert!(Placement::deal(&deal, Contiguous, mesh, &too_many).is_err());
    }

    #[test]
    fn documents_are_dealt_one_by_one() {
        let dealt = |documents: &[u32], replicated, split| {
            let deal = Deal { total: 16, replicated, documents: documents.to_vec() };
            let placement =
                Placement::deal(&deal, PlacementKind::PerDocument, Mesh::new(1, 2).unwrap(), &split).unwrap();
            [0, 1].map(|rank| placement.of_rank(Rank(rank)).iter().collect::<Vec<u32>>())
        };
        let whole = dealt(&[], 0..0, Split::Even);
        assert_eq!(whole, [vec![0, 1, 2, 3, 12, 13, 14, 15], (4..12).collect()]);
        assert_eq!(dealt(&[0, 16], 0..0, Split::Even), whole);
        let two = dealt(&[0, 4, 4, 16], 0..0, Split::Even);
        assert_eq!(two, [vec![0, 3, 4, 5, 6, 13, 14, 15], vec![1, 2, 7, 8, 9, 10, 11, 12]]);
        let uneven = dealt(&[0, 4, 16], 0..0, Split::Tokens(vec![12, 4]));
        assert_eq!(uneven[1], [2, 9, 10, 11]);
        // Documents that begin or end inside the replicated tokens.
        let around = dealt(&[0, 4, 8, 16], 2..6, Split::Even);
        assert_eq!(around, [vec![0, 6, 8, 9, 14, 15], vec![1, 7, 10, 11, 12, 13]]);
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
            assert!(error.is_request(), "{error}");
        }
    }
}
