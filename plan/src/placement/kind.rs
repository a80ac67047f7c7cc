//! The closed list of placement kinds, and the facts that other modules need.

use crate::error::Result;
use crate::named::{facts_of_each, named_enum};
use crate::problem::AttentionProblem;
use crate::tokens::TokenRuns;

macro_rules! define_placement_kind {
    ($($list:tt)*) => {
        named_enum! {
            /// How tokens are dealt to the ring shards.
            PlacementKind, "placement": $($list)*
        }
        facts_of_each! { PlacementKind, KindFacts, super: $($list)* }
    };
}

// To add a placement kind, add a line here: variant, name, module beside this one, what it does.
define_placement_kind! {
    Contiguous, "contiguous", contiguous, "Shard r holds the next n tokens.";
    Zigzag, "zigzag", zigzag, "Shard r holds a chunk of ⌈n/2⌉ tokens dealt ascending from the front, and one of ⌊n/2⌋ dealt descending from the back: equal causal work for equal shards.";
    Striped, "striped", striped, "Tokens are dealt one at a time, round robin, full shards skipped.";
    PerDocument, "per-document", per_document, "Every document of the mask is dealt zigzag by itself, so that each shard has its share of each: equal work for equal shards however long the documents are. A sequence without documents is one.";
}

#[expect(clippy::derivable_impls, reason = "the list cannot mark a variant as the default")]
impl Default for PlacementKind {
    fn default() -> Self {
        Self::Contiguous
    }
}

impl PlacementKind {
    /// Zigzag where later queries have clearly more work than earlier ones, as under a causal mask;
    /// else contiguous, which keeps neighbouring tokens on one rank.
    pub fn for_problem(problem: &AttentionProblem) -> Self {
        let work = |half: u64| -> u64 {
            (0..SAMPLES)
                .map(|i| (2 * i + 1 + half * 2 * SAMPLES) * u64::from(problem.q_len) / (4 * SAMPLES))
                .filter_map(|token| u32::try_from(token).ok())
                .filter(|token| *token < problem.q_len)
                .flat_map(|token| (0..problem.mask.batch_classes()).map(move |class| (class, token)))
                .map(|(class, token)| {
                    problem.mask.visible(class, problem.q_position(token), problem.kv_len).keys()
                })
                .sum()
        };
        let (front, back) = (work(0), work(1));
        if back * 4 > front * 5 { Self::Zigzag } else { Self::Contiguous }
    }
}

/// All facts of a placement kind that other modules need. Each kind has one constant of this type,
/// `FACTS`, in its own file.
pub(crate) struct KindFacts {
    /// Deals tokens to shards of these sizes: the list of each shard, in order.
    pub(super) deal: fn(&[u32], &Dealt) -> Result<Vec<TokenRuns>>,
    /// The runs of neighbouring tokens in a shard.
    pub(crate) shape: ShardShape,
    /// Another kind that deals a sequence of one document in the same way, if there is one.
    pub(crate) of_one_document: Option<PlacementKind>,
    /// Whether, under a causal mask, every shard sees keys of every other shard, so that all hops
    /// of a ring cost the same.
    pub(crate) equal_causal_hops: bool,
}

/// The tokens that are dealt.
#[derive(Debug)]
pub(crate) struct Dealt {
    pub(super) total: u32,
    /// Ascending tokens at which documents begin or end.
    pub(super) documents: Vec<u32>,
}

/// The runs of neighbouring tokens in a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShardShape {
    /// One. The first few shards together hold the tokens from the front on.
    OneRun,
    /// Two, of ⌈n/2⌉ and ⌊n/2⌋ tokens. The first few shards together hold the tokens from both ends
    /// on.
    TwoRuns,
    /// Any number.
    ManyRuns,
}

/// Queries of each half of the sequence whose work is counted.
const SAMPLES: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::mask::Mask;

    fn placement_of(mask: &str) -> PlacementKind {
        let problem = AttentionProblem::new([1, 4096, 8, 2, 64], Dtype::F32, mask.parse().unwrap()).unwrap();
        PlacementKind::for_problem(&problem)
    }

    #[test]
    fn zigzag_is_for_masks_whose_work_grows_along_the_sequence() {
        assert_eq!(placement_of("causal"), PlacementKind::Zigzag);
        assert_eq!(placement_of("causal+window:3000,-1"), PlacementKind::Zigzag);
        assert_eq!(placement_of("full"), PlacementKind::Contiguous);
        assert_eq!(placement_of("window:64,0"), PlacementKind::Contiguous);
        assert_eq!(placement_of("window:0,-1"), PlacementKind::Contiguous);
        // The work of all batch entries together decides.
        let of_two = |mask: &str| {
            let problem = AttentionProblem::new([2, 4096, 8, 2, 64], Dtype::F32, mask.parse().unwrap());
            PlacementKind::for_problem(&problem.unwrap())
        };
        assert_eq!(of_two("valid:0//causal"), PlacementKind::Zigzag);
        assert_eq!(of_two("causal//window:0,-1"), PlacementKind::Contiguous);
        let empty = AttentionProblem::new([1, 0, 1, 1, 8], Dtype::F32, Mask::causal()).unwrap();
        assert_eq!(PlacementKind::for_problem(&empty), PlacementKind::Contiguous);
    }
}
