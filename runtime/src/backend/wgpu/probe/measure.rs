//! Runs the kernels of both sides in turns.

use std::panic::resume_unwind;
use std::thread;
use std::time::Instant;

use bytes::Bytes;
use kyklos_plan::{AttentionProblem, BlockWork, Dtype, TokenRuns};
use pollster::block_on;

use super::comparison::{Candidates, Pass, Probe};
use super::gradients::Gradients;
use super::side::{HEADS, Run, TOKENS, floats, layout, problem, shape, values};
use crate::backend::wgpu::backend::WgpuBackend;
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::wgpu::variant::KernelChoice;
use crate::backend::{Attend, Backend, Control, Operand, StateMut};
use crate::error::Result;

/// Compares the two, each on a device that `open` opens for it alone.
///
/// # Errors
/// Those of `open`, and all that a run can fail with.
pub(in crate::backend::wgpu) fn measure(
    candidates: Candidates,
    open: impl Fn(KernelChoice) -> Result<WgpuBackend>,
) -> Result<Probe> {
    let [portable, matrices] = candidates.choices();
    let head_dim = candidates.head_dim;
    match candidates.pass {
        Pass::Forward(_) => {
            in_turns([Forward::new(open(portable)?, head_dim)?, Forward::new(open(matrices)?, head_dim)?])
        }
        Pass::Gradients(_) => {
            in_turns([Gradients::new(open(portable)?, head_dim)?, Gradients::new(open(matrices)?, head_dim)?])
        }
    }
}

fn in_turns<R: Run>(mut runs: [R; 2]) -> Result<Probe> {
    // The first runs compile, both at the same time.
    let compiled = thread::scope(|scope| {
        let threads = runs.each_mut().map(|run| scope.spawn(|| run.time(1)));
        threads.map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    for time in compiled {
        time?;
    }
    let [portable, matrices] = &mut runs;
    let difference = difference(&portable.results()?, &matrices.results()?, R::RELATIVE);
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

/// The forward pass.
struct Forward {
    backend: WgpuBackend,
    problem: AttentionProblem,
    work: BlockWork,
    qkv: [WgpuBuffer; 3],
    a: WgpuBuffer,
    ml: WgpuBuffer,
}

impl Forward {
    fn new(backend: WgpuBackend, head_dim: u32) -> Result<Self> {
        let problem = problem(head_dim)?;
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
}

impl Run for Forward {
    const RELATIVE: bool = false;

    fn time(&mut self, calls: u32) -> Result<f64> {
        let layout = layout(&self.problem);
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
    fn results(&mut self) -> Result<Vec<Vec<f32>>> {
        let shape = shape(&self.problem);
        let a = floats(&self.backend, &mut self.a, shape.a_bytes())?;
        let ml = floats(&self.backend, &mut self.ml, shape.ml_bytes())?;
        let mut rows = Vec::with_capacity(a.len() + ml.len() / 2);
        for (at, a) in a.chunks_exact(shape.dim).enumerate() {
            let (row, head) = (at / shape.heads, at % shape.heads);
            let [m, l] = [0, 1].map(|part| ml[2 * (head * shape.rows + row) + part]);
            rows.extend(a.iter().map(|sum| sum / l));
            rows.push(m + l.ln());
        }
        Ok(vec![rows])
    }
}

/// The largest difference of two results; NaN if there is one that is not finite.
fn difference(one: &[Vec<f32>], other: &[Vec<f32>], relative: bool) -> f64 {
    let differences = one.iter().zip(other).flat_map(|(one, other)| {
        let largest = one.iter().fold(0.0f32, |most, now| most.max(now.abs()));
        let unit = if relative { f64::from(largest) } else { 1.0 };
        one.iter().zip(other).map(move |(a, b)| (f64::from(*a) - f64::from(*b)).abs() / unit)
    });
    differences
        .fold(0.0, |most: f64, now| if most.is_nan() || !now.is_finite() { f64::NAN } else { most.max(now) })
}

/// Rounds in which each kernel is timed, seconds of a round, and calls in it.
const ROUNDS: usize = 5;
const ROUND_S: f64 = 0.01;
const MOST_REPEATS: f64 = 50.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_that_is_not_finite_is_never_lost() {
        let difference = |one: [f32; 3], other: [f32; 3], relative| {
            difference(&[vec![0.5], one.to_vec()], &[vec![0.5], other.to_vec()], relative)
        };
        assert_eq!(difference([1.0, 2.0, -1.0], [1.0, 2.5, -1.25], false), 0.5);
        assert_eq!(difference([1.0, 2.0, -1.0], [1.0, 2.5, -1.25], true), 0.25);
        for odd in [f32::NAN, f32::INFINITY] {
            for relative in [false, true] {
                assert!(difference([odd, 1.0, 2.0], [1.0, 1.0, 2.0], relative).is_nan());
                assert!(difference([2.0, odd, 1.0], [1.0, 1.0, 2.0], relative).is_nan());
                assert!(difference([1.0, 2.0, odd], [1.0, 1.0, odd], relative).is_nan());
            }
        }
        assert!(difference([0.0; 3], [0.0; 3], true).is_nan(), "sums of nothing say nothing");
    }
}
