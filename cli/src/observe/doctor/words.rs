//! Sentences of a diagnosis.

use std::path::Path;

use serde::Serialize;

use super::read::clean;
use crate::observe::record::format::StepAt;

/// One problem, in a sentence.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Finding {
    pub(super) what: &'static str,
    /// The ranks that caused it, not the ranks that suffered.
    pub(super) ranks: Vec<u32>,
    pub(super) text: String,
}

impl Finding {
    pub(super) fn new(
        what: &'static str,
        ranks: impl IntoIterator<Item = u32>,
        text: impl Into<String>,
    ) -> Self {
        Self { what, ranks: ranks.into_iter().collect(), text: text.into() }
    }

    pub(super) fn unusable(path: &Path, why: &str) -> Self {
        Self::new("unusable", [], format!("{} cannot be used: {why}", name(path)))
    }
}

pub(super) fn place(at: &StepAt) -> String {
    let doing = at.doing.as_deref().map(|doing| format!(" ({doing})")).unwrap_or_default();
    format!("step {} of operation {}{doing}", at.step, at.op)
}

/// `rank 3`, or `ranks 0, 1, 3`; at most [`MOST_NAMED`] are named.
pub(super) fn words_of(ranks: &[u32]) -> String {
    let shown: Vec<String> = ranks.iter().take(MOST_NAMED).map(u32::to_string).collect();
    let more = match ranks.len().saturating_sub(MOST_NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, shown.join(", "))
}

pub(super) fn verb(ranks: &[u32], one: &str, many: &str) -> String {
    format!("{} {}", words_of(ranks), if ranks.len() == 1 { one } else { many })
}

#[expect(clippy::cast_precision_loss, reason = "a sentence has one decimal")]
pub(super) fn seconds(ns: u64) -> String {
    format!("{:.1} s", ns as f64 / 1e9)
}

/// The name of a file, safe to print.
pub(super) fn name(path: &Path) -> String {
    clean(&path.display().to_string())
}

/// Most ranks that a sentence names.
const MOST_NAMED: usize = 16;
