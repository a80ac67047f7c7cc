//! Unions of slices: a query may see several intervals of keys.

use std::fmt;
use std::ops::Range;

use super::kind::{MaskKind, Term};
use crate::error::{Error, Result};
use crate::spans::{RowSpan, Spans};

/// An intersection of unions of slices: a visible key is in every union.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub(super) struct SliceUnions {
    /// The slices of each union, ascending.
    unions: Vec<Vec<MaskSlice>>,
}

impl SliceUnions {
    pub(super) fn of(mut slices: Vec<MaskSlice>) -> Self {
        slices.sort_unstable();
        slices.dedup();
        Self { unions: vec![slices] }
    }
}

impl MaskKind for SliceUnions {
    const NOTATION: &'static [&'static str] = &["slices:Q..QxK..K[/causal|inverse|both],…"];

    fn parse(term: &Term<'_>) -> Result<Option<Self>> {
        match (term.name, term.arguments) {
            ("slices", Some(slices)) => {
                Ok(Some(Self::of(slices.split(',').map(str::parse).collect::<Result<_>>()?)))
            }
            _ => Ok(None),
        }
    }

    fn terms(&self) -> Vec<String> {
        let union = |slices: &Vec<MaskSlice>| {
            let slices: Vec<String> = slices.iter().map(MaskSlice::to_string).collect();
            format!("slices:{}", slices.join(","))
        };
        self.unions.iter().map(union).collect()
    }

    fn and(mut self, other: Self) -> Result<Self> {
        self.unions.extend(other.unions);
        self.unions.sort_unstable();
        self.unions.dedup();
        Ok(self)
    }

    fn fits(&self, _batch: u32, kv_len: u32) -> Result<()> {
        match self.unions.iter().flatten().find(|slice| slice.k_end > kv_len) {
            Some(slice) => Err(Error::request(
                format!("the slice {slice} reaches key {}, the problem has {kv_len}", slice.k_end),
                format!("let key ranges end at {kv_len} or before"),
            )),
            None => Ok(()),
        }
    }

    fn within(&self, q: u32, spans: Spans) -> Spans {
        self.unions.iter().fold(spans, |spans, slices| spans.intersect(&shown(slices, q)))
    }

    fn hull(&self, first: u32, last: u32, kv_len: u32) -> (u32, u32) {
        let hulls = self.unions.iter().map(|slices| hull(slices, first, last));
        hulls.fold((0, kv_len), |(lo, hi), hull| (lo.max(hull.lo), hi.min(hull.hi)))
    }

    fn is_one_interval(&self) -> bool {
        self.unions.is_empty()
    }
}

/// A rectangle of queries × keys by global position, and which part of it is visible.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct MaskSlice {
    /// First query position.
    pub q_begin: u32,
    /// One past the last query position.
    pub q_end: u32,
    /// First key position.
    pub k_begin: u32,
    /// One past the last key position.
    pub k_end: u32,
    /// The visible part of the rectangle.
    pub part: SlicePart,
}

/// The visible part of a slice's rectangle; `q` and `k` are global positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SlicePart {
    /// All of it.
    Full,
    /// `k_end − k >= q_end − q`: causal; the last query sees the last key.
    Causal,
    /// `k − k_begin >= q − q_begin`: from the diagonal on which the first query sees the first key,
    /// to the right.
    Inverse,
    /// Both: the band between the two diagonals.
    Both,
}

impl MaskSlice {
    /// The part `part` of the queries `q` against the keys `k`.
    ///
    /// # Errors
    /// [`Error::Request`] where a range ends before it begins.
    pub fn new(q: Range<u32>, k: Range<u32>, part: SlicePart) -> Result<Self> {
        if q.start > q.end || k.start > k.end {
            return Err(Error::request(
                format!("the slice {}..{}x{}..{} ends before it begins", q.start, q.end, k.start, k.end),
                "give ranges from their first position to one past their last",
            ));
        }
        Ok(Self { q_begin: q.start, q_end: q.end, k_begin: k.start, k_end: k.end, part })
    }

    /// The keys of the slice that the query at `q` sees.
    fn span(&self, q: u32) -> RowSpan {
        if q < self.q_begin || self.q_end <= q {
            return RowSpan::EMPTY;
        }
        let (lo, hi) = self.ends(q);
        if lo < hi { RowSpan { lo, hi } } else { RowSpan::EMPTY }
    }

    /// The ends of the interval that the query at `q` sees, for a query inside the slice; empty if
    /// the second end is not above the first.
    fn ends(&self, q: u32) -> (u32, u32) {
        let (mut lo, mut hi) = (self.k_begin, self.k_end);
        if matches!(self.part, SlicePart::Causal | SlicePart::Both) {
            hi = (hi + 1).saturating_sub(self.q_end - q);
        }
        if matches!(self.part, SlicePart::Inverse | SlicePart::Both) {
            lo = lo.saturating_add(q - self.q_begin);
        }
        (lo, hi)
    }
}

/// The keys that the query at `q` sees in the union of `slices` (ascending): ascending runs with
/// hidden keys between them.
fn shown(slices: &[MaskSlice], q: u32) -> Vec<RowSpan> {
    let mut shown: Vec<RowSpan> = slices
        .iter()
        .take_while(|slice| slice.q_begin <= q)
        .map(|slice| slice.span(q))
        .filter(|span| *span != RowSpan::EMPTY)
        .collect();
    shown.sort_unstable_by_key(|span| (span.lo, span.hi));
    shown.dedup_by(|next, last| {
        let joined = next.lo <= last.hi;
        if joined {
            last.hi = last.hi.max(next.hi);
        }
        joined
    });
    shown
}

/// An interval that holds every key that a query at any of the positions `first..=last` sees in the
/// union of `slices` (ascending). For each slice, neither end of the interval decreases as the
/// query position grows.
fn hull(slices: &[MaskSlice], first: u32, last: u32) -> RowSpan {
    let meets = |slice: &&MaskSlice| first.max(slice.q_begin) < slice.q_end;
    let shown = slices.iter().take_while(|slice| slice.q_begin <= last).filter(meets);
    let (lo, hi) = shown.fold((u32::MAX, 0), |(lo, hi), slice| {
        let (begin, _) = slice.ends(first.max(slice.q_begin));
        let (_, end) = slice.ends(last.min(slice.q_end - 1));
        if begin < end { (lo.min(begin), hi.max(end)) } else { (lo, hi) }
    });
    if lo < hi { RowSpan { lo, hi } } else { RowSpan::EMPTY }
}

impl SlicePart {
    const ALL: [Self; 4] = [Self::Full, Self::Causal, Self::Inverse, Self::Both];

    const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Causal => "causal",
            Self::Inverse => "inverse",
            Self::Both => "both",
        }
    }
}

/// `0..8x0..24/causal`; without a part, the slice is full.
impl std::str::FromStr for MaskSlice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::request(
                format!("`{text}` is no slice of a mask"),
                "write queries x keys, and full, causal, inverse or both: 0..8x0..24/causal",
            )
        };
        let (area, part) = text.split_once('/').unwrap_or((text, "full"));
        let part = SlicePart::ALL.into_iter().find(|known| known.name() == part).ok_or_else(wrong)?;
        let (q, k) = area.split_once('x').ok_or_else(wrong)?;
        let range = |text: &str| -> Result<Range<u32>> {
            let (begin, end) = text.split_once("..").ok_or_else(wrong)?;
            Ok(begin.parse().map_err(|_| wrong())?..end.parse().map_err(|_| wrong())?)
        };
        Self::new(range(q)?, range(k)?, part)
    }
}

impl fmt::Display for MaskSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}x{}..{}", self.q_begin, self.q_end, self.k_begin, self.k_end)?;
        if self.part == SlicePart::Full { Ok(()) } else { write!(f, "/{}", self.part.name()) }
    }
}
