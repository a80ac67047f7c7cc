//! Documents: several sequences packed into one. A query sees only keys of its own document.

use super::kind::{MaskKind, Term, list};
use crate::error::{Error, Result};

/// Boundaries of documents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub(super) struct Documents {
    /// Ascending cumulative boundaries, `0` first; empty: one document that holds everything.
    pub(super) documents: Vec<u32>,
}

impl Documents {
    pub(super) fn new(mut boundaries: Vec<u32>) -> Result<Self> {
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
        Ok(Self { documents: boundaries })
    }
}

impl MaskKind for Documents {
    const NOTATION: &'static [&'static str] = &["documents:0,8,24"];

    fn parse(term: &Term<'_>) -> Result<Option<Self>> {
        match term.name {
            "documents" => Self::new(term.positions()?).map(Some),
            _ => Ok(None),
        }
    }

    fn terms(&self) -> Vec<String> {
        if self.documents.is_empty() {
            Vec::new()
        } else {
            vec![format!("documents:{}", list(&self.documents))]
        }
    }

    fn and(self, other: Self) -> Result<Self> {
        let (Some(end), Some(other_end)) = (self.documents.last(), other.documents.last()) else {
            return Ok(if self.documents.is_empty() { other } else { self });
        };
        // Two tokens share a document of the intersection if no boundary of either list lies between them.
        // A query behind the end of the shorter list sees nothing.
        let end = *end.min(other_end);
        let mut all: Vec<u32> =
            self.documents.iter().chain(&other.documents).copied().filter(|b| *b <= end).collect();
        all.sort_unstable();
        all.dedup();
        Ok(Self { documents: all })
    }

    fn fits(&self, _batch: u32, kv_len: u32) -> Result<()> {
        match self.documents.last() {
            Some(end) if *end != kv_len => Err(Error::request(
                format!("the documents end at {end}, the keys at {kv_len}"),
                format!("let the last boundary be {kv_len}"),
            )),
            _ => Ok(()),
        }
    }

    fn ends(&self, _batch: usize, q: u32, kv_len: u32) -> (u32, u32) {
        if self.documents.is_empty() {
            return (0, kv_len);
        }
        // The document that holds q: boundaries[next - 1] <= q < boundaries[next]. Behind the last one a
        // query sees nothing.
        let next = self.documents.partition_point(|boundary| *boundary <= q);
        self.documents.get(next).map_or((kv_len, kv_len), |end| (self.documents[next - 1], *end))
    }
}
