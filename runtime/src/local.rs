//! All ranks of a world in one process.
//!
//! [`run_ranks`] gives each rank a thread. [`join_ranks`] runs all ranks as one future on one thread, for programs without
//! threads, such as a page in a browser.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use kyklos_transport::{Rank, Transport};

use crate::host::HostLayout;
use crate::plan::{World, check, plan_hash};
use crate::{Error, Result, RunOptions};

pub use crate::rank_task::RankTask;

/// Whole tensors of a problem, in host memory and in the problem's dtype; or one rank's part of them, see [`shard`].
#[derive(Clone, Debug)]
pub struct Tensors {
    /// `[batch, q_len, q_heads, dim]`.
    pub q: Bytes,
    /// `[batch, kv_len, kv_heads, dim]`.
    pub k: Bytes,
    /// Like `k`.
    pub v: Bytes,
    /// The problem's attention bias tensor, `[its batch, q_len, its heads, row]`; the layout of a row is in [`BiasTensor`](crate::BiasTensor).
    pub bias: Option<Bytes>,
}

/// Proves the plans of `world` and runs all its ranks, each on a thread of its own with one of `transports`. `run` runs a
/// rank's task on a device (see [`RankTask::run_on`]); it is called `repeat` operations once for each rank. Returns the
/// results of `run`, by rank.
///
/// # Errors
/// [`crate::Error::Plan`] when the proof of the plans fails, [`crate::Error::Request`] when the tensors do not have
/// the problem's shape. Errors of ranks are in the result.
///
/// # Panics
/// When `run` panics on any rank (the other ranks end with an error first).
#[cfg(not(target_arch = "wasm32"))]
pub fn run_ranks<T: Send>(
    world: &World,
    transports: Vec<Arc<dyn Transport>>,
    tensors: &Tensors,
    repeat: u64,
    deadline: Duration,
    options: &RunOptions,
    run: impl Fn(RankTask<'_>) -> T + Sync,
) -> Result<Vec<T>> {
    let tasks = tasks(world, transports, tensors, repeat, deadline, options)?;
    let run = &run;
    Ok(std::thread::scope(|scope| {
        // The thread owns the rank's transport. A rank that panics drops it, which tells the other ranks.
        let threads: Vec<_> = tasks
            .into_iter()
            .map(|task| {
                scope.spawn(move || {
                    let transport = task.transport.clone();
                    let done = run(task);
                    // The operations are done. Peers that still wait for a message report their own error.
                    let _ = pollster::block_on(transport.close(deadline));
                    done
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    }))
}

/// As [`run_ranks`], but as one future: while a rank waits, other ranks run. `run` is [`RankTask::run`] on a device,
/// which may be the same for all ranks.
///
/// # Errors
/// As [`run_ranks`].
pub async fn join_ranks<'a, T, F: Future<Output = T>>(
    world: &'a World,
    transports: Vec<Arc<dyn Transport>>,
    tensors: &Tensors,
    repeat: u64,
    deadline: Duration,
    options: &RunOptions,
    run: impl Fn(RankTask<'a>) -> F,
) -> Result<Vec<T>> {
    let tasks = tasks(world, transports, tensors, repeat, deadline, options)?;
    let ranks = tasks.into_iter().map(|task| {
        let transport = task.transport.clone();
        let running = run(task);
        async move {
            let done = running.await;
            // As in `run_ranks`.
            let _ = transport.close(deadline).await;
            done
        }
    });
    Ok(join_all(ranks).await)
}

/// Proves the plans and makes the task of every rank.
fn tasks<'a>(
    world: &'a World,
    transports: Vec<Arc<dyn Transport>>,
    tensors: &Tensors,
    repeat: u64,
    deadline: Duration,
    options: &RunOptions,
) -> Result<Vec<RankTask<'a>>> {
    let checks = check(world)?;
    let identities: Vec<String> =
        (0..world.mesh.world()).map(|rank| format!("rank-{rank}.in-process")).collect();
    let hash = plan_hash(world, &identities);
    let mut tasks = Vec::with_capacity(transports.len());
    for (transport, check) in transports.into_iter().zip(&checks) {
        let Tensors { q, k, v, bias: pairs } = shard(world, transport.rank(), tensors)?;
        tasks.push(RankTask {
            world,
            transport,
            plan_hash: hash,
            peak_bytes: check.peak_bytes,
            q,
            k,
            v,
            bias: pairs,
            repeat,
            deadline,
            options: options.clone(),
        });
    }
    Ok(tasks)
}

/// The part of whole tensors that `rank` holds.
///
/// # Errors
/// [`crate::Error::Request`] when the tensors do not have the problem's shape.
pub fn shard(world: &World, rank: Rank, tensors: &Tensors) -> Result<Tensors> {
    let (q_tokens, kv_tokens) = (world.q_placement.of_rank(rank), &world.kv_placement.held_by(rank));
    let (q, kv) = layouts(world);
    if world.problem.bias.is_some() != tensors.bias.is_some() {
        let (has, given) = if world.problem.bias.is_some() { ("has an", "none") } else { ("has no", "one") };
        return Err(Error::request(
            format!("the problem {has} attention bias tensor, Tensors::bias gives {given}"),
            "use AttentionProblem::with_bias together with Tensors::bias, or neither",
        ));
    }
    let pairs = bias_layout(world).zip(tensors.bias.as_ref());
    Ok(Tensors {
        q: q.gather(&tensors.q, q_tokens)?,
        k: kv.gather(&tensors.k, kv_tokens)?,
        v: kv.gather(&tensors.v, kv_tokens)?,
        bias: pairs.map(|(layout, pairs)| layout.gather(pairs, q_tokens)).transpose()?,
    })
}

/// Layout in host memory of the whole attention bias tensor, if the problem has one.
pub fn bias_layout(world: &World) -> Option<HostLayout> {
    let problem = &world.problem;
    problem.bias.map(|pairs| HostLayout {
        batch: pairs.batch as usize,
        tokens: problem.q_len as usize,
        token_bytes: pairs.heads as usize * pairs.row_bytes(problem.dtype, problem.kv_len),
    })
}

/// Layouts in host memory: of the whole q, which is also that of o, and of the whole k, which is also that of v.
pub fn layouts(world: &World) -> (HostLayout, HostLayout) {
    let problem = &world.problem;
    let layout = |tokens: u32, heads: u32| HostLayout {
        batch: problem.batch as usize,
        tokens: tokens as usize,
        token_bytes: heads as usize * problem.head_dim as usize * problem.dtype.bytes(),
    };
    (layout(problem.q_len, problem.q_heads), layout(problem.kv_len, problem.kv_heads))
}
