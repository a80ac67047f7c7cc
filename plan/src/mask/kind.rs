//! The interface of a kind of mask.

use crate::error::{Error, Result};
use crate::spans::Spans;

/// One kind of mask. A mask holds one value of each kind; a query sees a key only if all of these
/// values show it. The default value hides nothing.
///
/// A kind gives the visible keys as one interval of key positions, as several intervals, or as
/// both.
pub(super) trait MaskKind: Default {
    /// The notation of its terms, for help texts.
    const NOTATION: &'static [&'static str];

    /// The value of this kind that a term means; none if the term names another kind.
    ///
    /// # Errors
    /// [`Error::Request`] if the arguments do not fit the name.
    fn parse(term: &Term<'_>) -> Result<Option<Self>>;

    /// The terms of this value; none if it hides nothing.
    fn terms(&self) -> Vec<String>;

    /// The intersection of both values.
    ///
    /// # Errors
    /// [`Error::Request`] if they are for different numbers of batch entries.
    fn and(self, other: Self) -> Result<Self>;

    /// Refuses a value that does not fit a problem of `batch` entries and `kv_len` keys.
    fn fits(&self, _batch: u32, _kv_len: u32) -> Result<()> {
        Ok(())
    }

    /// Number of different masks over the batch: 1, or one for each entry.
    fn batch_classes(&self) -> usize {
        1
    }

    /// The interval `(lo, hi)` of the key positions `0..kv_len` that the query at `q` of batch
    /// entry `batch` sees; empty if `lo >= hi`. Neither end decreases as `q` grows.
    fn ends(&self, _batch: usize, _q: u32, kv_len: u32) -> (u32, u32) {
        (0, kv_len)
    }

    /// The visible part of `spans`, for kinds with several intervals for one query.
    fn within(&self, _q: u32, spans: Spans) -> Spans {
        spans
    }

    /// An interval that holds every key that [`Self::within`] shows to a query at any of the
    /// positions `first..=last`.
    fn hull(&self, _first: u32, _last: u32, kv_len: u32) -> (u32, u32) {
        (0, kv_len)
    }

    /// Whether [`Self::within`] never changes its argument.
    fn is_one_interval(&self) -> bool {
        true
    }
}

/// A term of the notation: `name` or `name:arguments`.
pub(super) struct Term<'a> {
    pub(super) text: &'a str,
    pub(super) name: &'a str,
    pub(super) arguments: Option<&'a str>,
    /// The notation of masks, for refusals.
    notation: fn() -> String,
}

impl<'a> Term<'a> {
    pub(super) fn new(text: &'a str, notation: fn() -> String) -> Self {
        let (name, arguments) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        Self { text, name, arguments, notation }
    }

    /// The refusal of this term.
    pub(super) fn wrong(&self, why: &str) -> Error {
        Error::request(format!("mask `{}` {why}", self.text), format!("use {}", (self.notation)()))
    }

    /// The arguments as whole numbers.
    pub(super) fn numbers(&self) -> Result<Vec<i64>> {
        let number = |n: &str| {
            n.parse::<i64>().map_err(|_| self.wrong(&format!("has `{n}` where a whole number belongs")))
        };
        self.arguments.ok_or_else(|| self.wrong("has no numbers"))?.split(',').map(number).collect()
    }

    /// The same of a number from 0 on.
    pub(super) fn unsigned(&self, n: i64) -> Result<u32> {
        u32::try_from(n).map_err(|_| self.wrong(&format!("has {n}, which is out of range")))
    }

    /// The arguments as numbers from 0 on.
    pub(super) fn positions(&self) -> Result<Vec<u32>> {
        self.numbers()?.into_iter().map(|n| self.unsigned(n)).collect()
    }
}

/// Numbers joined by commas.
pub(super) fn list(values: &[u32]) -> String {
    values.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}
