//! The tokens of a problem that a placement deals.

use crate::{AttentionProblem, Deal};

/// The queries.
pub(super) fn queries(problem: &AttentionProblem) -> Deal {
    let boundaries = problem.mask.document_boundaries().iter();
    let documents = boundaries.map(|position| position.saturating_sub(problem.q_offset)).collect();
    Deal { total: problem.q_len, documents, ..Deal::default() }
}

/// The keys.
pub(super) fn keys(problem: &AttentionProblem) -> Deal {
    let documents = problem.mask.document_boundaries().to_vec();
    Deal { total: problem.kv_len, replicated: problem.replicated.clone(), documents }
}
