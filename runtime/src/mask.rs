//! Which keys a query may see, as a function of global positions.
//!
//! For one batch entry and one query position, a mask is a few *intervals* of key positions: causal and window bound
//! one on both sides, key padding from above, documents on both sides; a union of slices is several; intersecting
//! masks intersects the intervals. So a mask is stored in that normal form, and everything downstream (tile classes,
//! kernels, proofs) asks for the intervals of a row and knows no mask kinds.

mod slices;

use crate::{Error, Result, RowSpan, Spans};
pub use slices::{MaskSlice, SlicePart};

/// The intersection of any number of causal, window, key-padding, document and slice masks, in normal form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Mask {
    /// Keys further left of the query than this are hidden; `None` is unbounded.
    left: Option<u32>,
    /// Keys further right of the query than this are hidden; `None` is unbounded, `Some(0)` is causal.
    right: Option<u32>,
    /// Keys at or above this are hidden; empty: none are. One value for all batch entries, or one for each.
    valid: Vec<u32>,
    /// Ascending cumulative boundaries of documents, `0` first; empty: one document that holds everything.
    documents: Vec<u32>,
    /// Unions of slices, each ascending; what is visible is in every one of them.
    unions: Vec<Vec<MaskSlice>>,
}

impl Mask {
    /// Every key is visible.
    pub fn full() -> Self {
        Self::default()
    }

    /// A query sees the keys at its own position and before.
    pub fn causal() -> Self {
        Self { right: Some(0), ..Self::default() }
    }

    /// A query at `q` sees the keys `q − left ..= q + right`; `None` is unbounded.
    pub fn window(left: Option<u32>, right: Option<u32>) -> Self {
        Self { left, right, ..Self::default() }
    }

    /// Keys at position `valid[batch]` and above are hidden; one value serves all batch entries.
    pub fn key_padding(valid: Vec<u32>) -> Self {
        Self { valid, ..Self::default() }
    }

    /// Queries see keys of their own document only. `boundaries` are cumulative: `0, 8, 24` is a document of 8
    /// tokens and one of 16. Documents without tokens are allowed.
    ///
    /// # Errors
    /// [`Error::Request`] unless the boundaries start at 0 and ascend, beyond 0.
    pub fn documents(mut boundaries: Vec<u32>) -> Result<Self> {
        if boundaries.first() != Some(&0) || boundaries.len() < 2 || !boundaries.is_sorted() {
            return Err(Error::request(
                format!("document boundaries {boundaries:?} do not ascend from 0"),
                "give cumulative boundaries from 0 to the sequence length, such as documents:0,8,24",
            ));
        }
        boundaries.dedup();
        if boundaries.len() < 2 {
            return Err(Error::request(
                "documents without a token".to_owned(),
                "let the last boundary be the sequence length, such as documents:0,8,24",
            ));
        }
        Ok(Self { documents: boundaries, ..Self::default() })
    }

    /// Ascending positions at which documents begin or end; none where there is one document.
    pub(crate) fn document_boundaries(&self) -> &[u32] {
        &self.documents
    }

    /// A query sees the keys that any of these slices shows it; where slices overlap, once.
    pub fn slices(mut slices: Vec<MaskSlice>) -> Self {
        slices.sort_unstable();
        slices.dedup();
        Self { unions: vec![slices], ..Self::default() }
    }

    /// What both masks show.
    ///
    /// # Errors
    /// [`Error::Request`] where both have key padding for different numbers of batch entries.
    pub fn and(mut self, other: Self) -> Result<Self> {
        let tighter = |a: Option<u32>, b: Option<u32>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        self.left = tighter(self.left, other.left);
        self.right = tighter(self.right, other.right);
        self.valid = match (self.valid.len(), other.valid.len()) {
            (0, _) => other.valid,
            (_, 0) => self.valid,
            (1, _) => other.valid.iter().map(|n| (*n).min(self.valid[0])).collect(),
            (_, 1) => self.valid.iter().map(|n| (*n).min(other.valid[0])).collect(),
            (a, b) if a == b => self.valid.iter().zip(&other.valid).map(|(a, b)| *a.min(b)).collect(),
            (a, b) => {
                return Err(Error::request(
                    format!("one key padding has {a} batch entries, the other {b}"),
                    "give one value, or one for each batch entry",
                ));
            }
        };
        self.documents = match (self.documents.is_empty(), other.documents.is_empty()) {
            (true, _) => other.documents,
            (_, true) => self.documents,
            _ => {
                // Two tokens share a document of the intersection when no boundary of either lies between them;
                // past the shorter list's end nobody sees anything.
                let end = *self.documents.last().min(other.documents.last()).unwrap_or(&0);
                let mut all: Vec<u32> =
                    self.documents.iter().chain(&other.documents).copied().filter(|b| *b <= end).collect();
                all.sort_unstable();
                all.dedup();
                all
            }
        };
        self.unions.extend(other.unions);
        self.unions.sort_unstable();
        self.unions.dedup();
        Ok(self)
    }

    /// Whether both ends of what a query sees only grow along the queries, up to a first query that sees nothing.
    pub(crate) fn grows_along_queries(&self) -> bool {
        self.unions.is_empty()
    }

    /// Whether every query sees every key, whatever the lengths.
    pub fn is_full(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses what does not fit a problem of `batch` entries and `kv_len` keys.
    pub(crate) fn fits(&self, batch: u32, kv_len: u32) -> Result<()> {
        if self.valid.len() > 1 && self.valid.len() != batch as usize {
            return Err(Error::request(
                format!("key padding has {} values, the batch has {batch} entries", self.valid.len()),
                "give valid:N for all, or one value for each batch entry",
            ));
        }
        if let Some(above) = self.valid.iter().find(|n| **n > kv_len) {
            return Err(Error::request(
                format!("key padding keeps {above} keys, the problem has {kv_len}"),
                format!("use values from 0 to {kv_len}"),
            ));
        }
        if let Some(slice) = self.unions.iter().flatten().find(|slice| slice.k_end > kv_len) {
            return Err(Error::request(
                format!("the slice {slice} reaches key {}, the problem has {kv_len}", slice.k_end),
                format!("let key ranges end at {kv_len} or before"),
            ));
        }
        match self.documents.last() {
            Some(end) if *end != kv_len => Err(Error::request(
                format!("the documents end at {end}, the keys at {kv_len}"),
                format!("let the last boundary be {kv_len}"),
            )),
            _ => Ok(()),
        }
    }

    /// Number of different masks over the batch: 1, or one for each entry where key padding differs.
    pub(crate) fn batch_classes(&self) -> usize {
        self.valid.len().max(1)
    }

    /// The key positions that the query at global position `q` of batch entry `batch` sees, of keys `0..kv_len`.
    pub fn visible(&self, batch: usize, q: u32, kv_len: u32) -> Spans {
        let bounds = Spans::one(self.bounds(batch, q, kv_len));
        self.unions.iter().fold(bounds, |spans, slices| spans.intersect(&slices::shown(slices, q)))
    }

    /// An interval that holds every key that a query at any of the positions `first..=last` sees, and maybe others.
    pub(crate) fn hull(&self, batch: usize, first: u32, last: u32, kv_len: u32) -> RowSpan {
        let bounds = match (self.ends(batch, first, kv_len), self.ends(batch, last, kv_len)) {
            (Some((lo, _)), Some((_, hi))) => (lo, hi),
            (Some((lo, _)), None) => (lo, kv_len),
            (None, _) => return RowSpan::EMPTY,
        };
        let hulls = self.unions.iter().map(|slices| slices::hull(slices, first, last));
        let (lo, hi) = hulls.fold(bounds, |(lo, hi), hull| (lo.max(hull.lo), hi.min(hull.hi)));
        if lo < hi { RowSpan { lo, hi } } else { RowSpan::EMPTY }
    }

    /// The interval that all but the slices leave.
    fn bounds(&self, batch: usize, q: u32, kv_len: u32) -> RowSpan {
        match self.ends(batch, q, kv_len) {
            Some((lo, hi)) if lo < hi => RowSpan { lo, hi },
            _ => RowSpan::EMPTY,
        }
    }

    /// Where that interval would begin and end; neither end moves left as `q` grows. None behind the last document.
    fn ends(&self, batch: usize, q: u32, kv_len: u32) -> Option<(u32, u32)> {
        let (mut lo, mut hi) = (0, kv_len);
        if let Some(left) = self.left {
            lo = lo.max(q.saturating_sub(left));
        }
        if let Some(right) = self.right {
            hi = hi.min(q.saturating_add(right).saturating_add(1));
        }
        if let Some(valid) = self.valid.get(if self.valid.len() > 1 { batch } else { 0 }) {
            hi = hi.min(*valid);
        }
        if !self.documents.is_empty() {
            // The document that holds q: boundaries[next - 1] <= q < boundaries[next].
            let next = self.documents.partition_point(|boundary| *boundary <= q);
            lo = lo.max(self.documents[next - 1]);
            hi = hi.min(*self.documents.get(next)?);
        }
        Some((lo, hi))
    }
}

/// The command line's notation (design section 6): `full|causal|window:L,R|documents:0,8,24|valid:N[,N…]|slices:Q..QxK..K[/part],…`, joined
/// by `+`.
impl std::str::FromStr for Mask {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.split('+').map(parse_term).try_fold(Self::full(), |mask, term| mask.and(term?))
    }
}

impl std::fmt::Display for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let list = |values: &[u32]| values.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let bound = |bound: Option<u32>| bound.map_or("-1".to_owned(), |n| n.to_string());
        let mut terms = Vec::new();
        match (self.left, self.right) {
            (None, None) => {}
            (None, Some(0)) => terms.push("causal".to_owned()),
            (left, right) => terms.push(format!("window:{},{}", bound(left), bound(right))),
        }
        if !self.documents.is_empty() {
            terms.push(format!("documents:{}", list(&self.documents)));
        }
        if !self.valid.is_empty() {
            terms.push(format!("valid:{}", list(&self.valid)));
        }
        for slices in &self.unions {
            let slices: Vec<String> = slices.iter().map(MaskSlice::to_string).collect();
            terms.push(format!("slices:{}", slices.join(",")));
        }
        f.write_str(if terms.is_empty() { "full" } else { "" })?;
        f.write_str(&terms.join("+"))
    }
}

fn parse_term(term: &str) -> Result<Mask> {
    let wrong = |why: &str| {
        Error::request(
            format!("mask `{term}` {why}"),
            "use full, causal, window:L,R, documents:0,8,24, valid:N[,N…] or slices:0..8x0..24/causal,…, joined by +",
        )
    };
    let (kind, arguments) = term.split_once(':').map_or((term, None), |(kind, rest)| (kind, Some(rest)));
    let numbers = || -> Result<Vec<i64>> {
        arguments
            .ok_or_else(|| wrong("has no numbers"))?
            .split(',')
            .map(|n| n.parse::<i64>().map_err(|_| wrong(&format!("has `{n}` where a whole number belongs"))))
            .collect()
    };
    let unsigned = |n: i64| u32::try_from(n).map_err(|_| wrong(&format!("has {n}, which is out of range")));
    match (kind, arguments) {
        ("full", None) => Ok(Mask::full()),
        ("causal", None) => Ok(Mask::causal()),
        ("window", _) => match numbers()?[..] {
            [left, right] => {
                let side = |n: i64| if n == -1 { Ok(None) } else { unsigned(n).map(Some) };
                Ok(Mask::window(side(left)?, side(right)?))
            }
            _ => Err(wrong("needs two numbers, left and right, -1 for unbounded")),
        },
        ("documents", _) => Mask::documents(numbers()?.into_iter().map(unsigned).collect::<Result<_>>()?),
        ("slices", Some(slices)) => {
            Ok(Mask::slices(slices.split(',').map(str::parse).collect::<Result<_>>()?))
        }
        ("valid", _) => Ok(Mask::key_padding(numbers()?.into_iter().map(unsigned).collect::<Result<_>>()?)),
        _ => Err(wrong("is not known")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(lo: u32, hi: u32) -> Spans {
        Spans::one(RowSpan { lo, hi })
    }

    fn spans(ends: &[(u32, u32)]) -> Spans {
        Spans::Many(ends.iter().map(|(lo, hi)| RowSpan { lo: *lo, hi: *hi }).collect())
    }

    #[test]
    fn every_kind_shows_its_interval() {
        let at = |text: &str, batch, q| text.parse::<Mask>().unwrap().visible(batch, q, 24);
        assert_eq!(at("full", 0, 3), span(0, 24));
        assert_eq!(at("causal", 0, 3), span(0, 4));
        assert_eq!(at("causal", 0, 30), span(0, 24));
        assert_eq!(at("window:2,1", 0, 3), span(1, 5));
        assert_eq!(at("window:-1,1", 0, 3), span(0, 5));
        assert_eq!(at("window:2,-1", 0, 3), span(1, 24));
        assert_eq!(at("window:2,0", 0, 40), spans(&[]));
        assert_eq!(at("documents:0,8,24", 0, 7), span(0, 8));
        assert_eq!(at("documents:0,8,24", 0, 8), span(8, 24));
        assert_eq!(at("documents:0,8,24", 0, 24), spans(&[]));
        assert_eq!(at("valid:5,9", 1, 0), span(0, 9));
        assert_eq!(at("valid:0", 0, 0), spans(&[]));
        assert_eq!(at("causal+documents:0,8,24+window:3,-1+valid:20", 0, 22), span(19, 20));
    }

    #[test]
    fn slices_show_their_union() {
        let at = |text: &str, q| text.parse::<Mask>().unwrap().visible(0, q, 24);
        assert_eq!(at("slices:0..8x0..24", 7), span(0, 24));
        assert_eq!(at("slices:0..8x0..24", 8), spans(&[]));
        let two = "slices:0..8x0..4,0..8x10..12,4..8x3..6";
        assert_eq!(at(two, 3), spans(&[(0, 4), (10, 12)]));
        assert_eq!(at(two, 4), spans(&[(0, 6), (10, 12)]));
        assert_eq!(at(&format!("{two}+causal"), 5), spans(&[(0, 6)]));
        assert_eq!(at(&format!("{two}+slices:0..8x2..11"), 0), spans(&[(2, 4), (10, 11)]));
        // Four queries and eight keys: the last query sees the last key, the first query the first.
        let part = |part, q| at(&format!("slices:2..6x10..18/{part}"), q);
        assert_eq!([2, 3, 5].map(|q| part("causal", q)), [span(10, 15), span(10, 16), span(10, 18)]);
        assert_eq!([2, 3, 5].map(|q| part("inverse", q)), [span(10, 18), span(11, 18), span(13, 18)]);
        assert_eq!([2, 3, 5].map(|q| part("both", q)), [span(10, 15), span(11, 16), span(13, 18)]);
        // More queries than keys: the first of them see nothing of the causal part.
        assert_eq!([0, 3, 4].map(|q| at("slices:0..6x0..2/causal", q)), [spans(&[]), spans(&[]), span(0, 1)]);
        assert_eq!([1, 2].map(|q| at("slices:0..6x0..2/inverse", q)), [span(1, 2), spans(&[])]);
    }

    #[test]
    fn the_hull_of_queries_holds_what_they_see_and_of_one_slice_nothing_else() {
        let hull = |text: &str, first, last| text.parse::<Mask>().unwrap().hull(0, first, last, 24);
        for part in ["full", "causal", "inverse", "both"] {
            for rest in [
                "",
                "+causal",
                "+documents:0,10,24+valid:20",
                "+slices:0..9x0..5,7..7x0..9/both,3..20x8..11/causal",
            ] {
                let text = format!("slices:4..12x6..18/{part}{rest}");
                let mask: Mask = text.parse().unwrap();
                for (first, last) in (0..26).flat_map(|first| (first..26).map(move |last| (first, last))) {
                    let seen: Vec<RowSpan> =
                        (first..=last).flat_map(|q| mask.visible(0, q, 24).to_vec()).collect();
                    let hull = mask.hull(0, first, last, 24);
                    assert!(
                        seen.iter().all(|s| hull.lo <= s.lo && s.hi <= hull.hi),
                        "{text} {first}..={last}"
                    );
                    let all = (seen.iter().map(|s| s.lo).min(), seen.iter().map(|s| s.hi).max());
                    if let (Some(lo), Some(hi), "") = (all.0, all.1, rest) {
                        assert_eq!(hull, RowSpan { lo, hi }, "{text} {first}..={last}");
                    }
                }
            }
        }
        // Queries that no slice names see nothing, and no look at each of them is needed to know.
        assert_eq!(hull("slices:0..4x0..4,8..12x8..12", 4, 7), RowSpan::EMPTY);
        assert_eq!(hull("slices:0..4x0..4,8..12x8..12", 4, 8), RowSpan { lo: 8, hi: 12 });
    }

    #[test]
    fn what_is_shown_parses_back_to_the_same_mask() {
        for text in [
            "full",
            "causal",
            "window:3,-1",
            "window:3,0+documents:0,8,24+valid:3,4",
            "valid:0",
            "slices:0..4x2..9,0..4x10..12/both+slices:0..9x0..9/causal",
        ] {
            let mask: Mask = text.parse().unwrap();
            assert_eq!(mask.to_string(), text);
            assert_eq!(mask.to_string().parse::<Mask>().unwrap(), mask);
        }
    }

    #[test]
    fn nonsense_is_refused_with_a_remedy() {
        for text in [
            "",
            "casual",
            "causal:1",
            "window:1",
            "window:-2,0",
            "documents:1,2",
            "documents:0,5,4",
            "documents:0,0",
            "valid:-1",
            "valid:x",
            "valid",
            "valid:4294967296",
            "valid:1,2+valid:1,2,3",
            "causal+",
            "slices",
            "slices:",
            "slices:0..8",
            "slices:0..8x0..9/some",
            "slices:8..0x0..9",
            "slices:0..8x-1..9",
        ] {
            let error = text.parse::<Mask>().unwrap_err();
            assert!(error.is_request(), "{text}: {error}");
        }
    }
}
