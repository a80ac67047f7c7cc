//! The closed list of placement kinds, and the facts that other modules need.

use crate::named::{facts_of_each, named_enum};
use crate::{Result, TokenRuns};

macro_rules! define_placement_kind {
    ($($list:tt)*) => {
        named_enum! {
            /// How tokens are dealt to the ring shards.
            PlacementKind, "placement": $($list)*
        }
        facts_of_each! { PlacementKind, KindFacts: $($list)* }
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

/// All facts of a placement kind that other modules need. Each kind has one constant of this type, `FACTS`, in its own
/// file.
pub(crate) struct KindFacts {
    /// Deals tokens to shards of these sizes: the list of each shard, in order.
    pub(super) deal: fn(&[u32], &Dealt) -> Result<Vec<TokenRuns>>,
    /// The runs of neighbouring tokens in a shard.
    pub(crate) shape: ShardShape,
    /// Another kind that deals a sequence of one document in the same way, if there is one.
    pub(crate) of_one_document: Option<PlacementKind>,
    /// Whether, under a causal mask, every shard sees keys of every other shard, so that all hops of a ring cost the
    /// same.
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
    /// Two, of ⌈n/2⌉ and ⌊n/2⌋ tokens. The first few shards together hold the tokens from both ends on.
    TwoRuns,
    /// Any number.
    ManyRuns,
}
