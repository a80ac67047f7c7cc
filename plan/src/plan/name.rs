//! Names of buffers.

use std::borrow::Cow;
use std::fmt;

use kyklos_rank::Rank;

/// The name of a buffer, for people. Plans of a thousand ranks have millions of buffers, so a name
/// that differs from others in one number only becomes text when it is read.
///
/// ```
/// use kyklos_plan::Rank;
/// use kyklos_plan::plan::BufferName;
///
/// assert_eq!(BufferName::from("q").to_string(), "q");
/// assert_eq!(BufferName::from_rank("kv", Rank(3)).to_string(), "kv from rank 3");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferName(Parts);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Parts {
    Whole(Cow<'static, str>),
    Peer { what: &'static str, relation: Relation, peer: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    ForRank,
    FromRank,
    OfRank,
    FromShard,
    OfShard,
}

impl BufferName {
    /// Of what is sent to `rank`.
    pub fn for_rank(what: &'static str, rank: Rank) -> Self {
        Self(Parts::Peer { what, relation: Relation::ForRank, peer: rank.0 })
    }

    /// Of what is received from `rank`.
    pub fn from_rank(what: &'static str, rank: Rank) -> Self {
        Self(Parts::Peer { what, relation: Relation::FromRank, peer: rank.0 })
    }

    /// Of rows that `rank` owns.
    pub fn of_rank(what: &'static str, rank: Rank) -> Self {
        Self(Parts::Peer { what, relation: Relation::OfRank, peer: rank.0 })
    }

    /// Of what is received from the shard with this number.
    pub fn from_shard(what: &'static str, shard: u32) -> Self {
        Self(Parts::Peer { what, relation: Relation::FromShard, peer: shard })
    }

    /// Of tokens of the shard with this number.
    pub fn of_shard(what: &'static str, shard: u32) -> Self {
        Self(Parts::Peer { what, relation: Relation::OfShard, peer: shard })
    }
}

impl From<&'static str> for BufferName {
    fn from(text: &'static str) -> Self {
        Self(Parts::Whole(Cow::Borrowed(text)))
    }
}

impl From<String> for BufferName {
    fn from(text: String) -> Self {
        Self(Parts::Whole(Cow::Owned(text)))
    }
}

impl fmt::Display for BufferName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Parts::Whole(text) => f.write_str(text),
            Parts::Peer { what, relation, peer } => {
                let relation = match relation {
                    Relation::ForRank => "for rank",
                    Relation::FromRank => "from rank",
                    Relation::OfRank => "of rank",
                    Relation::FromShard => "from shard",
                    Relation::OfShard => "of shard",
                };
                write!(f, "{what} {relation} {peer}")
            }
        }
    }
}

impl serde::Serialize for BufferName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
