//! The task of one rank wherever it runs, and all ranks in one process: each on a thread of its own, or, where a program
//! has no threads to give as in a browser, all of them taking turns on one.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use kyklos_transport::{Rank, Transport};

use crate::backend::Backend;
use crate::host::HostLayout;
use crate::plan::{World, check, plan_hash};
use crate::{Error, Lasting, RankOutput, Result, RunOptions};

/// Everything one rank needs but a device.
#[derive(Debug)]
pub struct RankTask<'a> {
    /// The plans of all ranks.
    pub world: &'a World,
    /// This rank's way to the others.
    pub transport: Arc<dyn Transport>,
    /// Hash of what all ranks are about to run.
    pub plan_hash: [u8; 32],
    /// Peak bytes that the proof found for this rank.
    pub peak_bytes: u64,
    /// The rank's own queries, `[batch, tokens, q_heads, dim]`.
    pub q: Bytes,
    /// The keys that the rank holds, `[batch, tokens, kv_heads, dim]`: those of every rank, then its own.
    pub k: Bytes,
    /// The rank's own values, like `k`.
    pub v: Bytes,
    /// The rank's own rows of the problem's pair tensor, `[its batch, tokens, its heads, row]`.
    pub bias: Option<Bytes>,
    /// How often to run; operations are numbered from 0.
    pub repeat: u64,
    /// After which time a message or an agreement that is not done is an error.
    pub deadline: Duration,
    /// Clock, observer and the like.
    pub options: RunOptions,
}

impl RankTask<'_> {
    /// [`Self::run`], on this thread until it is done.
    ///
    /// # Errors
    /// As [`Self::run`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn run_on<B: Backend>(self, backend: &B, each: impl FnMut(u64, RankOutput)) -> Result<()> {
        pollster::block_on(self.run(backend, each))
    }

    /// Runs the rank's plan on `backend`; `each` sees the output of every run. The transport stays open for what the
    /// caller may want to send afterwards.
    ///
    /// # Errors
    /// Any; an error of this rank ends the operation on all ranks.
    pub async fn run<B: Backend>(self, backend: &B, each: impl FnMut(u64, RankOutput)) -> Result<()> {
        Lasting::new(backend, self).run(false, each).await
    }
}

/// Whole host tensors of a problem.
#[derive(Clone, Debug)]
pub struct Tensors {
    /// `[batch, q_len, q_heads, dim]`.
    pub q: Bytes,
    /// `[batch, kv_len, kv_heads, dim]`.
    pub k: Bytes,
    /// Like `k`.
    pub v: Bytes,
    /// The problem's pair tensor, `[its batch, q_len, its heads, row]`, as [`BiasTensor`](crate::BiasTensor) says.
    pub bias: Option<Bytes>,
}

/// Runs all ranks of `world`, each on a thread of its own with one of `transports`; `run` brings a rank's task to a
/// device (see [`RankTask::run_on`]). Returns what `run` returned, by rank.
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
        // The thread owns the rank's transport: a rank that panics drops it, and the others hear of it.
        let threads: Vec<_> = tasks
            .into_iter()
            .map(|task| {
                scope.spawn(move || {
                    let transport = task.transport.clone();
                    let done = run(task);
                    // Only what peers have not fetched yet could still go wrong, and they would say so themselves.
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

/// [`run_ranks`] as one future: the ranks take turns wherever one of them waits. `run` is [`RankTask::run`] on a device,
/// which may be the same for all.
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
            // As above.
            let _ = transport.close(deadline).await;
            done
        }
    });
    Ok(join_all(ranks).await)
}

/// Every rank's task, once the plans are proved.
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

/// A rank's own part of the tensors.
///
/// # Errors
/// [`crate::Error::Request`] when the tensors do not have the problem's shape.
pub fn shard(world: &World, rank: Rank, tensors: &Tensors) -> Result<Tensors> {
    let (q_tokens, kv_tokens) = (world.q_placement.of_rank(rank), &world.kv_placement.held_by(rank));
    let (q, kv) = layouts(world);
    if world.problem.bias.is_some() != tensors.bias.is_some() {
        let has = |some| if some { "has" } else { "has not" };
        return Err(Error::request(
            format!(
                "the problem {} a pair tensor, who calls {} one",
                has(world.problem.bias.is_some()),
                has(tensors.bias.is_some())
            ),
            "say AttentionProblem::with_bias and give Tensors::bias, or neither",
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

/// Layout of the whole pair tensor, if the problem has one.
pub fn bias_layout(world: &World) -> Option<HostLayout> {
    let problem = &world.problem;
    problem.bias.map(|pairs| HostLayout {
        batch: pairs.batch as usize,
        tokens: problem.q_len as usize,
        token_bytes: pairs.heads as usize * pairs.row_bytes(problem.dtype, problem.kv_len),
    })
}

/// Layouts of the whole q (and o), and of the whole k and v.
pub fn layouts(world: &World) -> (HostLayout, HostLayout) {
    let problem = &world.problem;
    let layout = |tokens: u32, heads: u32| HostLayout {
        batch: problem.batch as usize,
        tokens: tokens as usize,
        token_bytes: heads as usize * problem.head_dim as usize * problem.dtype.bytes(),
    };
    (layout(problem.q_len, problem.q_heads), layout(problem.kv_len, problem.kv_heads))
}
