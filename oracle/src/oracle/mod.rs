//! Attention in f64, written directly from its definition.
//!
//! For one query row and head: the scores of all visible keys, their maximum, exponentials, their
//! sum, the weighted mean of the values. Each row is independent, keys are visited in ascending
//! order, and all numbers are f64. The rounding of f64 (2⁻⁵³) is far below any measured error.

mod bias;
mod gradients;
mod mask;
mod values;

use std::{error::Error, fmt};

pub use bias::{BiasValues, OracleBias};
pub use gradients::Gradients;
pub use mask::{OracleMask, OracleSlice, OracleTerm};
pub use values::{Dtype, Element, Tensor4, Values};

/// A problem: sizes, score function and mask. All shapes are `[batch, seq, heads, dim]`.
#[derive(Clone, Debug, PartialEq)]
pub struct OracleProblem {
    /// Independent sequences.
    pub batch: usize,
    /// Query tokens of each sequence.
    pub q_len: usize,
    /// Key and value tokens of each sequence.
    pub kv_len: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key and value heads; query head `h` reads key/value head `h / (q_heads / kv_heads)`.
    pub kv_heads: usize,
    /// Length of the vectors of q, k and v.
    pub head_dim: usize,
    /// A score is `scale · q·k`.
    pub scale: f64,
    /// A score `x` becomes `c · tanh(x / c)`, after the scale and before the mask.
    pub softcap: Option<f64>,
    /// The keys that each query sees.
    pub mask: OracleMask,
    /// The global position of query 0; key 0 is at position 0.
    pub q_offset: u64,
    /// One score for each query head, in the softmax of every row, without a value; may be empty.
    pub sinks: Vec<f64>,
}

impl OracleProblem {
    /// Shape of q and of the output: `[batch, q_len, q_heads, head_dim]`.
    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.q_len, self.q_heads, self.head_dim]
    }

    /// Shape of k and of v: `[batch, kv_len, kv_heads, head_dim]`.
    pub fn kv_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_len, self.kv_heads, self.head_dim]
    }

    /// Shape of the log-sum-exp: `[batch, q_heads, q_len]`.
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.q_heads, self.q_len]
    }

    /// All rows in the order of the output's memory: batch, then query, then head.
    pub fn row_ids(&self) -> Vec<RowId> {
        let mut ids = Vec::with_capacity(self.batch * self.q_len * self.q_heads);
        for batch in 0..self.batch {
            for row in 0..self.q_len {
                ids.extend((0..self.q_heads).map(|head| RowId { batch, row, head }));
            }
        }
        ids
    }

    /// Whether a query row sees the key token at index `key`.
    pub fn sees(&self, batch: usize, row: usize, key: usize) -> bool {
        self.mask.visible(batch, row as u64 + self.q_offset, key as u64)
    }

    /// The key/value head that a query head reads.
    pub fn kv_head(&self, q_head: usize) -> usize {
        q_head / (self.q_heads / self.kv_heads)
    }

    /// Where a row's vector begins in the output `[batch, q_len, q_heads, head_dim]`.
    pub fn o_index(&self, id: RowId) -> usize {
        ((id.batch * self.q_len + id.row) * self.q_heads + id.head) * self.head_dim
    }

    /// Where a row's log-sum-exp is in the linear order of `[batch, q_heads, q_len]`.
    pub fn lse_index(&self, id: RowId) -> usize {
        (id.batch * self.q_heads + id.head) * self.q_len + id.row
    }

    /// Refuses sizes, numbers and masks that do not define an attention.
    pub fn check(&self) -> Result<(), OracleError> {
        if self.kv_heads == 0 || !self.q_heads.is_multiple_of(self.kv_heads) {
            return Err(OracleError::Heads { q_heads: self.q_heads, kv_heads: self.kv_heads });
        }
        if !self.scale.is_finite() || self.softcap.is_some_and(|cap| !(cap.is_finite() && cap > 0.0)) {
            return Err(OracleError::Score { scale: self.scale, softcap: self.softcap });
        }
        if !self.sinks.is_empty() && self.sinks.len() != self.q_heads {
            return Err(OracleError::Sinks { sinks: self.sinks.len(), q_heads: self.q_heads });
        }
        self.mask.check(self.batch)
    }
}

/// One line, for the message of a failed test.
impl fmt::Display for OracleProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "batch {}, q {} x {} heads, kv {} x {} heads, dim {}, scale {}, mask {}",
            self.batch,
            self.q_len,
            self.q_heads,
            self.kv_len,
            self.kv_heads,
            self.head_dim,
            self.scale,
            self.mask
        )?;
        if let Some(cap) = self.softcap {
            write!(f, ", softcap {cap}")?;
        }
        if self.q_offset != 0 {
            write!(f, ", q offset {}", self.q_offset)?;
        }
        if !self.sinks.is_empty() {
            write!(f, ", sinks {:?}", self.sinks)?;
        }
        Ok(())
    }
}

/// Names one row of the output: a query token of a batch entry, seen through one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowId {
    /// Batch entry.
    pub batch: usize,
    /// Query index within the sequence; its position is this plus the problem's `q_offset`.
    pub row: usize,
    /// Query head.
    pub head: usize,
}

/// One row of output, from the oracle, from naive f32 or from the product.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The row.
    pub id: RowId,
    /// The output vector `[head_dim]`.
    pub o: Vec<f64>,
    /// Natural logarithm of the sum of the exponentials of all scores and the sink; -∞ for none.
    pub lse: f64,
}

/// The right answer to one problem on given tensors. Rows are computed on request.
///
/// # Corners
///
/// - A row that sees no key has o = 0 and lse = -∞; with a sink, o = 0 and lse is the sink.
/// - A row does not read a key that it cannot see, nor its value.
/// - NaN and ∞ in visible keys and values propagate as in IEEE 754: a NaN or +∞ score makes the row
///   NaN, one of -∞ has weight 0. If *all* visible scores are -∞, the row is 0/0, NaN.
#[derive(Clone, Copy, Debug)]
pub struct Oracle<'a> {
    problem: &'a OracleProblem,
    q: Tensor4<'a>,
    k: Tensor4<'a>,
    v: Tensor4<'a>,
    bias: Option<OracleBias<'a>>,
}

impl<'a> Oracle<'a> {
    /// An oracle over q `[batch, q_len, q_heads, head_dim]` and k, v `[batch, kv_len, kv_heads,
    /// head_dim]`, rounded to their storage type. Refuses tensors that do not fit the problem.
    pub fn new(
        problem: &'a OracleProblem,
        q: Values<'a>,
        k: Values<'a>,
        v: Values<'a>,
    ) -> Result<Self, OracleError> {
        problem.check()?;
        Ok(Self {
            problem,
            q: Tensor4::new(problem.q_shape(), q)?,
            k: Tensor4::new(problem.kv_shape(), k)?,
            v: Tensor4::new(problem.kv_shape(), v)?,
            bias: None,
        })
    }

    /// This oracle with an attention bias tensor. Refuses a tensor that does not fit the problem.
    pub fn with_bias(self, bias: OracleBias<'a>) -> Result<Self, OracleError> {
        let problem = self.problem;
        let shape = [bias.batch, bias.heads, bias.queries, problem.kv_len];
        let elements = shape.iter().product();
        let actual = match bias.values {
            BiasValues::Visible(values) => values.len(),
            BiasValues::Bias(values) => values.len(),
        };
        let extents = [1, problem.batch].contains(&bias.batch)
            && [1, problem.q_heads].contains(&bias.heads)
            && [1, problem.q_len].contains(&bias.queries);
        if !extents || actual != elements {
            return Err(OracleError::Length { shape, elements, actual });
        }
        Ok(Self { bias: Some(bias), ..self })
    }

    /// The term to add to the score of a key. `None` if the row does not see the key.
    pub fn term(&self, id: RowId, key: usize) -> Option<f64> {
        if !self.problem.sees(id.batch, id.row, key) {
            return None;
        }
        let Some(bias) = self.bias else { return Some(0.0) };
        let batch = if bias.batch == 1 { 0 } else { id.batch };
        let head = if bias.heads == 1 { 0 } else { id.head };
        let query = if bias.queries == 1 { 0 } else { id.row };
        let row = (batch * bias.heads + head) * bias.queries + query;
        let index = row * self.problem.kv_len + key;
        match bias.values {
            BiasValues::Visible(values) => values[index].then_some(0.0),
            BiasValues::Bias(values) => Some(values.get(index)).filter(|bias| *bias != f64::NEG_INFINITY),
        }
    }

    /// The problem of this oracle.
    pub fn problem(&self) -> &'a OracleProblem {
        self.problem
    }

    /// The tensors q, k, v.
    pub fn tensors(&self) -> [Tensor4<'a>; 3] {
        [self.q, self.k, self.v]
    }

    /// Output vector `[head_dim]` and log-sum-exp of one row. Panics outside the problem.
    pub fn row(&self, batch: usize, row: usize, head: usize) -> (Vec<f64>, f64) {
        let (o, [max, sum]) = self.normalised(RowId { batch, row, head });
        (o, max + sum.ln())
    }

    /// Output vector of one row, its largest logit, the sum of its exponentials relative to that.
    fn normalised(&self, RowId { batch, row, head }: RowId) -> (Vec<f64>, [f64; 2]) {
        let problem = self.problem;
        let kv_head = problem.kv_head(head);
        let mut q = vec![0.0; problem.head_dim];
        let mut vector = vec![0.0; problem.head_dim];
        let mut o = vec![0.0; problem.head_dim];
        self.q.read_vector(batch, row, head, &mut q);

        let mut scores = Vec::new();
        for key in 0..problem.kv_len {
            if let Some(term) = self.term(RowId { batch, row, head }, key) {
                self.k.read_vector(batch, key, kv_head, &mut vector);
                let dot: f64 = q.iter().zip(&vector).map(|(q, k)| q * k).sum();
                let score = problem.scale * dot;
                scores.push((key, problem.softcap.map_or(score, |cap| cap * (score / cap).tanh()) + term));
            }
        }
        let sink = problem.sinks.get(head).copied();
        if scores.is_empty() {
            return (o, [sink.unwrap_or(f64::NEG_INFINITY), 1.0]);
        }

        // `f64::max` ignores NaN. The exponential below is NaN again.
        let max = scores.iter().map(|&(_, score)| score).chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let mut sum = sink.map_or(0.0, |sink| (sink - max).exp());
        for (key, score) in scores {
            let weight = (score - max).exp();
            sum += weight;
            self.v.read_vector(batch, key, kv_head, &mut vector);
            for (o, v) in o.iter_mut().zip(&vector) {
                *o += weight * v;
            }
        }
        o.iter_mut().for_each(|o| *o /= sum);
        (o, [max, sum])
    }

    /// The chosen rows, in the order given.
    pub fn rows(&self, ids: &[RowId]) -> Vec<Row> {
        let row = |&id: &RowId| {
            let (o, [max, sum]) = self.normalised(id);
            Row { id, o, lse: max + sum.ln() }
        };
        ids.iter().map(row).collect()
    }

    /// All rows, in the order of [`OracleProblem::row_ids`].
    pub fn all_rows(&self) -> Vec<Row> {
        self.rows(&self.problem.row_ids())
    }
}

/// The reasons for which the oracle refuses a problem.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum OracleError {
    /// The number of elements of a tensor does not match its shape `[batch, seq, heads, dim]`.
    Length {
        /// The shape wanted.
        shape: [usize; 4],
        /// Its number of elements.
        elements: usize,
        /// The number of elements given.
        actual: usize,
    },
    /// The number of query heads is not a multiple of the number of key/value heads.
    Heads {
        /// Query heads.
        q_heads: usize,
        /// Key and value heads.
        kv_heads: usize,
    },
    /// The scale is not finite, or the softcap is not a positive finite number.
    Score {
        /// The scale given.
        scale: f64,
        /// The softcap given.
        softcap: Option<f64>,
    },
    /// The number of sinks is neither 0 nor the number of query heads.
    Sinks {
        /// How many sinks were given.
        sinks: usize,
        /// Query heads of the problem.
        q_heads: usize,
    },
    /// A text is not a valid mask.
    Notation {
        /// The text given.
        text: String,
    },
    /// A side of a window is below -1.
    Window {
        /// The left side given.
        left: i64,
        /// The right side given.
        right: i64,
    },
    /// There are fewer than two document boundaries, or they descend.
    Documents {
        /// The boundaries given.
        boundaries: Vec<u64>,
    },
    /// The number of masks for batch entries is not the number of batch entries.
    Entries {
        /// How many masks were given.
        masks: usize,
        /// Batch entries of the problem.
        batch: usize,
    },
    /// The number of valid lengths is neither 1 nor the number of batch entries.
    Valid {
        /// How many lengths were given.
        lengths: usize,
        /// Batch entries of the problem.
        batch: usize,
    },
}

impl fmt::Display for OracleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { shape, elements, actual } => {
                write!(f, "a tensor of shape {shape:?} has {elements} elements, {actual} were given")
            }
            Self::Heads { q_heads, kv_heads } => {
                write!(f, "{q_heads} query heads are no multiple of {kv_heads} key/value heads")
            }
            Self::Score { scale, softcap } => {
                write!(f, "scale {scale} must be finite and softcap {softcap:?} positive and finite")
            }
            Self::Sinks { sinks, q_heads } => {
                write!(f, "{sinks} sinks for {q_heads} query heads: give one for each, or none")
            }
            Self::Notation { text } => write!(f, "mask `{text}` cannot be read for the oracle"),
            Self::Window { left, right } => {
                write!(f, "window {left},{right}: a side is a number of tokens, or -1 for no bound")
            }
            Self::Documents { boundaries } => {
                write!(f, "document boundaries {boundaries:?} must be two or more and never descend")
            }
            Self::Entries { masks, batch } => {
                write!(f, "{masks} masks for a batch of {batch}: give one for each entry")
            }
            Self::Valid { lengths, batch } => {
                write!(f, "{lengths} valid lengths for a batch of {batch}: give one, or one for each entry")
            }
        }
    }
}

impl Error for OracleError {}

#[cfg(test)]
mod tests;
