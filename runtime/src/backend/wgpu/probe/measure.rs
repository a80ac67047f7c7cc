//! Runs the two kernels in turns.

use std::panic::resume_unwind;
use std::thread;
use std::time::Instant;

use bytes::Bytes;
use kyklos_plan::{AttentionProblem, BlockWork, Dtype, TokenRuns};
use kyklos_shaders::AttendVariant;
use pollster::block_on;

use super::comparison::{Candidates, Probe};
use crate::backend::wgpu::backend::WgpuBackend;
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::{Attend, Backend, Control, Layout, Operand, StateMut, StateShape};
use crate::error::Result;

/// Compares the two, each on a device that `open` opens for it alone.
///
/// # Errors
/// Those of `open`, and all that a run can fail with.
pub(in crate::backend::wgpu) fn measure(
    candidates: Candidates,
    open: impl Fn(AttendVariant) -> Result<WgpuBackend>,
) -> Result<Probe> {
    let Candidates { portable, matrices, head_dim } = candidates;
    let mut runs = [Run::new(open(portable)?, head_dim)?, Run::new(open(matrices)?, head_dim)?];
    // The first runs compile, both at the same time.
    let compiled = thread::scope(|scope| {
        let threads = runs.each_mut().map(|run| scope.spawn(|| run.time(1)));
        threads.map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    for time in compiled {
        time?;
    }
    let [portable, matrices] = &mut runs;
    let difference = difference(&portable.rows()?, &matrices.rows()?);
    let mut shortest_s = [f64::INFINITY; 2];
    let mut repeats = [1; 2];
    for round in 0..=ROUNDS {
        for ((run, repeats), shortest_s) in runs.iter_mut().zip(&mut repeats).zip(&mut shortest_s) {
            let run_s = run.time(*repeats)?;
            // Long compared with what a submission takes.
            if round == 0 {
                *repeats = (ROUND_S / run_s).clamp(1.0, MOST_REPEATS) as u32;
            } else {
                *shortest_s = shortest_s.min(run_s);
            }
        }
    }
    Ok(Probe { portable_s: shortest_s[0], matrices_s: shortest_s[1], difference })
}

/// One kernel with its device and tensors.
struct Run {
    backend: WgpuBackend,
    problem: AttentionProblem,
    work: BlockWork,
    qkv: [WgpuBuffer; 3],
    a: WgpuBuffer,
    ml: WgpuBuffer,
}

impl Run {
    fn new(backend: WgpuBackend, head_dim: u32) -> Result<Self> {
        // Causal: tiles with and without tests.
        let problem =
            AttentionProblem::new([1, TOKENS, HEADS, HEADS, head_dim], Dtype::F16, "causal".parse()?)?;
        let tokens = TokenRuns::contiguous(0..TOKENS);
        let tile = backend.tile_shape(&problem, shape(&problem));
        let work = BlockWork::layers(&problem, &tokens, &tokens, tile).swap_remove(0);
        let upload = |label: &str, grows| backend.upload(label, Bytes::from(values(&problem, grows)));
        Ok(Self {
            qkv: [upload("q", false)?, upload("k", true)?, upload("v", false)?],
            a: backend.alloc("a", shape(&problem).a_bytes())?,
            ml: backend.alloc("ml", shape(&problem).ml_bytes())?,
            backend,
            problem,
            work,
        })
    }

    /// Seconds of each of some calls, all into one state, which is empty at first.
    fn time(&mut self, calls: u32) -> Result<f64> {
        let dim = self.problem.head_dim as usize;
        let heads = HEADS as usize;
        let layout = Layout {
            offset: 0,
            batch_stride: TOKENS as usize * heads * dim,
            row_stride: heads * dim,
            head_stride: dim,
        };
        let shape = shape(&self.problem);
        self.backend.reset_state(&mut StateMut { a: &mut self.a, ml: &mut self.ml, shape })?;
        block_on(self.backend.wait())?;
        let start = Instant::now();
        let kv_head_of: Vec<u32> = (0..HEADS).collect();
        for _ in 0..calls {
            let [q, k, v] = self.qkv.each_ref().map(|buffer| Operand { buffer, layout });
            let args = Attend {
                dtype: Dtype::F16,
                scale: self.problem.scale,
                softcap: None,
                q,
                k,
                v,
                kv_head_of: &kv_head_of,
                work: &self.work,
                bias: None,
                fixed_order: false,
                inference: true,
                state: StateMut { a: &mut self.a, ml: &mut self.ml, shape },
            };
            block_on(self.backend.attend(args, &Control::default()))?;
        }
        block_on(self.backend.wait())?;
        Ok(start.elapsed().as_secs_f64() / f64::from(calls))
    }

    /// For each row and head, o and the log-sum-exp.
    fn rows(&mut self) -> Result<Vec<f32>> {
        let shape = shape(&self.problem);
        let read = |buffer: &mut WgpuBuffer, bytes: usize| -> Result<Vec<f32>> {
            Ok(bytemuck::pod_collect_to_vec(&block_on(self.backend.download(buffer, 0..bytes))?))
        };
        let (a, ml) = (read(&mut self.a, shape.a_bytes())?, read(&mut self.ml, shape.ml_bytes())?);
        let mut rows = Vec::with_capacity(a.len() + ml.len() / 2);
        for (at, a) in a.chunks_exact(shape.dim).enumerate() {
            let (row, head) = (at / shape.heads, at % shape.heads);
            let [m, l] = [0, 1].map(|part| ml[2 * (head * shape.rows + row) + part]);
            rows.extend(a.iter().map(|sum| sum / l));
            rows.push(m + l.ln());
        }
        Ok(rows)
    }
}

fn shape(problem: &AttentionProblem) -> StateShape {
    StateShape { batch: 1, rows: TOKENS as usize, heads: HEADS as usize, dim: problem.head_dim as usize }
}

/// Values in -1..1 in f16. If they grow, later rows are longer by 2, 4 and 8, so that the maxima of
/// logits move as they do in a model.
fn values(problem: &AttentionProblem, grows: bool) -> Vec<u8> {
    let row = (HEADS * problem.head_dim) as usize;
    let factor = |at: usize| if grows { f32::from(1u8 << (at / row * 4 / TOKENS as usize)) } else { 1.0 };
    (0..TOKENS as usize * row)
        .map(|at| ((at * 7919) % 2017) as f32 / 1008.5 - 1.0)
        .map(half::f16::from_f32)
        .enumerate()
        .flat_map(|(at, x)| half::f16::from_f32(x.to_f32() * factor(at)).to_le_bytes())
        .collect()
}

/// The largest difference; NaN if there is one that is not finite.
fn difference(one: &[f32], other: &[f32]) -> f64 {
    let differences = one.iter().zip(other).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    differences
        .fold(0.0, |most: f64, now| if most.is_nan() || !now.is_finite() { f64::NAN } else { most.max(now) })
}

/// Query rows and keys, and heads: enough for many GPUs to be busy, and milliseconds on most.
const TOKENS: u32 = 2048;
const HEADS: u32 = 4;
/// Rounds in which each kernel is timed, seconds of a round, and calls in it.
const ROUNDS: usize = 5;
const ROUND_S: f64 = 0.01;
const MOST_REPEATS: f64 = 50.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_that_is_not_finite_is_never_lost() {
        assert_eq!(difference(&[1.0, 2.0, -1.0], &[1.0, 2.5, -1.25]), 0.5);
        for odd in [f32::NAN, f32::INFINITY] {
            assert!(difference(&[odd, 1.0, 2.0], &[1.0, 1.0, 2.0]).is_nan());
            assert!(difference(&[2.0, odd, 1.0], &[1.0, 1.0, 2.0]).is_nan());
            assert!(difference(&[1.0, 2.0, odd], &[1.0, 1.0, odd]).is_nan());
        }
    }
}
