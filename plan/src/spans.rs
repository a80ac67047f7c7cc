//! Intervals of key positions: the form of every mask for one query row.

use std::ops::Deref;

/// The key positions `lo..hi` that one query row sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RowSpan {
    /// First visible position.
    pub lo: u32,
    /// One past the last visible position.
    pub hi: u32,
}

impl RowSpan {
    /// No key.
    pub const EMPTY: Self = Self { lo: 0, hi: 0 };

    /// Whether the key at `position` is visible.
    pub fn sees(self, position: u32) -> bool {
        self.lo <= position && position < self.hi
    }
}

/// The key positions that a row sees: runs that are not empty, ascending, with hidden keys between
/// them.
#[derive(Clone, Debug)]
pub enum Spans {
    /// At most one run; [`RowSpan::EMPTY`] stands for no run.
    One([RowSpan; 1]),
    /// Any number of them.
    Many(Vec<RowSpan>),
}

impl Spans {
    /// The run `span`, if it is not empty.
    pub(crate) const fn one(span: RowSpan) -> Self {
        Self::One([span])
    }

    /// The keys that are in these runs and in one of `others`, which ascend and do not overlap.
    pub(crate) fn intersect(&self, others: &[RowSpan]) -> Self {
        let both = self.iter().flat_map(|a| {
            others.iter().map(|b| RowSpan { lo: a.lo.max(b.lo), hi: a.hi.min(b.hi) }).filter(|c| c.lo < c.hi)
        });
        Self::Many(both.collect())
    }

    /// How many keys are visible.
    pub fn keys(&self) -> u64 {
        self.iter().map(|span| u64::from(span.hi - span.lo)).sum()
    }

    /// Whether the key at `position` is visible.
    pub fn sees(&self, position: u32) -> bool {
        self.iter().any(|span| span.sees(position))
    }
}

impl Deref for Spans {
    type Target = [RowSpan];

    fn deref(&self) -> &[RowSpan] {
        match self {
            Self::One([RowSpan::EMPTY]) => &[],
            Self::One(span) => span,
            Self::Many(spans) => spans,
        }
    }
}

impl PartialEq for Spans {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Spans {}
