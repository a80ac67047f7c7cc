//! Gradients in f64, written directly from the derivative of each operation.
//!
//! For a scalar `L` with the derivatives `dO = ∂L/∂o` and `dLSE = ∂L/∂lse`, and one query row and
//! head:
//!
//! ```text
//! s = scale · q·k    c = tanh(s / cap)    x = cap · c + bias    (no softcap: x = s + bias)
//! P = exp(x − lse)                        δ = dO·o − dLSE
//! dX = P · (dO·v − δ)    dBias = dX       dS = dX · (1 − c²)
//! dQ = scale · Σ dS · k    dK = scale · Σ dS · q    dV = Σ P · dO    dSink = −Σ exp(sink − lse) · δ
//! ```
//!
//! lse is over all keys of the row and its sink. Query heads that share a key/value head add to the
//! same dK and dV.

use super::{BiasValues, Oracle, OracleBias, OracleError, RowId, Tensor4, Values};

/// The gradients of one problem. Each has the shape and the linear order of its tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// Of q: `[batch, q_len, q_heads, head_dim]`.
    pub dq: Vec<f64>,
    /// Of k: `[batch, kv_len, kv_heads, head_dim]`.
    pub dk: Vec<f64>,
    /// Of v, shaped as that of k.
    pub dv: Vec<f64>,
    /// Of the sinks, one for each query head; empty without sinks.
    pub d_sinks: Vec<f64>,
    /// Of an additive bias tensor, in its own shape: elements that several rows read get the sum.
    /// Otherwise empty.
    pub d_bias: Vec<f64>,
}

impl Gradients {
    pub(crate) fn zeros(oracle: &Oracle<'_>) -> Self {
        let problem = oracle.problem();
        let elements = |shape: [usize; 4]| vec![0.0; shape.iter().product()];
        Self {
            dq: elements(problem.q_shape()),
            dk: elements(problem.kv_shape()),
            dv: elements(problem.kv_shape()),
            d_sinks: vec![0.0; problem.sinks.len()],
            d_bias: vec![0.0; oracle.bias_elements()],
        }
    }
}

/// One visible key of a row.
struct Seen {
    key: usize,
    /// The score, softcap and bias included.
    x: f64,
    /// `1 − tanh²` of the softcap, 1 without a softcap.
    slope: f64,
}

impl Oracle<'_> {
    /// The gradients of `L = Σ d_o · o + Σ d_lse · lse`. `d_o` is shaped as the output, `d_lse` as
    /// the log-sum-exp `[batch, q_heads, q_len]`; without it, `L` does not depend on the
    /// log-sum-exp. Refuses tensors of other lengths.
    ///
    /// A row that sees no key gives no gradient, except to its sink. A row whose visible scores are
    /// all −∞ gives none.
    pub fn gradients(&self, d_o: Values<'_>, d_lse: Option<Values<'_>>) -> Result<Gradients, OracleError> {
        let problem = self.problem;
        let d_o = Tensor4::new(problem.q_shape(), d_o)?;
        if let Some(d_lse) = d_lse {
            let [batch, heads, rows] = problem.lse_shape();
            Tensor4::new([batch, heads, rows, 1], d_lse)?;
        }
        let mut sum = Gradients::zeros(self);
        for id in problem.row_ids() {
            let d_lse = d_lse.map_or(0.0, |d_lse| d_lse.get(problem.lse_index(id)));
            self.add_row(id, d_o, d_lse, &mut sum);
        }
        Ok(sum)
    }

    /// Adds the gradients of one row.
    fn add_row(&self, id: RowId, d_o: Tensor4<'_>, d_lse: f64, sum: &mut Gradients) {
        let problem = self.problem;
        let dim = problem.head_dim;
        let kv_head = problem.kv_head(id.head);
        let (mut q, mut grad, mut vector) = (vec![0.0; dim], vec![0.0; dim], vec![0.0; dim]);
        self.q.read_vector(id.batch, id.row, id.head, &mut q);
        d_o.read_vector(id.batch, id.row, id.head, &mut grad);
        let (o, [max, total]) = self.normalised(id);
        let seen = self.seen(id, &q);
        let sink = problem.sinks.get(id.head).copied();
        let all_hidden = seen.iter().all(|seen| seen.x == f64::NEG_INFINITY);
        if all_hidden && sink.is_none() {
            return;
        }
        let delta = dot(&grad, &o) - d_lse;
        if let Some(sink) = sink {
            sum.d_sinks[id.head] -= (sink - max).exp() / total * delta;
        }
        let dq_at = problem.o_index(id);
        for Seen { key, x, slope } in seen {
            let p = (x - max).exp() / total;
            self.v.read_vector(id.batch, key, kv_head, &mut vector);
            let dx = p * (dot(&grad, &vector) - delta);
            if let Some(index) = self.bias_index(id, key) {
                sum.d_bias[index] += dx;
            }
            let ds = problem.scale * dx * slope;
            let kv_at = ((id.batch * problem.kv_len + key) * problem.kv_heads + kv_head) * dim;
            self.k.read_vector(id.batch, key, kv_head, &mut vector);
            for d in 0..dim {
                sum.dq[dq_at + d] += ds * vector[d];
                sum.dk[kv_at + d] += ds * q[d];
                sum.dv[kv_at + d] += p * grad[d];
            }
        }
    }

    /// The keys that a row sees, ascending.
    fn seen(&self, id: RowId, q: &[f64]) -> Vec<Seen> {
        let problem = self.problem;
        let mut k = vec![0.0; problem.head_dim];
        let mut seen = Vec::new();
        for key in 0..problem.kv_len {
            let Some(term) = self.term(id, key) else { continue };
            self.k.read_vector(id.batch, key, problem.kv_head(id.head), &mut k);
            let score = problem.scale * dot(q, &k);
            let (capped, slope) = match problem.softcap {
                None => (score, 1.0),
                Some(cap) => {
                    let c = (score / cap).tanh();
                    (cap * c, 1.0 - c * c)
                }
            };
            seen.push(Seen { key, x: capped + term, slope });
        }
        seen
    }

    /// Elements of the additive bias tensor; 0 without one.
    pub(crate) fn bias_elements(&self) -> usize {
        match self.bias {
            Some(OracleBias { values: BiasValues::Bias(values), .. }) => values.len(),
            _ => 0,
        }
    }

    /// Where the additive bias tensor holds the term of a pair.
    pub(crate) fn bias_index(&self, id: RowId, key: usize) -> Option<usize> {
        let bias = self.bias.filter(|bias| matches!(bias.values, BiasValues::Bias(_)))?;
        let of = |extent: usize, index: usize| if extent == 1 { 0 } else { index };
        let row = (of(bias.batch, id.batch) * bias.heads + of(bias.heads, id.head)) * bias.queries
            + of(bias.queries, id.row);
        Some(row * self.problem.kv_len + key)
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::{TensorId, cases, normal};
    use crate::oracle::{Dtype, OracleProblem};

    /// The tensors of a problem in f64, with a direction in which they are moved.
    struct Moved<'a> {
        problem: &'a OracleProblem,
        bias: Option<OracleBias<'a>>,
        seed: u64,
        h: f64,
    }

    impl Moved<'_> {
        fn element(&self, tensor: TensorId, index: usize) -> f64 {
            let at = |seed| f64::from(normal(seed, tensor, index as u64));
            at(self.seed) + self.h * at(self.seed + 1)
        }

        /// `L` and, where the tensors are not moved, its gradients.
        fn evaluate(&self, d_o: Values<'_>, d_lse: Values<'_>) -> (f64, Gradients) {
            let problem = OracleProblem {
                sinks: (0..self.problem.sinks.len())
                    .map(|head| self.element(TensorId::Sinks, head))
                    .collect(),
                ..self.problem.clone()
            };
            let q = |index| self.element(TensorId::Q, index);
            let k = |index| self.element(TensorId::K, index);
            let v = |index| self.element(TensorId::V, index);
            let values = |len, read| Values::Read { dtype: Dtype::F32, len, read };
            let kv_len = problem.kv_shape().iter().product();
            let oracle = Oracle::new(
                &problem,
                values(problem.q_shape().iter().product(), &q),
                values(kv_len, &k),
                values(kv_len, &v),
            )
            .unwrap();
            let given = self.bias.map(|bias| match bias.values {
                BiasValues::Bias(values) => values,
                BiasValues::Visible(_) => panic!("an additive bias"),
            });
            let bias = |index| {
                let move_by = self.h * f64::from(normal(self.seed + 1, TensorId::Bias, index as u64));
                given.map_or(0.0, |given| given.get(index)) + move_by
            };
            let oracle = match (self.bias, given) {
                (Some(tensor), Some(given)) => {
                    let values = BiasValues::Bias(values(given.len(), &bias));
                    oracle.with_bias(OracleBias { values, ..tensor }).unwrap()
                }
                _ => oracle,
            };
            let mut total = 0.0;
            for row in oracle.all_rows() {
                let at = problem.o_index(row.id);
                total += row.o.iter().enumerate().map(|(d, o)| o * d_o.get(at + d)).sum::<f64>();
                if row.lse.is_finite() {
                    total += row.lse * d_lse.get(problem.lse_index(row.id));
                }
            }
            (total, oracle.gradients(d_o, Some(d_lse)).unwrap())
        }
    }

    #[test]
    fn gradients_are_the_slopes_of_the_forward_pass() {
        let mut kinds = [false; 5];
        for case in cases().iter().filter(|case| case.poison.is_empty()) {
            let problem = &case.problem;
            let bias = case.bias.filter(|bias| bias.additive);
            let work = problem.batch * problem.q_len * problem.q_heads * problem.kv_len * problem.head_dim;
            if work > 150_000 || case.bias.is_some() != bias.is_some() {
                continue;
            }
            kinds[0] |= problem.softcap.is_some();
            kinds[1] |= !problem.sinks.is_empty();
            kinds[2] |= bias.is_some();
            kinds[3] |= problem.q_heads > problem.kv_heads;
            kinds[4] |= problem.batch > 1;
            let inputs = case.inputs::<f32>();
            let read_o = |index| f64::from(normal(case.seed + 7, TensorId::OutputGradient, index as u64));
            let read_lse = |index| f64::from(normal(case.seed + 8, TensorId::OutputGradient, index as u64));
            let values = |len, read| Values::Read { dtype: Dtype::F32, len, read };
            let d_o = values(problem.q_shape().iter().product(), &read_o);
            let d_lse = values(problem.lse_shape().iter().product(), &read_lse);
            let at = |h| {
                Moved { problem, bias: inputs.oracle_bias(case), seed: case.seed, h }.evaluate(d_o, d_lse)
            };

            const H: f64 = 1e-6;
            let ((ahead, _), (behind, _), (_, gradients)) = (at(H), at(-H), at(0.0));
            let slope = (ahead - behind) / (2.0 * H);
            let along = |gradient: &[f64], tensor| {
                let direction = |index| f64::from(normal(case.seed + 1, tensor, index as u64));
                gradient.iter().enumerate().map(|(index, g)| g * direction(index)).sum::<f64>()
            };
            let Gradients { dq, dk, dv, d_sinks, d_bias } = &gradients;
            let predicted = along(dq, TensorId::Q)
                + along(dk, TensorId::K)
                + along(dv, TensorId::V)
                + along(d_sinks, TensorId::Sinks)
                + along(d_bias, TensorId::Bias);
            // A difference of two f64 sums of this size, divided by 2h, has an error of about 1e-9.
            let size = slope.abs().max(1.0);
            assert!((slope - predicted).abs() < 1e-7 * size, "{}: {slope} and {predicted}", case.name);
        }
        assert_eq!(kinds, [true; 5], "softcap, sinks, bias, shared heads and batches are among the cases");
    }

    #[test]
    fn rows_without_keys_give_nothing_but_to_their_sink() {
        let none = OracleProblem {
            batch: 1,
            q_len: 1,
            kv_len: 2,
            q_heads: 1,
            kv_heads: 1,
            head_dim: 2,
            scale: 1.0,
            softcap: None,
            mask: "valid:0".parse().unwrap(),
            q_offset: 0,
            sinks: Vec::new(),
        };
        let odd = [f32::NAN, f32::INFINITY, 1.0, 1.0];
        let of = |problem: &OracleProblem, d_o: [f32; 2]| {
            let oracle =
                Oracle::new(problem, Values::F32(&[1.0, 2.0]), Values::F32(&odd), Values::F32(&odd)).unwrap();
            oracle.gradients(Values::F32(&d_o), Some(Values::F32(&[3.0]))).unwrap()
        };
        let nothing = of(&none, [f32::NAN, f32::INFINITY]);
        assert_eq!(nothing.dq, [0.0; 2]);
        assert_eq!((nothing.dk, nothing.dv), (vec![0.0; 4], vec![0.0; 4]));
        let with_sink = of(&OracleProblem { sinks: vec![0.5], ..none }, [1.0, 1.0]);
        assert_eq!(with_sink.d_sinks, [3.0]);
        assert_eq!(with_sink.dq, [0.0; 2]);
    }
}
