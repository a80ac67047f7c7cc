//! The index of a rank in its group, and the most ranks that a group has. Plans and transports,
//! which know nothing of each other, share these.

use std::fmt;

/// Most ranks of a group. Nothing that makes, plans or describes a group has a limit of its own
/// above this one.
pub const MAX_RANKS: u32 = 2048;

/// Index of a rank in its group, from 0.
///
/// ```
/// use kyklos_rank::Rank;
///
/// assert_eq!(Rank::COORDINATOR, Rank(0));
/// assert_eq!(Rank(3).to_string(), "3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank that counts votes and whose decision on an abort is final.
    pub const COORDINATOR: Self = Self(0);
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
