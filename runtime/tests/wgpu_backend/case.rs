//! One call of the backend, compared with naive f64 attention.

use bytes::Bytes;
use kyklos::backend::wgpu::{WgpuBackend, WgpuBuffer};
use kyklos::backend::{Attend, Backend, Control, Layout, Operand, State, StateMut, StateShape};
use kyklos::{AttentionProblem, BlockWork, Dtype, Error, TokenRuns};
use pollster::block_on;

use crate::naive::{self, Random, loaded, rounded, stored};

/// A problem with data, and how it is cut into blocks.
pub(crate) struct Case {
    pub(crate) problem: AttentionProblem,
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) q_tokens: TokenRuns,
    pub(crate) kv_blocks: Vec<TokenRuns>,
}

impl Case {
    pub(crate) fn new(shape: [u32; 5], dtype: Dtype, mask: &str) -> Self {
        let problem = AttentionProblem::new(shape, dtype, mask.parse().unwrap()).unwrap();
        Self::of(problem)
    }

    pub(crate) fn of(problem: AttentionProblem) -> Self {
        let mut random = Random(7);
        let elements = |seq: u32, heads: u32| (problem.batch * seq * heads * problem.head_dim) as usize;
        Self {
            q: random.tensor(problem.dtype, elements(problem.q_len, problem.q_heads)),
            k: random.tensor(problem.dtype, elements(problem.kv_len, problem.kv_heads)),
            v: random.tensor(problem.dtype, elements(problem.kv_len, problem.kv_heads)),
            q_tokens: TokenRuns::contiguous(0..problem.q_len),
            kv_blocks: vec![TokenRuns::contiguous(0..problem.kv_len)],
            problem,
        }
    }

    pub(crate) fn shape(&self) -> StateShape {
        StateShape {
            batch: self.problem.batch as usize,
            rows: self.q_tokens.len(),
            heads: self.problem.q_heads as usize,
            dim: self.problem.head_dim as usize,
        }
    }

    /// The rows `tokens` of a tensor, spread out in a buffer: an offset, gaps between heads, rows
    /// and batch entries, and NaN in the gaps.
    pub(crate) fn operand(
        &self,
        backend: &WgpuBackend,
        data: &[f32],
        tokens: &TokenRuns,
        seq: u32,
        heads: u32,
    ) -> Result<(WgpuBuffer, Layout), Error> {
        let [seq, heads, dim, batch] =
            [seq, heads, self.problem.head_dim, self.problem.batch].map(|n| n as usize);
        let layout = Layout {
            offset: 24,
            head_stride: dim + 8,
            row_stride: heads * (dim + 8) + 16,
            batch_stride: tokens.len() * (heads * (dim + 8) + 16) + 40,
        };
        let mut spread = vec![f32::NAN; layout.offset + batch * layout.batch_stride];
        for b in 0..batch {
            for (row, token) in tokens.iter().enumerate() {
                for h in 0..heads {
                    let from = ((b * seq + token as usize) * heads + h) * dim;
                    let into = layout.offset
                        + b * layout.batch_stride
                        + row * layout.row_stride
                        + h * layout.head_stride;
                    spread[into..into + dim].copy_from_slice(&data[from..from + dim]);
                }
            }
        }
        let bytes = Bytes::from(stored(self.problem.dtype, &spread));
        Ok((backend.upload("operand", bytes)?, layout))
    }

    /// Attends to every block, into a state that is empty at first.
    pub(crate) fn state(&self, backend: &WgpuBackend) -> (WgpuBuffer, WgpuBuffer) {
        let shape = self.shape();
        let mut a = poisoned(backend, shape.a_bytes());
        let mut ml = poisoned(backend, shape.ml_bytes());
        let mut state = StateMut { a: &mut a, ml: &mut ml, shape };
        backend.reset_state(&mut state).unwrap();
        for kv_tokens in &self.kv_blocks {
            block_on(self.attend(backend, kv_tokens, &mut a, &mut ml, &Control::default())).unwrap();
        }
        (a, ml)
    }

    pub(crate) async fn attend(
        &self,
        backend: &WgpuBackend,
        kv_tokens: &TokenRuns,
        a: &mut WgpuBuffer,
        ml: &mut WgpuBuffer,
        control: &Control,
    ) -> Result<(), Error> {
        let p = &self.problem;
        let (q, q_layout) = self.operand(backend, &self.q, &self.q_tokens, p.q_len, p.q_heads)?;
        let (k, k_layout) = self.operand(backend, &self.k, kv_tokens, p.kv_len, p.kv_heads)?;
        let (v, v_layout) = self.operand(backend, &self.v, kv_tokens, p.kv_len, p.kv_heads)?;
        let tile = backend.tile_shape(p, self.shape());
        let work = &BlockWork::layers(p, &self.q_tokens, kv_tokens, tile)[0];
        let kv_head_of: Vec<u32> = (0..p.q_heads).map(|head| head / p.group()).collect();
        let args = Attend {
            dtype: p.dtype,
            scale: p.scale,
            softcap: p.softcap,
            q: Operand { buffer: &q, layout: q_layout },
            k: Operand { buffer: &k, layout: k_layout },
            v: Operand { buffer: &v, layout: v_layout },
            kv_head_of: &kv_head_of,
            work,
            bias: None,
            fixed_order: false,
            inference: true,
            state: StateMut { a, ml, shape: self.shape() },
        };
        backend.attend(args, control).await
    }

    /// Output in `dtype` and log-sum-exp, `[batch, rows, heads, ·]`.
    pub(crate) fn output(&self, backend: &WgpuBackend, dtype: Dtype) -> (Vec<f32>, Vec<f32>) {
        let (a, ml) = self.state(backend);
        let shape = self.shape();
        let mut o = poisoned(backend, shape.a_bytes() / 4 * dtype.bytes());
        let mut lse = poisoned(backend, shape.lse_bytes());
        let state = State { a: &a, ml: &ml, shape };
        backend.finalize(&state, &[], dtype, &mut o, &mut lse).unwrap();
        let o = read(backend, &mut o, shape.a_bytes() / 4 * dtype.bytes());
        let lse = read(backend, &mut lse, shape.lse_bytes());
        (loaded(dtype, &o), loaded(Dtype::F32, &lse).into_iter().step_by(2).collect())
    }

    /// Matrix units take weights in f16: each is off by 2^-11 of itself, and o by as much of the
    /// largest value.
    pub(crate) fn weight_rounding(&self, backend: &WgpuBackend) -> f64 {
        if self.problem.dtype == Dtype::F16 && backend.info().kernel.starts_with("cooperative") {
            let largest = self.v.iter().map(|v| f64::from(v.abs())).filter(|v| v.is_finite());
            largest.fold(0.0, f64::max) / 2048.0
        } else {
            0.0
        }
    }

    /// Compares with f64, and the rounded output with the output rounded.
    pub(crate) fn check(&self, backend: &WgpuBackend, what: &str) {
        self.check_within(TOLERANCE, backend, what);
    }

    pub(crate) fn check_within(&self, tolerance: f64, backend: &WgpuBackend, what: &str) {
        let tolerance = tolerance + self.weight_rounding(backend);
        let (o, lse) = self.output(backend, Dtype::F32);
        let shape = self.shape();
        let mut worst = (0.0, String::new());
        for b in 0..shape.batch {
            for (r, token) in self.q_tokens.iter().enumerate() {
                for h in 0..shape.heads {
                    let at = (b * shape.rows + r) * shape.heads + h;
                    let (want_o, want_lse) =
                        naive::row(&self.problem, [&self.q, &self.k, &self.v], b, token as usize, h);
                    let got = &o[at * shape.dim..][..shape.dim];
                    for (d, (got, want)) in got.iter().zip(&want_o).enumerate() {
                        let error = (f64::from(*got) - want).abs();
                        if error.is_nan() || error > worst.0 {
                            worst = (
                                if error.is_nan() { f64::INFINITY } else { error },
                                format!("o[{b}, {token}, {h}, {d}] = {got}, f64 says {want}"),
                            );
                        }
                    }
                    let got = f64::from(lse[at]);
                    let error = (got - want_lse).abs() / want_lse.abs().max(1.0);
                    if got != want_lse && (error.is_nan() || error > worst.0) {
                        worst = (
                            if error.is_nan() { f64::INFINITY } else { error },
                            format!("lse[{b}, {token}, {h}] = {got}, f64 says {want_lse}"),
                        );
                    }
                }
            }
        }
        assert!(
            worst.0 < tolerance,
            "{what} on {}: {} (error {:e})",
            backend.info().kernel,
            worst.1,
            worst.0
        );
        if self.problem.dtype != Dtype::F32 {
            let (narrow, _) = self.output(backend, self.problem.dtype);
            for (at, (narrow, o)) in narrow.iter().zip(&o).enumerate() {
                assert_eq!(*narrow, rounded(self.problem.dtype, *o), "{what}: o rounded at {at}");
            }
        }
    }
}

/// For outputs of size 1 from sums of some hundred keys in f32.
pub(crate) const TOLERANCE: f64 = 3e-6;

/// A buffer full of NaN.
pub(crate) fn poisoned(backend: &WgpuBackend, bytes: usize) -> WgpuBuffer {
    backend.upload("poisoned", Bytes::from(vec![0xff; bytes])).unwrap()
}

pub(crate) fn read(backend: &WgpuBackend, buffer: &mut WgpuBuffer, bytes: usize) -> Bytes {
    block_on(backend.download(buffer, 0..bytes)).unwrap()
}
