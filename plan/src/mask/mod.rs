//! Which keys a query may see, as a function of global positions.
//!
//! For one batch entry and one query position, a mask is a few *intervals* of key positions: causal
//! and window bound one on both sides, key padding from above, documents on both sides; a union of
//! slices is several; intersecting masks intersects the intervals. So all later stages (tile
//! classes, kernels, proofs) ask for the intervals of a row and do not depend on mask kinds. The
//! definition of each kind is in its own file in `mask/`.
//!
//! A mask is one for all batch entries, or a list with one mask for each entry
//! (`mask/per_entry.rs`). All stages ask for the intervals of (batch entry, row), so they do not
//! depend on that either.

mod documents;
mod kind;
mod padding;
mod per_entry;
mod slices;
mod window;

use std::borrow::Cow;

use crate::error::{Error, Result};
use crate::spans::{RowSpan, Spans};
use documents::Documents;
use kind::{MaskKind, Term};
use padding::KeyPadding;
use slices::SliceUnions;
pub use slices::{MaskSlice, SlicePart};
use window::Window;

macro_rules! define_mask {
    ($($field:ident: $Kind:ty,)*) => {
        /// The intersection of any number of causal, window, key-padding, document and slice masks: one value of each kind. Or
        /// one such mask for each batch entry ([`Mask::per_entry`]).
        #[derive(Clone, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
        pub struct Mask {
            $(#[serde(flatten)] $field: $Kind,)*
            /// One mask for each batch entry, at least two, each of them for one entry; all other fields then hide nothing.
            /// Empty: the other fields are the mask of all entries.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            entries: Vec<Mask>,
        }

        impl Mask {
            /// The intersection of both masks, entry by entry if one of them is a mask for each batch entry.
            ///
            /// # Errors
            /// [`Error::Request`] where both are for different numbers of batch entries.
            pub fn and(self, other: Self) -> Result<Self> {
                if self.entries.is_empty() && other.entries.is_empty() {
                    Ok(Self { $($field: self.$field.and(other.$field)?,)* entries: Vec::new() })
                } else {
                    self.and_by_entry(&other)
                }
            }

            /// How masks are written, for help texts.
            pub fn notation() -> String {
                let terms = [&["full"][..], $(<$Kind>::NOTATION,)*].concat();
                format!("{}, joined by +; one mask for each batch entry: MASK{SEPARATOR}MASK", terms.join(", "))
            }

            /// Refuses a mask that does not fit a problem of `batch` entries and `kv_len` keys.
            pub(crate) fn fits(&self, batch: u32, kv_len: u32) -> Result<()> {
                $(self.$field.fits(batch, kv_len)?;)*
                self.entries_fit(batch, kv_len)
            }

            /// Number of different masks over the batch: 1, or one for each entry.
            pub(crate) fn batch_classes(&self) -> usize {
                [$(self.$field.batch_classes(),)*].into_iter().fold(self.entries.len().max(1), usize::max)
            }

            /// Whether both ends of the interval of visible keys never decrease from one query of batch entry `batch` to the
            /// next; queries that see no key come last.
            pub(crate) fn grows_along_queries(&self, batch: usize) -> bool {
                let mask = self.of_entry(batch);
                $(mask.$field.is_one_interval())&&*
            }

            /// The key positions that the query at global position `q` of batch entry `batch` sees, of keys `0..kv_len`.
            ///
            /// # Panics
            /// If this is a mask for each batch entry and has none for `batch`.
            pub fn visible(&self, batch: usize, q: u32, kv_len: u32) -> Spans {
                let mask = self.of_entry(batch);
                let (lo, hi) = mask.ends(batch, q, kv_len);
                let spans = Spans::one(interval(lo, hi));
                $(let spans = mask.$field.within(q, spans);)*
                spans
            }

            /// An interval that holds every key that a query at any of the positions `first..=last` sees, and maybe others.
            pub(crate) fn hull(&self, batch: usize, first: u32, last: u32, kv_len: u32) -> RowSpan {
                let mask = self.of_entry(batch);
                let (mut lo, _) = mask.ends(batch, first, kv_len);
                let (_, mut hi) = mask.ends(batch, last, kv_len);
                $(
                    let (begin, end) = mask.$field.hull(first, last, kv_len);
                    (lo, hi) = (lo.max(begin), hi.min(end));
                )*
                interval(lo, hi)
            }

            /// The intersection of the intervals of all kinds that have one. Neither end decreases as `q` grows.
            fn ends(&self, batch: usize, q: u32, kv_len: u32) -> (u32, u32) {
                let (mut lo, mut hi) = (0, kv_len);
                $(
                    let (begin, end) = self.$field.ends(batch, q, kv_len);
                    (lo, hi) = (lo.max(begin), hi.min(end));
                )*
                (lo, hi)
            }

            fn terms(&self) -> Vec<String> {
                [$(self.$field.terms(),)*].concat()
            }

            fn of_term(term: &Term<'_>) -> Result<Self> {
                if term.text == "full" {
                    return Ok(Self::full());
                }
                $(
                    if let Some(kind) = <$Kind>::parse(term)? {
                        return Ok(Self { $field: kind, ..Self::default() });
                    }
                )*
                Err(term.wrong("is not known"))
            }
        }
    };
}

// To add a mask kind, add a line here and its module above. The order is that of the fields in plan
// hashes and in JSON.
define_mask! {
    window: Window,
    padding: KeyPadding,
    documents: Documents,
    slices: SliceUnions,
}

impl Mask {
    /// Every key is visible.
    pub fn full() -> Self {
        Self::default()
    }

    /// A query sees the keys at its own position and before.
    pub fn causal() -> Self {
        Self::window(None, Some(0))
    }

    /// A query at `q` sees the keys `q − left ..= q + right`; `None` is unbounded.
    pub fn window(left: Option<u32>, right: Option<u32>) -> Self {
        Self { window: Window { left, right }, ..Self::default() }
    }

    /// Keys at position `valid[batch]` and above are hidden; one value serves all batch entries.
    pub fn key_padding(valid: Vec<u32>) -> Self {
        Self { padding: KeyPadding { valid }, ..Self::default() }
    }

    /// Queries see keys of their own document only. `boundaries` are cumulative: `0, 8, 24` is a
    /// document of 8 tokens and one of 16. Documents without tokens are allowed.
    ///
    /// # Errors
    /// [`Error::Request`] unless the boundaries start at 0 and ascend, beyond 0.
    pub fn documents(boundaries: Vec<u32>) -> Result<Self> {
        Ok(Self { documents: Documents::new(boundaries)?, ..Self::default() })
    }

    /// Ascending positions at which documents of any batch entry begin or end; empty if there is
    /// only one document.
    pub fn document_boundaries(&self) -> Cow<'_, [u32]> {
        if self.entries.is_empty() {
            return Cow::Borrowed(&self.documents.documents);
        }
        let mut all: Vec<u32> =
            self.entries.iter().flat_map(|mask| mask.documents.documents.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        Cow::Owned(all)
    }

    /// A query sees the union of the keys of these slices. A key in several slices counts once.
    pub fn slices(slices: Vec<MaskSlice>) -> Self {
        Self { slices: SliceUnions::of(slices), ..Self::default() }
    }

    /// How many keys to the left and to the right of a query it sees, if nothing else decides: such
    /// a mask does not change when all positions move by the same distance. `None` is
    /// unbounded.
    pub fn as_window(&self) -> Option<[Option<u32>; 2]> {
        let Window { left, right } = self.window;
        (*self == Self::window(left, right)).then_some([left, right])
    }

    /// Whether every query sees every key, for any lengths.
    pub fn is_full(&self) -> bool {
        *self == Self::default()
    }
}

/// Between the masks of batch entries, in the notation. No shell gives it a meaning.
const SEPARATOR: &str = "//";

fn interval(lo: u32, hi: u32) -> RowSpan {
    if lo < hi { RowSpan { lo, hi } } else { RowSpan::EMPTY }
}

/// The command line's notation (design section 6), see [`Mask::notation`].
impl std::str::FromStr for Mask {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let intersection = |text: &str| {
            text.split('+')
                .map(|term| Self::of_term(&Term::new(term, Self::notation)))
                .try_fold(Self::full(), |mask, term| mask.and(term?))
        };
        Self::per_entry(text.split(SEPARATOR).map(intersection).collect::<Result<_>>()?)
    }
}

impl std::fmt::Display for Mask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.entries.is_empty() {
            let masks: Vec<String> = self.entries.iter().map(Self::to_string).collect();
            return f.write_str(&masks.join(SEPARATOR));
        }
        let terms = self.terms();
        f.write_str(if terms.is_empty() { "full" } else { "" })?;
        f.write_str(&terms.join("+"))
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
        // With more queries than keys, the first queries see nothing of the causal part.
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
        // Queries outside of all slices see nothing; this is known without a test of each query.
        assert_eq!(hull("slices:0..4x0..4,8..12x8..12", 4, 7), RowSpan::EMPTY);
        assert_eq!(hull("slices:0..4x0..4,8..12x8..12", 4, 8), RowSpan { lo: 8, hi: 12 });
    }

    #[test]
    fn what_is_shown_parses_back_to_the_same_mask() {
        for text in [
            "full",
            "causal",
            "window:3,-1",
            "window:3,0+valid:3,4+documents:0,8,24",
            "valid:0",
            "slices:0..4x2..9,0..4x10..12/both+slices:0..9x0..9/causal",
            "full//causal+valid:3//slices:0..4x2..9/both//full",
        ] {
            let mask: Mask = text.parse().unwrap();
            assert_eq!(mask.to_string(), text);
            assert_eq!(mask.to_string().parse::<Mask>().unwrap(), mask);
        }
    }

    #[test]
    fn the_fields_in_json_and_plan_hashes_stay() {
        let mask: Mask = "window:3,0+documents:0,8,24+valid:3,4+slices:0..4x2..9/both".parse().unwrap();
        let slice = r#"{"q_begin":0,"q_end":4,"k_begin":2,"k_end":9,"part":"both"}"#;
        let expected =
            format!(r#"{{"left":3,"right":0,"valid":[3,4],"documents":[0,8,24],"unions":[[{slice}]]}}"#);
        assert_eq!(serde_json::to_string(&mask).unwrap(), expected);
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
            "causal//",
            "//",
            "causal//casual",
            "causal//valid:1,2",
        ] {
            let error = text.parse::<Mask>().unwrap_err();
            assert!(error.is_request(), "{text}: {error}");
        }
    }
}
