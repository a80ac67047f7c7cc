//! Which ranks get the output rows.

use kyklos_rank::Rank;

/// The ranks that get the output rows of a query, o and lse.
///
/// ```
/// use kyklos_plan::{Rank, Results};
///
/// // Rank 0 gets all rows, in rank order of their queries; the other ranks get none.
/// let results = Results::One(Rank(0));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Results {
    /// The rank that owns the query.
    #[default]
    Owner,
    /// Every rank gets all rows, in rank order of their queries.
    All,
    /// This rank gets all rows, in rank order of their queries; the other ranks get none.
    One(#[serde(serialize_with = "rank_number")] Rank),
}

impl Results {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the serialiser passes a reference")]
    pub(super) fn is_owner(&self) -> bool {
        *self == Self::Owner
    }

    /// Whether `rank` gets the rows of other ranks' queries.
    pub(crate) fn gathered_on(self, rank: Rank) -> bool {
        match self {
            Self::Owner => false,
            Self::All => true,
            Self::One(one) => one == rank,
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the serialiser passes a reference")]
fn rank_number<S: serde::Serializer>(rank: &Rank, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u32(rank.0)
}
