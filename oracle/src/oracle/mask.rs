//! Whether a query sees a key, decided for one pair at a time.
//!
//! No ranges, no blocks, no shortcuts. The product uses them, and this module checks the product.

use std::fmt;

use super::OracleError;

/// One condition on a pair of global positions. A key is visible if all conditions of a mask are
/// true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OracleTerm {
    /// `k <= q`.
    Causal,
    /// `q - left <= k <= q + right`, both ends included; -1 means no bound on that side.
    Window {
        /// Tokens before the query, or -1.
        left: i64,
        /// Tokens after the query, or -1.
        right: i64,
    },
    /// Query and key are in the same `boundaries[i]..boundaries[i + 1]`. A query outside all of
    /// these ranges sees no key, and no query sees a key outside all of them.
    Documents(Vec<u64>),
    /// `k < n`: one `n` for all batch entries, or one for each.
    Valid(Vec<u64>),
    /// One of the slices shows the key.
    Slices(Vec<OracleSlice>),
    /// The mask of the pair's batch entry shows the key. These masks have no conditions for several
    /// entries.
    Entries(Vec<OracleMask>),
}

/// A part of a rectangle of queries and keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OracleSlice {
    /// Positions of the queries.
    pub q: std::ops::Range<u64>,
    /// Positions of the keys.
    pub k: std::ops::Range<u64>,
    /// Hides the pairs above the diagonal through the last query and the last key.
    pub causal: bool,
    /// Hides the pairs below the diagonal through the first query and the first key.
    pub inverse: bool,
}

impl OracleSlice {
    fn shows(&self, q: u64, k: u64) -> bool {
        // `causal` compares the distances to the ends of both ranges, `inverse` the distances from their
        // starts.
        self.q.contains(&q)
            && self.k.contains(&k)
            && (!self.causal || self.k.end - k >= self.q.end - q)
            && (!self.inverse || k - self.k.start >= q - self.q.start)
    }
}

impl OracleTerm {
    fn allows(&self, batch: usize, q_position: u64, k_position: u64) -> bool {
        let (q, k) = (i128::from(q_position), i128::from(k_position));
        match self {
            Self::Causal => k <= q,
            Self::Window { left, right } => {
                (*left == -1 || q - i128::from(*left) <= k) && (*right == -1 || k <= q + i128::from(*right))
            }
            Self::Documents(boundaries) => boundaries.windows(2).any(|ends| {
                let document = ends[0]..ends[1];
                document.contains(&q_position) && document.contains(&k_position)
            }),
            Self::Slices(slices) => slices.iter().any(|slice| slice.shows(q_position, k_position)),
            Self::Entries(masks) => masks[batch].visible(0, q_position, k_position),
            Self::Valid(lengths) => k_position < if lengths.len() == 1 { lengths[0] } else { lengths[batch] },
        }
    }
}

/// The intersection of its terms. Without terms every key is visible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OracleMask {
    /// The conditions, in any order.
    pub terms: Vec<OracleTerm>,
}

impl OracleMask {
    /// The mask that hides nothing.
    pub fn full() -> Self {
        Self::default()
    }

    /// `k <= q`.
    pub fn causal() -> Self {
        Self::full().and(OracleTerm::Causal)
    }

    /// This mask and one more condition.
    #[must_use]
    pub fn and(mut self, term: OracleTerm) -> Self {
        self.terms.push(term);
        self
    }

    /// Whether the query at global position `q_position` sees the key at global position
    /// `k_position` in this batch entry.
    pub fn visible(&self, batch: usize, q_position: u64, k_position: u64) -> bool {
        self.terms.iter().all(|term| term.allows(batch, q_position, k_position))
    }

    /// Refuses a mask that is not well defined for a problem of `batch` entries.
    pub(super) fn check(&self, batch: usize) -> Result<(), OracleError> {
        for term in &self.terms {
            match term {
                OracleTerm::Causal => {}
                OracleTerm::Window { left, right } => {
                    if *left < -1 || *right < -1 {
                        return Err(OracleError::Window { left: *left, right: *right });
                    }
                }
                OracleTerm::Documents(boundaries) => {
                    if boundaries.len() < 2 || !boundaries.is_sorted() {
                        return Err(OracleError::Documents { boundaries: boundaries.clone() });
                    }
                }
                OracleTerm::Slices(_) => {}
                OracleTerm::Entries(masks) => {
                    if masks.len() != batch {
                        return Err(OracleError::Entries { masks: masks.len(), batch });
                    }
                    masks.iter().try_for_each(|mask| mask.check(1))?;
                }
                OracleTerm::Valid(lengths) => {
                    if lengths.len() != 1 && lengths.len() != batch {
                        return Err(OracleError::Valid { lengths: lengths.len(), batch });
                    }
                }
            }
        }
        Ok(())
    }
}

impl OracleMask {
    /// For how many batch entries it has a mask each, if it has.
    fn entries(&self) -> Option<usize> {
        self.terms.iter().find_map(|term| match term {
            OracleTerm::Entries(masks) => Some(masks.len()),
            _ => None,
        })
    }

    /// The conditions on pairs of one batch entry.
    fn of_entry(&self, batch: usize) -> Self {
        let mut mask = Self::full();
        for term in &self.terms {
            match term {
                OracleTerm::Entries(masks) => mask.terms.extend(masks[batch].terms.iter().cloned()),
                OracleTerm::Valid(lengths) if lengths.len() > 1 => {
                    mask.terms.push(OracleTerm::Valid(vec![lengths[batch]]));
                }
                term => mask.terms.push(term.clone()),
            }
        }
        mask
    }
}

/// In the notation of the command line: `0..8x0..24/causal`.
impl fmt::Display for OracleSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { q, k, causal, inverse } = self;
        write!(f, "{}..{}x{}..{}", q.start, q.end, k.start, k.end)?;
        f.write_str(match (causal, inverse) {
            (false, false) => "",
            (true, false) => "/causal",
            (false, true) => "/inverse",
            (true, true) => "/both",
        })
    }
}

/// In the notation of the command line: `causal+window:4,-1`. Masks of batch entries are written
/// one after the other, each with the conditions for all entries: `causal+valid:3//causal`.
impl fmt::Display for OracleMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        if let Some(entries) = self.entries() {
            let masks: Vec<String> = (0..entries).map(|batch| self.of_entry(batch).to_string()).collect();
            return f.write_str(&masks.join("//"));
        }
        if self.terms.is_empty() {
            return f.write_str("full");
        }
        for (index, term) in self.terms.iter().enumerate() {
            if index > 0 {
                f.write_str("+")?;
            }
            match term {
                OracleTerm::Causal => f.write_str("causal")?,
                OracleTerm::Window { left, right } => write!(f, "window:{left},{right}")?,
                OracleTerm::Documents(boundaries) => write!(f, "documents:{}", list(boundaries))?,
                OracleTerm::Valid(lengths) => write!(f, "valid:{}", list(lengths))?,
                OracleTerm::Slices(slices) => {
                    let slices: Vec<String> = slices.iter().map(OracleSlice::to_string).collect();
                    write!(f, "slices:{}", slices.join(","))?;
                }
                OracleTerm::Entries(_) => unreachable!("written above, entry by entry"),
            }
        }
        Ok(())
    }
}

/// Reads the notation of the command line, with its own code. It shares no code with the parser of
/// the product.
impl std::str::FromStr for OracleMask {
    type Err = OracleError;

    fn from_str(text: &str) -> Result<Self, OracleError> {
        let unreadable = || OracleError::Notation { text: text.to_owned() };
        if text.contains("//") {
            let entries: Vec<Self> = text.split("//").map(str::parse).collect::<Result<_, _>>()?;
            return Ok(Self::full().and(OracleTerm::Entries(entries)));
        }
        let mut mask = Self::full();
        for term in text.split('+') {
            let (kind, arguments) = term.split_once(':').unwrap_or((term, ""));
            let numbers = || -> Result<Vec<i64>, OracleError> {
                arguments.split(',').map(|number| number.parse().map_err(|_| unreadable())).collect()
            };
            let unsigned = || -> Result<Vec<u64>, OracleError> {
                numbers()?.into_iter().map(|number| u64::try_from(number).map_err(|_| unreadable())).collect()
            };
            mask = match kind {
                "full" => mask,
                "causal" => mask.and(OracleTerm::Causal),
                "window" => match numbers()?[..] {
                    [left, right] => mask.and(OracleTerm::Window { left, right }),
                    _ => return Err(unreadable()),
                },
                "documents" => mask.and(OracleTerm::Documents(unsigned()?)),
                "valid" => mask.and(OracleTerm::Valid(unsigned()?)),
                "slices" => {
                    let slices =
                        arguments.split(',').map(|slice| OracleSlice::read(slice).ok_or_else(unreadable));
                    mask.and(OracleTerm::Slices(slices.collect::<Result<_, _>>()?))
                }
                _ => return Err(unreadable()),
            };
        }
        Ok(mask)
    }
}

impl OracleSlice {
    /// Reads `0..8x0..24/causal`.
    fn read(text: &str) -> Option<Self> {
        let (area, part) = text.split_once('/').unwrap_or((text, "full"));
        let (q, k) = area.split_once('x')?;
        let range = |text: &str| {
            let (begin, end) = text.split_once("..")?;
            Some(begin.parse().ok()?..end.parse().ok()?)
        };
        let (causal, inverse) = match part {
            "full" => (false, false),
            "causal" => (true, false),
            "inverse" => (false, true),
            "both" => (true, true),
            _ => return None,
        };
        Some(Self { q: range(q)?, k: range(k)?, causal, inverse })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys of `0..8` that the query sees, as a picture.
    fn picture(mask: &OracleMask, batch: usize, q: u64) -> String {
        (0..8).map(|k| if mask.visible(batch, q, k) { '#' } else { '.' }).collect()
    }

    #[test]
    fn each_term_shows_the_keys_that_its_definition_names() {
        let window = |left, right| OracleMask::full().and(OracleTerm::Window { left, right });
        let documents = OracleMask::full().and(OracleTerm::Documents(vec![0, 3, 3, 8]));
        assert_eq!(picture(&OracleMask::full(), 0, 0), "########");
        assert_eq!(picture(&OracleMask::causal(), 0, 0), "#.......");
        assert_eq!(picture(&OracleMask::causal(), 0, 3), "####....");
        assert_eq!(picture(&OracleMask::causal(), 0, 99), "########");
        assert_eq!(picture(&window(2, 1), 0, 0), "##......");
        assert_eq!(picture(&window(2, 1), 0, 4), "..####..");
        assert_eq!(picture(&window(-1, 0), 0, 2), "###.....");
        assert_eq!(picture(&window(0, -1), 0, 6), "......##");
        assert_eq!(picture(&window(0, 0), 0, 6), "......#.");
        assert_eq!(picture(&window(1, 1), 0, 20), "........");
        assert_eq!(picture(&documents, 0, 2), "###.....");
        assert_eq!(picture(&documents, 0, 3), "...#####");
        assert_eq!(picture(&documents, 0, 8), "........");
    }

    #[test]
    fn slices_show_what_any_of_them_shows() {
        let slice = |q, k, causal, inverse| OracleSlice { q, k, causal, inverse };
        let of = |slices| OracleMask::full().and(OracleTerm::Slices(slices));
        let causal = of(vec![slice(0..3, 2..7, true, false)]);
        assert_eq!(
            [0, 1, 2, 3].map(|q| picture(&causal, 0, q)),
            ["..###...", "..####..", "..#####.", "........"]
        );
        let inverse = of(vec![slice(0..3, 2..7, false, true)]);
        assert_eq!([0, 1, 2].map(|q| picture(&inverse, 0, q)), ["..#####.", "...####.", "....###."]);
        let both = of(vec![slice(0..3, 2..7, true, true)]);
        assert_eq!([0, 1, 2].map(|q| picture(&both, 0, q)), ["..###...", "...###..", "....###."]);
        let two = of(vec![slice(0..3, 0..3, false, false), slice(1..2, 2..5, false, false)]);
        assert_eq!([0, 1].map(|q| picture(&two, 0, q)), ["###.....", "#####..."]);
        assert_eq!(two.to_string(), "slices:0..3x0..3,1..2x2..5");
        assert_eq!(both.to_string(), "slices:0..3x2..7/both");
    }

    #[test]
    fn valid_takes_one_length_or_one_for_each_batch_entry() {
        let each = OracleMask::full().and(OracleTerm::Valid(vec![2, 0]));
        assert_eq!(picture(&each, 0, 7), "##......");
        assert_eq!(picture(&each, 1, 7), "........");
        let one = OracleMask::full().and(OracleTerm::Valid(vec![3]));
        assert_eq!(picture(&one, 5, 0), "###.....");
        assert_eq!(each.check(2), Ok(()));
        assert_eq!(each.check(3), Err(OracleError::Valid { lengths: 2, batch: 3 }));
        assert_eq!(one.check(3), Ok(()));
    }

    #[test]
    fn each_batch_entry_has_its_own_mask() {
        let documents = |ends: &[u64]| OracleMask::full().and(OracleTerm::Documents(ends.to_vec()));
        let each = OracleTerm::Entries(vec![documents(&[0, 3, 8]), OracleMask::causal()]);
        let mask = OracleMask::full().and(each.clone());
        assert_eq!(picture(&mask, 0, 2), "###.....");
        assert_eq!(picture(&mask, 0, 3), "...#####");
        assert_eq!(picture(&mask, 1, 2), "###.....");
        assert_eq!(picture(&mask, 1, 3), "####....");
        assert_eq!(mask.to_string(), "documents:0,3,8//causal");
        // Conditions for all entries, and a length for each.
        let both = OracleMask::full()
            .and(OracleTerm::Valid(vec![7, 2]))
            .and(each)
            .and(OracleTerm::Window { left: 2, right: -1 });
        assert_eq!(picture(&both, 0, 5), "...####.");
        assert_eq!(picture(&both, 1, 3), ".#......");
        assert_eq!(both.to_string(), "valid:7+documents:0,3,8+window:2,-1//valid:2+causal+window:2,-1");
        let read: OracleMask = both.to_string().parse().unwrap();
        for (batch, q) in (0..2).flat_map(|batch| (0..9).map(move |q| (batch, q))) {
            assert_eq!(picture(&read, batch, q), picture(&both, batch, q));
        }
        assert_eq!(mask.check(2), Ok(()));
        assert_eq!(mask.check(3), Err(OracleError::Entries { masks: 2, batch: 3 }));
        let lengths = OracleMask::full().and(OracleTerm::Valid(vec![7, 2]));
        let nested = OracleMask::full().and(OracleTerm::Entries(vec![lengths, OracleMask::full()]));
        assert!(nested.check(2).is_err());
    }

    #[test]
    fn terms_intersect() {
        let mask = OracleMask::causal()
            .and(OracleTerm::Window { left: 3, right: -1 })
            .and(OracleTerm::Documents(vec![0, 4, 8]))
            .and(OracleTerm::Valid(vec![6]));
        assert_eq!(picture(&mask, 0, 2), "###.....");
        assert_eq!(picture(&mask, 0, 5), "....##..");
        assert_eq!(picture(&mask, 0, 7), "....##..");
        assert_eq!(mask.to_string(), "causal+window:3,-1+documents:0,4,8+valid:6");
    }

    #[test]
    fn a_mask_reads_back_what_it_prints() {
        for text in [
            "full",
            "causal",
            "window:3,-1+valid:6,2",
            "slices:0..3x2..7/both,4..5x0..1+documents:0,4,8",
            "full//causal+valid:3//full",
        ] {
            assert_eq!(text.parse::<OracleMask>().unwrap().to_string(), text);
        }
        for text in ["", "casual", "causal//", "window:1", "valid:-1", "slices:0..3", "slices:0..3x2..7/some"]
        {
            assert!(text.parse::<OracleMask>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_indefinite_mask_is_refused() {
        let refused = |term| OracleMask::full().and(term).check(1).is_err();
        assert!(refused(OracleTerm::Window { left: -2, right: 0 }));
        assert!(refused(OracleTerm::Documents(vec![0])));
        assert!(refused(OracleTerm::Documents(vec![0, 5, 4])));
        assert!(refused(OracleTerm::Valid(vec![])));
    }
}
