//! Causal and window masks: bounds on the distance between a query and a key.

use super::kind::{MaskKind, Term};
use crate::error::Result;

/// Bounds on both sides of a query.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub(super) struct Window {
    /// Keys more than this distance to the left of the query are hidden; `None` is unbounded.
    pub(super) left: Option<u32>,
    /// Keys more than this distance to the right of the query are hidden; `None` is unbounded,
    /// `Some(0)` is causal.
    pub(super) right: Option<u32>,
}

impl MaskKind for Window {
    const NOTATION: &'static [&'static str] = &["causal", "window:L,R"];

    fn parse(term: &Term<'_>) -> Result<Option<Self>> {
        match (term.name, term.arguments) {
            ("causal", None) => Ok(Some(Self { left: None, right: Some(0) })),
            ("window", _) => match term.numbers()?[..] {
                [left, right] => {
                    let side = |n: i64| if n == -1 { Ok(None) } else { term.unsigned(n).map(Some) };
                    Ok(Some(Self { left: side(left)?, right: side(right)? }))
                }
                _ => Err(term.wrong("needs two numbers, left and right, -1 for unbounded")),
            },
            _ => Ok(None),
        }
    }

    fn terms(&self) -> Vec<String> {
        let bound = |bound: Option<u32>| bound.map_or("-1".to_owned(), |n| n.to_string());
        match (self.left, self.right) {
            (None, None) => Vec::new(),
            (None, Some(0)) => vec!["causal".to_owned()],
            (left, right) => vec![format!("window:{},{}", bound(left), bound(right))],
        }
    }

    fn and(self, other: Self) -> Result<Self> {
        let tighter = |a: Option<u32>, b: Option<u32>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Ok(Self { left: tighter(self.left, other.left), right: tighter(self.right, other.right) })
    }

    fn ends(&self, _batch: usize, q: u32, kv_len: u32) -> (u32, u32) {
        let lo = self.left.map_or(0, |left| q.saturating_sub(left));
        let hi = self.right.map_or(kv_len, |right| q.saturating_add(right).saturating_add(1));
        (lo, hi)
    }
}
