//! How fast a device attends: measured on a short call, then on the calls of a session.

use std::sync::Arc;

use kyklos_transport::in_process_group;

use super::{Session, SessionOptions};
use crate::backend::{Backend, Device, ShortWork};
use crate::call::Attention;
use crate::clock::Clock;
use crate::error::Result;
use crate::exec::RunOptions;
use crate::tensor::Tensor;
use kyklos_plan::simulate::Capacity;
use kyklos_plan::{AttentionProblem, Dtype};

/// Calls of one class take times in proportion to their pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallClass {
    dtype: Dtype,
    head_dim: u32,
    heads: [u32; 2],
}

impl CallClass {
    pub(super) fn of(problem: &AttentionProblem) -> Self {
        let (dtype, head_dim, q_heads, kv_heads) =
            (problem.dtype, problem.head_dim, problem.q_heads, problem.kv_heads);
        Self { dtype, head_dim, heads: [q_heads, kv_heads] }
    }
}

impl Device {
    /// How fast this device computes: measured on calls of full attention with the element type,
    /// the head dim and the heads of `problem`, for 0.1 s, after a call of each length up to
    /// one that takes 10 ms. The time in which the device compiles its kernels comes on top.
    ///
    /// # Errors
    /// As [`Session::attend`].
    pub async fn measure(&self, problem: &AttentionProblem, clock: Arc<dyn Clock>) -> Result<Capacity> {
        Probe::warm(self, problem, clock).await?.measure().await
    }
}

/// A device that is ready to be measured: its kernels are compiled, and the length of the calls is
/// chosen.
pub(super) struct Probe {
    session: Session,
    problem: AttentionProblem,
    tokens: u32,
    step_ns: u64,
    /// A device that hangs is found soon.
    _short: ShortWork,
}

impl Probe {
    pub(super) async fn warm(
        device: &Device,
        problem: &AttentionProblem,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        device.supports(problem.dtype, problem.head_dim as usize)?;
        let run = RunOptions { clock, ..RunOptions::default() };
        let options = SessionOptions { run, ..SessionOptions::default() };
        // What the device was given before may take longer.
        device.wait().await?;
        let session = Session::with_options(in_process_group(1).remove(0), device.clone(), options);
        let mut probe = Self {
            session,
            problem: problem.clone(),
            tokens: FIRST_TOKENS,
            step_ns: u64::MAX,
            _short: ShortWork::on(device),
        };
        probe.step().await?;
        // Of each length the first call compiles kernels and allocates.
        while probe.fastest().await? < LONG_ENOUGH_NS && probe.tokens < MOST_TOKENS {
            probe.tokens *= 2;
        }
        Ok(probe)
    }

    /// Mean speed over a time: ranks that share the cores of a machine, and measure at the same
    /// time, all see their part of them.
    pub(super) async fn measure(&mut self) -> Result<Capacity> {
        let clock = self.session.options.run.clock.clone();
        let (began_ns, mut attending_ns, mut calls) = (clock.now_ns(), 0, 0);
        let qkv = self.tensors(self.tokens)?;
        while calls < LEAST_CALLS || clock.now_ns() - began_ns < WINDOW_NS {
            attending_ns += self.call(&qkv).await?;
            calls += 1;
            self.step().await?;
        }
        let tokens = u64::from(self.tokens);
        let pairs = calls * tokens * tokens * u64::from(self.problem.q_heads);
        let attending_ns = attending_ns.saturating_sub(calls * self.step_ns).max(attending_ns / 2);
        Ok(Capacity {
            pairs_per_s: per_second(pairs, attending_ns),
            step_ns: self.step_ns,
            memory_bytes: None,
        })
    }

    /// The fastest of two calls.
    async fn fastest(&mut self) -> Result<u64> {
        let qkv = self.tensors(self.tokens)?;
        Ok(self.call(&qkv).await?.min(self.call(&qkv).await?))
    }

    /// Calls with hardly any work. The fastest of all counts: others waited for the cores.
    async fn step(&mut self) -> Result<()> {
        let qkv = self.tensors(FEW_TOKENS)?;
        for _ in 0..SHORT_CALLS {
            self.step_ns = self.call(&qkv).await?.min(self.step_ns);
        }
        Ok(())
    }

    /// Nanoseconds of computing in one call.
    async fn call(&mut self, [q, kv]: &[Tensor; 2]) -> Result<u64> {
        Ok(self.session.attend_async(&Attention::new(), q, kv, kv).await?.report.compute_ns)
    }

    /// Queries, and keys that are their own values.
    fn tensors(&self, tokens: u32) -> Result<[Tensor; 2]> {
        let (dtype, head_dim, q_heads, kv_heads) =
            (self.problem.dtype, self.problem.head_dim, self.problem.q_heads, self.problem.kv_heads);
        let tensor = |heads: u32| {
            let shape = [1, tokens as usize, heads as usize, head_dim as usize];
            let elements = shape.iter().product();
            match dtype {
                Dtype::F32 => Tensor::new(shape, vec![1.0_f32; elements]),
                Dtype::F16 => Tensor::new(shape, vec![half::f16::ONE; elements]),
                Dtype::Bf16 => Tensor::new(shape, vec![half::bf16::ONE; elements]),
            }
        };
        Ok([tensor(q_heads)?, tensor(kv_heads)?])
    }
}

/// The speed that a call with this work has shown; none if it is too short to tell. It is too short
/// if it would be at the speed that is known: a call of a few pairs that takes long has waited for
/// something else.
pub(super) fn speed_of_call(pairs: u64, steps: u64, compute_ns: u64, known: Capacity) -> Option<u64> {
    let attending_ns = compute_ns.saturating_sub(known.step_ns.saturating_mul(steps));
    let expected_ns = u128::from(pairs) * 1_000_000_000 / u128::from(known.pairs_per_s.max(1));
    let is_long = attending_ns >= SHORTEST_CALL_NS && expected_ns >= u128::from(SHORTEST_CALL_NS);
    is_long.then(|| per_second(pairs, attending_ns))
}

fn per_second(pairs: u64, ns: u64) -> u64 {
    let per_second = u128::from(pairs) * 1_000_000_000 / u128::from(ns.max(1));
    u64::try_from(per_second).unwrap_or(u64::MAX)
}

/// For the time of a step with hardly any work.
const FEW_TOKENS: u32 = 16;
/// Each time.
const SHORT_CALLS: u32 = 3;
const FIRST_TOKENS: u32 = 256;
const MOST_TOKENS: u32 = 8192;
/// Of a call while the speed is measured: much longer than a step.
const LONG_ENOUGH_NS: u64 = 10_000_000;
const WINDOW_NS: u64 = 100_000_000;
const LEAST_CALLS: u64 = 3;
/// Shorter calls of a session say little about the speed of its device.
const SHORTEST_CALL_NS: u64 = 2_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_a_few_pairs_say_nothing_however_long_they_take() {
        let known = Capacity { pairs_per_s: 1_000_000_000, step_ns: 1000, memory_bytes: None };
        let ms = 1_000_000;
        // 10 ms of work, in 11 ms and 10 steps; and 50 times slower.
        assert_eq!(speed_of_call(10_000_000, 10, 11 * ms + 10_000, known), Some(909_090_909));
        assert_eq!(speed_of_call(10_000_000, 0, 500 * ms, known), Some(20_000_000));
        // 1 microsecond of work on cores that are taken away for 8 ms.
        assert_eq!(speed_of_call(1000, 1, 8 * ms, known), None);
        // Much work that takes no time: the clock, or another kind of call.
        assert_eq!(speed_of_call(10_000_000, 0, ms, known), None);
    }
}
