//! Gradients in five products, by jobs that share no sums.
//!
//! A job takes a stretch of query rows, of all heads that share a KV head, against a stretch of its
//! keys, and adds to dQ of these rows and to dK and dV of these keys. Jobs run in waves: in wave
//! `w` the stretch of keys `j` meets the stretch of query rows `(j + w) mod n`, so that no two jobs
//! of a wave have the same rows or the same keys. Each sum is added to in the order of the waves,
//! so sums do not depend on the number of threads, and P and dS are in memory for one panel only.

mod accumulate;
mod bias;
mod blocks;
mod job;
mod lanes;
mod operands;
mod panel;
mod run;
mod stats;
mod to_keys;
mod waves;

use std::time::Instant;

use futures_util::future::LocalBoxFuture;
use rayon::iter::{ParallelBridge, ParallelIterator};

pub(super) use self::accumulate::accumulate;
use self::bias::BiasSum;
use self::job::Job;
pub(super) use self::job::Space;
use self::run::Run;
pub(super) use self::stats::row_stats;
use self::waves::{PRODUCTS, Sum, Waves};
use super::bias::BiasRows;
use super::call::{Call, share};
use super::pack::Tensor;
use super::{CpuBackend, CpuBuffer};
use crate::backend::{AttendBackward, Control, Layout, StateShape, yield_now};
use crate::error::Result;
use kyklos_plan::{Dtype, TileShape};

/// Tiles of the backward pass. 96 is a multiple of the rows of a panel on every instruction set,
/// and of a group of 6 or 8 keys.
pub(super) const TILE: TileShape = TileShape { q_rows: 96, kv_cols: 96 };

/// The arguments of one call, as its jobs share them.
pub(super) struct BackwardCall<'a> {
    /// q, k, v and the mask.
    forward: Call<'a>,
    d_o: Tensor<'a>,
    stats: Tensor<'a>,
    /// Whether jobs keep dS for the gradient of the bias.
    of_bias: bool,
}

/// [`crate::backend::Backend::attend_backward`] of this backend.
///
/// In a box: the code of a future is compiled in each crate that awaits it as its own type, with
/// all that it calls in closures.
#[inline(never)]
pub(super) fn attend_backward<'a>(
    backend: &'a CpuBackend,
    args: AttendBackward<'a, CpuBuffer>,
    control: &'a Control,
) -> LocalBoxFuture<'a, Result<()>> {
    Box::pin(backward_in_pieces(backend, args, control))
}

async fn backward_in_pieces(
    backend: &CpuBackend,
    args: AttendBackward<'_, CpuBuffer>,
    control: &Control,
) -> Result<()> {
    let (work, shape) = (args.work, args.shape);
    if work.is_empty() {
        return control.piece_done();
    }
    let bf16 = backend.level.bf16().filter(|_| args.dtype == Dtype::Bf16);
    let tensor = |operand| {
        let tensor = Tensor::new(args.dtype, operand);
        if bf16.is_some() { tensor.in_words() } else { tensor }
    };
    let call = BackwardCall {
        forward: Call {
            q: tensor(args.q),
            k: tensor(args.k),
            v: tensor(args.v),
            work,
            dim: shape.dim,
            scale: args.scale,
            softcap: args.softcap,
            bias: args.bias.as_ref().map(|bias| BiasRows::new(args.dtype, bias)),
            bf16,
            tiles: backend.level.tiles().filter(|_| bf16.is_some()),
        },
        d_o: tensor(args.d_o),
        stats: Tensor::new(Dtype::F32, args.stats),
        of_bias: args.d_bias.is_some(),
    };
    let mut d_bias = args.d_bias.map(BiasSum::new).transpose()?;
    let StateShape { batch, rows, heads, dim } = shape;
    let row = heads * dim;
    let layout = Layout { offset: 0, batch_stride: rows * row, row_stride: row, head_stride: dim };
    let dq =
        Sum { elements: bytemuck::cast_slice_mut(args.dq.bytes_mut()?), layout, batch, rows, heads, dim };
    let heads = args.kv_head_of.iter().max().map_or(0, |head| *head as usize + 1);
    let (layout, rows) = (args.kv_layout, work.kv_positions.len());
    let dk =
        Sum { elements: bytemuck::cast_slice_mut(args.dk.bytes_mut()?), layout, batch, rows, heads, dim };
    let dv =
        Sum { elements: bytemuck::cast_slice_mut(args.dv.bytes_mut()?), layout, batch, rows, heads, dim };
    let all = work.tiles(batch) * shape.heads as u64;
    let mut waves = Waves::new(dq, dk, dv, args.kv_head_of);
    for wave in 0..waves.count() {
        let mut jobs = waves.jobs(wave);
        run(backend, &call, &mut jobs, (&mut d_bias, all), control).await?;
        waves.take_back(jobs);
    }
    Ok(())
}

/// Runs the jobs of a wave in pieces: `all` are the tiles of the call.
async fn run(
    backend: &CpuBackend,
    call: &BackwardCall<'_>,
    jobs: &mut [Job<'_>],
    (d_bias, all): (&mut Option<BiasSum<'_>>, u64),
    control: &Control,
) -> Result<()> {
    let tile_cost = u64::from(TILE.q_rows * TILE.kv_cols) * (call.forward.dim * PRODUCTS) as u64;
    // The longest first: with the short jobs at the end, threads finish together.
    jobs.sort_by_cached_key(|job| std::cmp::Reverse(job.tiles(call)));
    let costs: Vec<u64> =
        jobs.iter().map(|job| job.tiles(call) * tile_cost).take_while(|cost| *cost > 0).collect();
    let threads = backend.threads();
    let mut from = 0;
    while from < costs.len() {
        let budget = backend.backward_rate.piece_budget();
        let (mut sum, mut to) = (0, from);
        while to < costs.len() && (sum < budget || !(to - from).is_multiple_of(threads)) {
            sum += costs[to];
            to += 1;
        }
        let start = Instant::now();
        if let Some(d_bias) = d_bias {
            for job in &mut jobs[from..to] {
                let rows = job.q_tiles.start * TILE.q_rows as usize;
                let keys = job.kv_tiles.start * TILE.kv_cols as usize;
                let [rows, keys] = [rows..rows + job.rows(), keys..keys + job.dk.len()];
                let block = |q_head| d_bias.block([job.batch, q_head], rows.clone(), keys.clone());
                job.bias = job.q_heads.clone().map(block).collect();
            }
        }
        backend.install(|| {
            jobs[from..to].iter_mut().par_bridge().for_each(|job| {
                let mut space = backend.backward_scratch.take();
                backend.level.run(Run { call, job, space: &mut space });
                backend.backward_scratch.give(space);
            });
            if let Some(d_bias) = d_bias {
                let blocks: Vec<_> =
                    jobs[from..to].iter_mut().flat_map(|job| std::mem::take(&mut job.bias)).collect();
                d_bias.add(&blocks, &call.forward.work.kv_positions);
            }
        });
        backend.backward_rate.measured(sum, start);
        control.share_done(share(sum, all * tile_cost))?;
        yield_now().await;
        from = to;
    }
    Ok(())
}
