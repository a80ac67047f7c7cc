//! The problems for every backend, transport and strategy. They are small and difficult, each for a
//! reason.
//!
//! Data only. Sizes are not multiples of a tile. Every mask changes the result on its inputs: a
//! test below removes each feature and checks for a difference.

mod list;
#[cfg(test)]
mod tests;

use super::{TensorId, fill, normal};
use crate::oracle::{BiasValues, Element, OracleBias, OracleMask, OracleProblem, RowId};

/// One problem with its inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// A description that is also a test name.
    pub name: &'static str,
    /// The seed of q, k and v.
    pub seed: u64,
    /// Sizes, score function and mask.
    pub problem: OracleProblem,
    /// Elements of k and v that are overwritten after the tensors are made.
    pub poison: Vec<Poison>,
    /// An attention bias tensor, generated from the seed.
    pub bias: Option<CaseBias>,
}

/// A generated attention bias tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CaseBias {
    /// Whether the tensor is added to scores. Otherwise it only hides keys.
    pub additive: bool,
    /// Batch entries: the problem's, or 1.
    pub batch: usize,
    /// Heads: the problem's query heads, or 1.
    pub heads: usize,
    /// Whether all queries share one row.
    pub shared_rows: bool,
    /// Whether keys are hidden by a large negative number, as many models do it, instead of −∞: in
    /// f16 that is −∞ too.
    pub stand_in: bool,
}

/// One element of k or v with a replaced value. A row must not read it unless the row sees the key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Poison {
    /// [`TensorId::K`] or [`TensorId::V`].
    pub tensor: TensorId,
    /// Batch entry.
    pub batch: usize,
    /// Key token.
    pub token: usize,
    /// Key/value head.
    pub kv_head: usize,
    /// Component of the vector.
    pub dim: usize,
    /// The new value: NaN or an infinity.
    pub value: f32,
}

/// The tensors of a case in linear BSHD order, rounded to their storage type.
#[derive(Clone, Debug)]
pub struct Inputs<E> {
    /// `[batch, q_len, q_heads, head_dim]`.
    pub q: Vec<E>,
    /// `[batch, kv_len, kv_heads, head_dim]`.
    pub k: Vec<E>,
    /// `[batch, kv_len, kv_heads, head_dim]`.
    pub v: Vec<E>,
    /// The attention bias tensor `[batch, heads, queries, kv_len]`, with its own batch, heads and
    /// queries.
    pub bias: Option<BiasInputs<E>>,
}

/// Elements of an attention bias tensor.
#[derive(Clone, Debug)]
pub enum BiasInputs<E> {
    /// Whether a query sees a key.
    Visible(Vec<bool>),
    /// The terms to add to scores.
    Bias(Vec<E>),
}

impl<E: Element> Inputs<E> {
    /// The attention bias tensor as the oracle reads it.
    pub fn oracle_bias(&self, case: &Case) -> Option<OracleBias<'_>> {
        let (inputs, bias) = (self.bias.as_ref()?, case.bias?);
        let values = match inputs {
            BiasInputs::Visible(values) => BiasValues::Visible(values),
            BiasInputs::Bias(values) => BiasValues::Bias(E::values(values)),
        };
        let queries = case.bias_queries(bias);
        Some(OracleBias { values, batch: bias.batch, heads: bias.heads, queries })
    }
}

impl Case {
    /// The tensors, poison included.
    pub fn inputs<E: Element>(&self) -> Inputs<E> {
        let mut inputs = self.clean_inputs();
        let [_, tokens, heads, dim] = self.problem.kv_shape();
        for poison in &self.poison {
            let index = ((poison.batch * tokens + poison.token) * heads + poison.kv_head) * dim + poison.dim;
            let tensor = if poison.tensor == TensorId::K { &mut inputs.k } else { &mut inputs.v };
            tensor[index] = E::from_f32(poison.value);
        }
        inputs
    }

    /// The tensors without poison.
    pub fn clean_inputs<E: Element>(&self) -> Inputs<E> {
        let make = |tensor, shape: [usize; 4]| {
            let mut values = vec![E::from_f32(0.0); shape.iter().product()];
            fill(self.seed, tensor, 0..values.len() as u64, &mut values);
            values
        };
        Inputs {
            q: make(TensorId::Q, self.problem.q_shape()),
            k: make(TensorId::K, self.problem.kv_shape()),
            v: make(TensorId::V, self.problem.kv_shape()),
            bias: self.bias.map(|bias| {
                let all = 0..bias.batch * bias.heads * self.bias_queries(bias) * self.problem.kv_len;
                let term = |index: usize| self.bias_term(bias, index);
                if bias.additive {
                    let hidden = if bias.stand_in { -1e30 } else { f32::NEG_INFINITY };
                    let bias = |index| E::from_f32(term(index).unwrap_or(hidden));
                    BiasInputs::Bias(all.map(bias).collect())
                } else {
                    BiasInputs::Visible(all.map(|index| term(index).is_some()).collect())
                }
            }),
        }
    }

    /// Queries of the attention bias tensor.
    fn bias_queries(&self, bias: CaseBias) -> usize {
        if bias.shared_rows { 1 } else { self.problem.q_len }
    }

    /// An element of the attention bias tensor. `None` hides the key. Some single keys are hidden,
    /// and ranges of keys are hidden from ranges of rows. If there are many keys, one range is
    /// longer than any tile.
    fn bias_term(&self, bias: CaseBias, index: usize) -> Option<f32> {
        let made = normal(self.seed, TensorId::Bias, index as u64);
        let (line, key) = (index / self.problem.kv_len, index % self.problem.kv_len);
        if bias.shared_rows {
            // Two of three keys are hidden, in another pattern for each batch entry and head. One row of four
            // hides all.
            let stretch = (line + key / 11) % 3 == 1 || (line % 2 == 0 && (96..260).contains(&key));
            return (made < 0.2 && !stretch && line % 4 != 2).then_some(made * 1.5);
        }
        let row = line % self.problem.q_len;
        let stretch = (row / 40 + key / 32) % 3 == 1 || (row < 40 && (96..260).contains(&key));
        (made < 1.0 && !stretch).then_some(made * 1.5)
    }

    /// Whether a row sees a poisoned key. Only such rows may differ from the result of the clean
    /// inputs. Their values are specified only by the oracle's IEEE arithmetic, and WGSL does
    /// not guarantee this arithmetic.
    pub fn sees_poison(&self, id: RowId) -> bool {
        self.poison.iter().any(|poison| {
            poison.batch == id.batch
                && poison.kv_head == self.problem.kv_head(id.head)
                && self.problem.sees(id.batch, id.row, poison.token)
                && self.bias.is_none_or(|bias| {
                    let batch = if bias.batch == 1 { 0 } else { id.batch };
                    let head = if bias.heads == 1 { 0 } else { id.head };
                    let query = if bias.shared_rows { 0 } else { id.row };
                    let row = (batch * bias.heads + head) * self.bias_queries(bias) + query;
                    self.bias_term(bias, row * self.problem.kv_len + poison.token).is_some()
                })
        })
    }

    fn new(name: &'static str, lens: [usize; 3], heads: [usize; 3], mask: OracleMask) -> Self {
        let [batch, q_len, kv_len] = lens;
        let [q_heads, kv_heads, head_dim] = heads;
        // Any fixed number that differs between cases. FNV-1a of the name does not depend on the order of
        // the list.
        let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let scale = (head_dim as f64).sqrt().recip();
        let problem = OracleProblem {
            batch,
            q_len,
            kv_len,
            q_heads,
            kv_heads,
            head_dim,
            scale,
            softcap: None,
            mask,
            q_offset: 0,
            sinks: Vec::new(),
        };
        Self { name, seed, problem, poison: Vec::new(), bias: None }
    }

    fn q_offset(mut self, q_offset: u64) -> Self {
        self.problem.q_offset = q_offset;
        self
    }

    fn mask_tensor(mut self, batch: usize, heads: usize) -> Self {
        self.bias = Some(CaseBias { additive: false, batch, heads, shared_rows: false, stand_in: false });
        self
    }

    fn bias(mut self, batch: usize, heads: usize) -> Self {
        self.bias = Some(CaseBias { additive: true, batch, heads, shared_rows: false, stand_in: false });
        self
    }

    fn stand_ins(mut self) -> Self {
        self.bias = self.bias.map(|bias| CaseBias { stand_in: true, ..bias });
        self
    }

    fn key_mask(mut self, batch: usize, heads: usize) -> Self {
        self.bias = Some(CaseBias { additive: false, batch, heads, shared_rows: true, stand_in: false });
        self
    }

    fn key_bias(mut self, batch: usize, heads: usize) -> Self {
        self.bias = Some(CaseBias { additive: true, batch, heads, shared_rows: true, stand_in: false });
        self
    }

    /// Generated sinks plus `shift`.
    fn sinks(mut self, shift: f32) -> Self {
        let sink = |head: usize| f64::from(normal(self.seed, TensorId::Sinks, head as u64) + shift);
        self.problem.sinks = (0..self.problem.q_heads).map(sink).collect();
        self
    }

    fn scaled(mut self, factor: f64) -> Self {
        self.problem.scale *= factor;
        self
    }

    fn softcap(mut self, cap: f64) -> Self {
        self.problem.softcap = Some(cap);
        self
    }

    /// Poisons k and v of one token and head, each in one component, with `value`.
    fn poisoned(mut self, batch: usize, token: usize, kv_head: usize, value: f32) -> Self {
        let last = self.problem.head_dim - 1;
        for (tensor, dim) in [(TensorId::K, 0), (TensorId::V, last)] {
            self.poison.push(Poison { tensor, batch, token, kv_head, dim, value });
        }
        self
    }
}

/// All cases. `[batch, q_len, kv_len]`, then `[q_heads, kv_heads, head_dim]`.
pub fn cases() -> Vec<Case> {
    [
        list::sizes(),
        list::masks(),
        list::scores(),
        list::poison(),
        list::bias(),
        list::shared_rows(),
        list::entries(),
    ]
    .concat()
}
