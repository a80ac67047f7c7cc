//! Attention bias tensors.

use super::Values;

/// A tensor over (query, key) pairs, `[batch, heads, queries, kv_len]` in linear order.
#[derive(Clone, Copy, Debug)]
pub struct OracleBias<'a> {
    /// Its elements.
    pub values: BiasValues<'a>,
    /// Batch entries: the number of the problem, or 1 for all entries.
    pub batch: usize,
    /// Heads: the number of query heads of the problem, or 1 for all heads.
    pub heads: usize,
    /// Queries: the number of the problem, or 1 for all queries.
    pub queries: usize,
}

/// Elements of [`OracleBias`].
#[derive(Clone, Copy, Debug)]
pub enum BiasValues<'a> {
    /// The key is hidden if the element is false.
    Visible(&'a [bool]),
    /// Added to the score after the softcap. -∞ hides the key.
    Bias(Values<'a>),
}
