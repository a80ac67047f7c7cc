//! Cutting an attend call into jobs, and jobs into pieces.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use futures_util::future::LocalBoxFuture;
use rayon::iter::{ParallelBridge, ParallelIterator};

use super::bias::BiasRows;
use super::call::{Call, share};
use super::job::{Job, Run};
use super::keys::PackedKeys;
use super::pack::Tensor;
use super::{CpuBackend, CpuBuffer, few_rows};
use crate::backend::cpu::arithmetic::simd::AskShape;
use crate::backend::{Attend, Control, StateShape, yield_now};
use crate::error::Result;
use kyklos_plan::{BlockWork, Dtype, MaskClass};

/// Multiply-adds per second, as last measured. Decides the size of a piece, never a result.
#[derive(Debug)]
pub(super) struct Rate(AtomicU64);

impl Default for Rate {
    fn default() -> Self {
        Self(AtomicU64::new(FIRST_RATE))
    }
}

impl Rate {
    pub(super) fn piece_budget(&self) -> u64 {
        self.0.load(Ordering::Relaxed) / 1000 * PIECE_MS
    }

    pub(super) fn measured(&self, cost: u64, start: Instant) {
        let us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        // The time of a short piece depends more on waking threads than on speed.
        if us > 2000 {
            self.0.store((cost / us).max(1) * 1_000_000, Ordering::Relaxed);
        }
    }
}

/// [`crate::backend::Backend::attend`] of this backend.
///
/// In a box: the code of a future is compiled in each crate that awaits it as its own type, with
/// all that it calls in closures.
#[inline(never)]
pub(super) fn attend<'a>(
    backend: &'a CpuBackend,
    args: Attend<'a, CpuBuffer>,
    control: &'a Control,
) -> LocalBoxFuture<'a, Result<()>> {
    Box::pin(attend_in_pieces(backend, args, control))
}

async fn attend_in_pieces(
    backend: &CpuBackend,
    args: Attend<'_, CpuBuffer>,
    control: &Control,
) -> Result<()> {
    let work = args.work;
    let dim = args.state.shape.dim;
    let shape = args.state.shape;
    let few_rows = args.inference && few_rows::takes(shape, args.fixed_order);
    let bf16 = backend.level.bf16().filter(|_| args.dtype == Dtype::Bf16);
    let tensor = |operand| {
        let tensor = Tensor::new(args.dtype, operand);
        if bf16.is_some() { tensor.in_words() } else { tensor }
    };
    let call = Call {
        q: tensor(args.q),
        k: tensor(args.k),
        v: tensor(args.v),
        work,
        dim,
        scale: args.scale,
        softcap: args.softcap,
        bias: args.bias.as_ref().map(|bias| BiasRows::new(args.dtype, bias)),
        bf16,
        tiles: backend.level.tiles().filter(|_| bf16.is_some() && !few_rows),
    };
    if work.is_empty() {
        return control.piece_done();
    }
    let a = bytemuck::cast_slice_mut(args.state.a.bytes_mut()?);
    let ml = bytemuck::cast_slice_mut(args.state.ml.bytes_mut()?);
    if few_rows {
        return few_rows::attend(backend, &call, args.kv_head_of, shape, a, ml, control).await;
    }
    let mut jobs = jobs(work, args.kv_head_of, shape, a, ml);
    let kv_heads = args.kv_head_of.iter().max().map_or(0, |head| *head as usize + 1);
    let kernel = backend.level.run(AskShape);

    // Keys are taken in stretches, so that no job is long, and KV heads a few at a time, so that the
    // packed keys stay small. The cuts do not depend on the speed or on the number of threads, so
    // neither do results.
    let tiles = u32::try_from(work.kv_positions.len().div_ceil(work.tile.kv_cols as usize))
        .expect("positions are u32, so tiles are");
    let tile_cost = u64::from(work.tile.q_rows * work.tile.kv_cols) * dim as u64 * 2;
    let stretch = u32::try_from(JOB_COST / tile_cost).unwrap_or(u32::MAX).clamp(1, tiles);
    let all = work.tiles(shape.batch) * shape.heads as u64 * tile_cost;
    let stretch_bytes = PackedKeys::tile_bytes(&call, kernel) * stretch as usize;
    let heads_at_once = (PACKED_BYTES / stretch_bytes).max(1);
    let mut keys = backend.packed.take();
    let mut later = &mut jobs[..];
    while let Some(first) = later.first() {
        let first = first.kv_slot(kv_heads);
        let heads = first..(first + heads_at_once).min(shape.batch * kv_heads);
        let count = later.partition_point(|job| job.kv_slot(kv_heads) < heads.end);
        let (now, rest) = later.split_at_mut(count);
        later = rest;
        for from in (0..tiles).step_by(stretch as usize) {
            let range = from..tiles.min(from + stretch);
            // The longest first: with the short jobs at the end, threads finish together.
            now.sort_by_cached_key(|job| std::cmp::Reverse(job.tiles_in(&range)));
            if now.first().is_none_or(|job| job.tiles_in(&range) == 0) {
                continue;
            }
            let wanted = wanted(work, &range);
            backend.install(|| {
                let wanted = |batch: usize, tile: u32| {
                    wanted[batch.min(wanted.len() - 1)][(tile - range.start) as usize]
                };
                keys.pack(backend.level, kernel, &call, kv_heads, &heads, &range, wanted, &backend.scratch);
            });
            attend_pieces(backend, &call, now, &keys, (tile_cost, all), control).await?;
        }
    }
    backend.packed.give(keys);
    Ok(())
}

/// Runs jobs, sorted by falling cost, in pieces: `all` is the cost of the call.
async fn attend_pieces(
    backend: &CpuBackend,
    call: &Call<'_>,
    jobs: &mut [Job<'_>],
    keys: &PackedKeys,
    (tile_cost, all): (u64, u64),
    control: &Control,
) -> Result<()> {
    let cost = |job: &Job<'_>| job.tiles_in(&keys.tiles) * tile_cost;
    let threads = backend.threads();
    let mut rest = jobs;
    while rest.first().is_some_and(|job| cost(job) > 0) {
        let budget = backend.rate.piece_budget();
        let mut sum = 0;
        let mut count = 0;
        // The same number for each thread, so that equal jobs end together.
        while count < rest.len() && (sum < budget || !count.is_multiple_of(threads)) {
            sum += cost(&rest[count]);
            count += 1;
        }
        let (piece, later) = rest.split_at_mut(count);
        rest = later;
        let start = Instant::now();
        backend.install(|| {
            // In order, each thread taking the next job when it is free.
            piece.iter_mut().par_bridge().for_each(|job| {
                let mut scratch = backend.scratch.take();
                backend.level.run(Run { call, job, keys, scratch: &mut scratch });
                backend.scratch.give(scratch);
            });
        });
        backend.rate.measured(sum, start);
        control.share_done(share(sum, all))?;
        yield_now().await;
    }
    Ok(())
}

/// One job for each (batch entry, query head, Q tile), ordered by the KV head that it reads.
fn jobs<'a>(
    work: &'a BlockWork,
    kv_head_of: &[u32],
    shape: StateShape,
    a: &'a mut [f32],
    ml: &'a mut [f32],
) -> Vec<Job<'a>> {
    let StateShape { rows, heads, dim, .. } = shape;
    let q_rows = work.tile.q_rows as usize;
    let tiles = rows.div_ceil(q_rows);
    let mut jobs: Vec<Job<'a>> = ml
        .chunks_exact_mut(rows * 2)
        .enumerate()
        .flat_map(|(batch_head, ml)| {
            let (batch, head) = (batch_head / heads, batch_head % heads);
            let kv_head = kv_head_of[head] as usize;
            let class = work.class_of(batch);
            ml.chunks_mut(q_rows * 2).enumerate().map(move |(tile, ml)| Job {
                class,
                batch,
                tile,
                head,
                kv_head,
                a: Vec::with_capacity(ml.len() / 2),
                ml,
            })
        })
        .collect();
    for (i, a) in a.chunks_exact_mut(dim).enumerate() {
        let (head, row, batch) = (i % heads, i / heads % rows, i / heads / rows);
        if let Some(job) = jobs.get_mut((batch * heads + head) * tiles + row / q_rows) {
            job.a.push(a);
        }
    }
    jobs.sort_by_key(|job| (job.batch, job.kv_head));
    jobs
}

/// For each mask class and each of the KV tiles `tiles`: whether any row sees it.
fn wanted(work: &BlockWork, tiles: &Range<u32>) -> Vec<Vec<bool>> {
    let of_class = |class: &MaskClass| {
        let mut wanted = vec![false; tiles.len()];
        for run in &class.runs {
            let end = (run.kv_tile + run.count).min(tiles.end);
            for tile in run.kv_tile.max(tiles.start)..end {
                wanted[(tile - tiles.start) as usize] = true;
            }
        }
        wanted
    };
    work.classes.iter().map(of_class).collect()
}

/// Assumed multiply-adds per second before the first measurement: low, so that the first piece is
/// short on a slow machine.
const FIRST_RATE: u64 = 5_000_000_000;
/// Milliseconds at which a piece aims: below the contract's 100 ms, because the measured speed
/// varies.
const PIECE_MS: u64 = 60;
/// Most multiply-adds of a job: some milliseconds of one core.
const JOB_COST: u64 = 128_000_000;
/// Packed keys and values of one call, at most, where one KV head does not need more.
const PACKED_BYTES: usize = 64 << 20;
