//! The problems that every backend, transport and strategy is held to: small, awkward, each for a reason.
//!
//! Data only. Sizes avoid multiples of any tile, and every mask matters on its inputs: a test below takes each
//! feature out and looks for the difference.

use super::{TensorId, fill, normal};
use crate::oracle::{Element, OracleMask, OraclePairs, OracleProblem, OracleTerm, PairValues, RowId};

/// One problem with its inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// What it is, in words that make a test name.
    pub name: &'static str,
    /// The seed of q, k and v.
    pub seed: u64,
    /// Sizes, score function and mask.
    pub problem: OracleProblem,
    /// Elements of k and v that are overwritten after the tensors are made.
    pub poison: Vec<Poison>,
    /// A pair tensor, made up from the seed.
    pub pairs: Option<CasePairs>,
}

/// A made-up pair tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CasePairs {
    /// Added to scores, rather than only hiding keys.
    pub bias: bool,
    /// Batch entries: the problem's, or 1.
    pub batch: usize,
    /// Heads: the problem's query heads, or 1.
    pub heads: usize,
}

/// One element of k or v that is replaced by something a row must not read unless it sees the key.
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
    /// What is there instead: NaN or an infinity.
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
    /// The pair tensor `[its batch, its heads, q_len, kv_len]`.
    pub pairs: Option<PairInputs<E>>,
}

/// Elements of a pair tensor.
#[derive(Clone, Debug)]
pub enum PairInputs<E> {
    /// Whether a key is seen.
    Visible(Vec<bool>),
    /// What is added to a score.
    Bias(Vec<E>),
}

impl<E: Element> Inputs<E> {
    /// The pair tensor as the oracle reads it.
    pub fn oracle_pairs(&self, case: &Case) -> Option<OraclePairs<'_>> {
        let (inputs, pairs) = (self.pairs.as_ref()?, case.pairs?);
        let values = match inputs {
            PairInputs::Visible(values) => PairValues::Visible(values),
            PairInputs::Bias(values) => PairValues::Bias(E::values(values)),
        };
        Some(OraclePairs { values, batch: pairs.batch, heads: pairs.heads })
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

    /// The tensors as they are without poison.
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
            pairs: self.pairs.map(|pairs| {
                let (q_len, kv_len) = (self.problem.q_len, self.problem.kv_len);
                let all = 0..pairs.batch * pairs.heads * q_len * kv_len;
                let term =
                    |index: usize| self.pair_term(index / kv_len % q_len, index % kv_len, index as u64);
                if pairs.bias {
                    let bias = |index| E::from_f32(term(index).unwrap_or(f32::NEG_INFINITY));
                    PairInputs::Bias(all.map(bias).collect())
                } else {
                    PairInputs::Visible(all.map(|index| term(index).is_some()).collect())
                }
            }),
        }
    }

    /// An element of the pair tensor; `None` hides the key. Single keys are hidden here and there, and stretches of keys
    /// from stretches of rows: of many keys one that is longer than any tile.
    fn pair_term(&self, row: usize, key: usize, index: u64) -> Option<f32> {
        let made = normal(self.seed, TensorId::Bias, index);
        let stretch = (row / 40 + key / 32) % 3 == 1 || (row < 40 && (96..260).contains(&key));
        (made < 1.0 && !stretch).then_some(made * 1.5)
    }

    /// Whether a row sees a poisoned key. Only such rows may differ from what the clean inputs give; what they
    /// become is not specified beyond the oracle's IEEE arithmetic, which WGSL does not promise.
    pub fn sees_poison(&self, id: RowId) -> bool {
        self.poison.iter().any(|poison| {
            poison.batch == id.batch
                && poison.kv_head == self.problem.kv_head(id.head)
                && self.problem.sees(id.batch, id.row, poison.token)
                && self.pairs.is_none_or(|pairs| {
                    let batch = if pairs.batch == 1 { 0 } else { id.batch };
                    let head = if pairs.heads == 1 { 0 } else { id.head };
                    let row = (batch * pairs.heads + head) * self.problem.q_len + id.row;
                    let index = row * self.problem.kv_len + poison.token;
                    self.pair_term(id.row, poison.token, index as u64).is_some()
                })
        })
    }

    fn new(name: &'static str, lens: [usize; 3], heads: [usize; 3], mask: OracleMask) -> Self {
        let [batch, q_len, kv_len] = lens;
        let [q_heads, kv_heads, head_dim] = heads;
        // Any fixed number that differs between cases; FNV-1a of the name survives reordering of the list.
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
        Self { name, seed, problem, poison: Vec::new(), pairs: None }
    }

    fn q_offset(mut self, q_offset: u64) -> Self {
        self.problem.q_offset = q_offset;
        self
    }

    fn mask_tensor(mut self, batch: usize, heads: usize) -> Self {
        self.pairs = Some(CasePairs { bias: false, batch, heads });
        self
    }

    fn bias(mut self, batch: usize, heads: usize) -> Self {
        self.pairs = Some(CasePairs { bias: true, batch, heads });
        self
    }

    /// Made-up sinks, moved by `shift`.
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
    let mut all = sizes();
    all.extend(masks());
    all.extend(scores());
    all.extend(poison());
    all.extend(pairs());
    all
}

fn pairs() -> Vec<Case> {
    let full = OracleMask::full;
    let causal = OracleMask::causal;
    let valid = |lengths: &[u64]| OracleTerm::Valid(lengths.to_vec());
    vec![
        Case::new("mask tensor", [1, 65, 65], [4, 2, 32], full()).mask_tensor(1, 1),
        Case::new("mask tensor for each head, causal", [2, 33, 33], [6, 2, 16], causal()).mask_tensor(2, 6),
        Case::new("mask tensor, fewer queries", [2, 31, 65], [3, 1, 64], causal())
            .q_offset(20)
            .mask_tensor(2, 1),
        Case::new("bias for each head", [1, 33, 33], [4, 2, 32], full()).bias(1, 4),
        Case::new(
            "bias for each batch entry, causal and padded",
            [3, 33, 33],
            [2, 1, 16],
            causal().and(valid(&[33, 20, 0])),
        )
        .bias(3, 1),
        Case::new("bias, softcap and sinks", [1, 65, 65], [4, 1, 64], causal())
            .scaled(3.0)
            .softcap(2.0)
            .sinks(2.0)
            .bias(1, 1),
        Case::new("bias, one query over many keys", [2, 1, 300], [8, 2, 64], full()).bias(2, 8),
        Case::new("mask tensor, two queries over many keys", [1, 2, 270], [4, 2, 32], full())
            .mask_tensor(1, 4),
        Case::new("mask tensor that empties tiles", [1, 45, 270], [2, 1, 16], full()).mask_tensor(1, 2),
        Case::new("bias that empties tiles", [1, 45, 270], [2, 2, 16], causal()).q_offset(225).bias(1, 1),
        Case::new("NaN that a mask tensor hides", [1, 65, 65], [4, 2, 16], full())
            .mask_tensor(1, 4)
            .poisoned(0, 40, 0, f32::NAN)
            .poisoned(0, 64, 1, f32::INFINITY),
        Case::new("NaN that a bias hides", [1, 65, 65], [2, 1, 32], causal()).bias(1, 1).poisoned(
            0,
            33,
            0,
            f32::NAN,
        ),
    ]
}

fn sizes() -> Vec<Case> {
    let full = OracleMask::full;
    let causal = OracleMask::causal;
    vec![
        Case::new("one query, one key", [1, 1, 1], [1, 1, 8], full()),
        Case::new("one token, causal, grouped", [2, 1, 1], [4, 2, 16], causal()),
        Case::new("seven rows", [1, 7, 7], [2, 2, 16], causal()),
        Case::new("one row short of a tile", [1, 31, 31], [4, 2, 32], causal()),
        Case::new("one row beyond a tile", [2, 33, 33], [4, 4, 64], full()),
        Case::new("one row beyond two tiles", [1, 65, 65], [4, 1, 64], causal()),
        Case::new("two rows beyond four tiles", [1, 130, 130], [2, 1, 32], causal()),
        Case::new("three batch entries", [3, 33, 31], [2, 1, 16], full()),
        Case::new("eight query heads to a key head", [1, 33, 33], [8, 1, 16], causal()),
        Case::new("groups of eight", [1, 7, 31], [16, 2, 8], full()),
        Case::new("three heads, odd over any split", [1, 31, 31], [3, 3, 16], causal()),
        Case::new("six query heads in groups of two", [1, 33, 33], [6, 3, 16], causal()),
        Case::new("head dim 72", [1, 33, 33], [2, 1, 72], causal()),
        Case::new("head dim 80", [1, 31, 33], [2, 2, 80], full()),
        Case::new("head dim 96", [1, 33, 31], [2, 1, 96], causal()),
        Case::new("head dim 128", [1, 65, 65], [2, 1, 128], causal()),
        Case::new("head dim 256", [1, 33, 33], [2, 1, 256], causal()),
        Case::new("one query over many keys", [2, 1, 130], [8, 2, 64], full()),
        Case::new("more queries than keys", [1, 130, 7], [2, 2, 32], full()),
    ]
}

fn masks() -> Vec<Case> {
    let full = OracleMask::full;
    let causal = OracleMask::causal;
    let window = |left, right| OracleTerm::Window { left, right };
    let documents = |ends: &[u64]| OracleTerm::Documents(ends.to_vec());
    let valid = |lengths: &[u64]| OracleTerm::Valid(lengths.to_vec());
    vec![
        Case::new("window on both sides", [1, 65, 65], [2, 1, 32], full().and(window(5, 3))),
        Case::new("window to the left", [1, 65, 65], [2, 1, 32], full().and(window(7, 0))),
        Case::new("window to the right", [1, 65, 65], [2, 1, 32], full().and(window(0, 9))),
        Case::new("window without left bound", [1, 33, 33], [2, 2, 16], full().and(window(-1, 4))),
        Case::new("window without right bound", [1, 33, 33], [2, 2, 16], full().and(window(4, -1))),
        Case::new("window of the key itself", [1, 33, 33], [2, 1, 16], full().and(window(0, 0))),
        Case::new("causal window wider than a tile", [1, 130, 130], [2, 1, 32], causal().and(window(40, -1))),
        Case::new("documents", [1, 65, 65], [4, 2, 32], full().and(documents(&[0, 1, 20, 33, 65]))),
        Case::new("causal documents", [2, 65, 65], [2, 1, 32], causal().and(documents(&[0, 31, 33, 64, 65]))),
        Case::new("an empty document", [1, 31, 31], [2, 1, 16], full().and(documents(&[0, 12, 12, 31]))),
        Case::new("one valid length", [2, 33, 33], [2, 2, 32], full().and(valid(&[19]))),
        Case::new("a valid length for each entry", [3, 33, 65], [2, 1, 32], full().and(valid(&[65, 1, 34]))),
        Case::new("an entry without a valid key", [3, 31, 33], [4, 2, 16], full().and(valid(&[33, 0, 17]))),
        Case::new("causal with valid lengths", [2, 33, 33], [2, 1, 16], causal().and(valid(&[12, 33]))),
        Case::new(
            "all masks at once",
            [2, 65, 65],
            [4, 2, 32],
            causal().and(window(9, -1)).and(documents(&[0, 24, 40, 65])).and(valid(&[60, 33])),
        ),
        Case::new("decoding into a cache with room", [2, 1, 130], [8, 2, 64], causal().and(window(60, -1)))
            .q_offset(99),
        Case::new(
            "slices: two runs of keys for a row",
            [1, 65, 65],
            [4, 2, 32],
            full().and(slices(&["0..65x0..7", "0..40x20..33", "40..65x30..61/causal"])),
        ),
        Case::new(
            "slices of every part",
            [2, 65, 65],
            [2, 1, 16],
            full().and(slices(&[
                "0..20x5..40/inverse",
                "10..50x33..60/both",
                "20..65x0..30/causal",
                "3..4x0..65",
            ])),
        ),
        Case::new(
            "slices that share a prefix, padded",
            [2, 33, 65],
            [6, 2, 32],
            causal().and(slices(&["0..50x0..12", "32..45x32..45", "45..65x45..65"])).and(valid(&[65, 50])),
        )
        .q_offset(32),
        Case::new(
            "slices, one query over many keys",
            [1, 1, 300],
            [8, 2, 64],
            full().and(slices(&["0..1x0..20", "0..1x70..131", "0..1x210..297"])),
        ),
        Case::new("a chunk after a cache", [1, 33, 65], [4, 2, 32], causal()).q_offset(32),
        Case::new("offset into the middle", [1, 31, 130], [2, 1, 32], causal()).q_offset(50),
        Case::new("offset in documents", [1, 31, 65], [2, 1, 32], full().and(documents(&[0, 40, 65])))
            .q_offset(30),
        Case::new("rows beyond the keys of a window", [1, 33, 31], [2, 1, 16], full().and(window(3, 3)))
            .q_offset(12),
        Case::new("no row sees a key", [1, 7, 33], [2, 1, 16], full().and(window(2, 2))).q_offset(100),
    ]
}

fn scores() -> Vec<Case> {
    let full = OracleMask::full;
    let causal = OracleMask::causal;
    let valid = |lengths: &[u64]| OracleTerm::Valid(lengths.to_vec());
    vec![
        Case::new("thirty times the usual scores", [1, 65, 65], [2, 1, 64], full()).scaled(30.0),
        Case::new("thirty times the usual scores, causal", [1, 130, 130], [4, 2, 32], causal()).scaled(30.0),
        Case::new("negative scale", [1, 33, 33], [2, 1, 32], causal()).scaled(-1.0),
        Case::new("scale zero", [1, 33, 33], [2, 1, 32], causal()).scaled(0.0),
        Case::new("softcap", [1, 65, 65], [4, 2, 32], causal()).scaled(3.0).softcap(1.5),
        Case::new("softcap on extreme scores", [1, 33, 33], [2, 1, 64], full()).scaled(30.0).softcap(20.0),
        Case::new("sinks, causal", [2, 33, 33], [6, 2, 32], causal()).sinks(1.0),
        Case::new("sinks where rows see nothing", [2, 31, 33], [4, 2, 16], full().and(valid(&[33, 0])))
            .sinks(0.0),
        Case::new("sinks above all scores", [1, 65, 65], [3, 1, 64], full()).sinks(5.0),
        Case::new("sinks below extreme scores", [1, 33, 33], [2, 2, 32], causal()).scaled(10.0).sinks(4.0),
        Case::new("sinks, one query over many keys", [1, 1, 130], [8, 2, 64], full()).sinks(3.0),
    ]
}

/// Slices in the words of the command line.
fn slices(texts: &[&str]) -> OracleTerm {
    let mask: OracleMask = format!("slices:{}", texts.join(",")).parse().expect("slices");
    mask.terms.into_iter().next().expect("one term")
}

/// Poison lies in one key head only: with grouped heads, rows of the other must not change either.
fn poison() -> Vec<Case> {
    let valid = |lengths: &[u64]| OracleMask::full().and(OracleTerm::Valid(lengths.to_vec()));
    let documents = OracleMask::full().and(OracleTerm::Documents(vec![0, 20, 33]));
    let window = OracleMask::full().and(OracleTerm::Window { left: 4, right: 2 });
    vec![
        Case::new("NaN in padding", [2, 33, 33], [4, 2, 32], valid(&[19, 30]))
            .poisoned(0, 19, 0, f32::NAN)
            .poisoned(0, 32, 1, f32::NAN)
            .poisoned(1, 30, 1, f32::NAN),
        Case::new("infinity in padding", [2, 33, 33], [2, 1, 32], valid(&[32, 1]))
            .poisoned(0, 32, 0, f32::INFINITY)
            .poisoned(1, 1, 0, f32::NEG_INFINITY)
            .poisoned(1, 17, 0, f32::INFINITY),
        Case::new("NaN where no key is valid", [2, 7, 7], [2, 1, 16], valid(&[7, 0])).poisoned(
            1,
            0,
            0,
            f32::NAN,
        ),
        Case::new("NaN in the last key, causal", [1, 65, 65], [4, 2, 32], OracleMask::causal()).poisoned(
            0,
            64,
            1,
            f32::NAN,
        ),
        Case::new("infinity in the middle, causal", [1, 65, 65], [2, 1, 32], OracleMask::causal()).poisoned(
            0,
            40,
            0,
            f32::INFINITY,
        ),
        Case::new("NaN in one document", [1, 33, 33], [2, 1, 16], documents).poisoned(0, 19, 0, f32::NAN),
        Case::new("NaN that leaves the window", [1, 65, 65], [4, 2, 16], window)
            .poisoned(0, 32, 0, f32::NAN)
            .poisoned(0, 0, 1, f32::NEG_INFINITY),
        Case::new(
            "NaN between the slices of a row",
            [1, 65, 65],
            [4, 2, 16],
            OracleMask::full().and(slices(&["0..65x0..20", "0..30x40..65", "50..65x20..26"])),
        )
        .poisoned(0, 30, 0, f32::NAN)
        .poisoned(0, 23, 1, f32::INFINITY),
    ]
}

#[cfg(test)]
mod tests;
