//! Cutting an attend call into jobs, and jobs into pieces.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rayon::iter::{ParallelBridge, ParallelIterator};

use super::job::{Call, Job, Run, Unit};
use super::pack::Tensor;
use super::{CpuBackend, CpuBuffer};
use crate::backend::{Attend, Control, yield_now};
use crate::{BlockWork, Result, TileShape};

/// The tiles of this backend. Q tiles hold whole panels on every instruction set: 96 is a multiple of 12, 24 and 48.
pub(super) const TILE: TileShape = TileShape {
    q_rows: 96,
    kv_cols: 128,
};

/// Multiply-adds in a second, as last measured; decides how much goes into one piece, never a result.
#[derive(Debug)]
pub(super) struct Rate(AtomicU64);

impl Default for Rate {
    fn default() -> Self {
        Self(AtomicU64::new(FIRST_RATE))
    }
}

impl Rate {
    fn piece_budget(&self) -> u64 {
        self.0.load(Ordering::Relaxed) / 1000 * PIECE_MS
    }

    fn measured(&self, cost: u64, start: Instant) {
        let us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        // Short pieces say more about waking threads than about speed.
        if us > 2000 {
            self.0.store((cost / us).max(1) * 1_000_000, Ordering::Relaxed);
        }
    }
}

/// [`crate::backend::Backend::attend`] of this backend.
pub(super) async fn attend(
    backend: &CpuBackend,
    args: Attend<'_, CpuBuffer>,
    control: &Control,
) -> Result<()> {
    let work = args.work;
    let dim = args.state.shape.dim;
    let call = Call {
        q: Tensor::new(args.dtype, args.q),
        k: Tensor::new(args.dtype, args.k),
        v: Tensor::new(args.dtype, args.v),
        work,
        dim,
        scale: args.scale,
        softcap: args.softcap,
    };
    let shape = args.state.shape;
    if work.is_empty() || shape.rows == 0 {
        return control.piece_done();
    }
    let a = bytemuck::cast_slice_mut(args.state.a.bytes_mut()?);
    let ml = bytemuck::cast_slice_mut(args.state.ml.bytes_mut()?);
    let units = units(work, shape.rows, shape.heads, dim, a, ml);
    let mut jobs = group(units, args.kv_head_of, dim, backend.threads(), &call);

    // A job's rows against all keys may take long, so keys are cut too: at the same places whatever the speed and the
    // number of threads, so that results are the same.
    let tile_cost = (work.tile.q_rows * work.tile.kv_cols) as u64 * dim as u64 * 2;
    let tiles = u32::try_from(work.kv_positions.len().div_ceil(work.tile.kv_cols as usize))
        .expect("positions are u32, so tiles are");
    let tiles_at_once = u32::try_from(JOB_COST / (tile_cost * UNITS_AT_ONCE as u64))
        .unwrap_or(u32::MAX)
        .max(1);
    for first in (0..tiles).step_by(tiles_at_once as usize) {
        let range = first..tiles.min(first + tiles_at_once);
        let cost = |job: &Job<'_>| job.units.iter().map(|unit| unit.count(&range)).sum::<u64>() * tile_cost;
        // Longest first: the short ones at the end let threads finish together.
        jobs.sort_by_cached_key(|job| std::cmp::Reverse(cost(job)));
        let mut rest = &mut jobs[..];
        while let Some(head) = rest.first() {
            if cost(head) == 0 {
                break;
            }
            let budget = backend.rate.piece_budget();
            let mut sum = 0;
            let count = rest
                .iter()
                .take_while(|job| {
                    let fits = sum < budget;
                    sum += if fits { cost(job) } else { 0 };
                    fits
                })
                .count()
                .max(1);
            let (piece, later) = rest.split_at_mut(count);
            rest = later;
            let start = Instant::now();
            run_piece(backend, &call, piece, &range);
            backend.rate.measured(sum, start);
            control.piece_done()?;
            yield_now().await;
        }
    }
    Ok(())
}

fn run_piece(backend: &CpuBackend, call: &Call<'_>, piece: &mut [Job<'_>], tiles: &Range<u32>) {
    backend.install(|| {
        // In order, each thread taking the next job when it is free.
        piece.iter_mut().par_bridge().for_each(|job| {
            backend.scratch.with(|scratch| {
                backend.level.dispatch(Run {
                    call,
                    job,
                    tiles: tiles.clone(),
                    scratch,
                });
            });
        });
    });
}

/// One unit for each (batch entry, query head, Q tile), in this order.
fn units<'a>(
    work: &'a BlockWork,
    rows: usize,
    heads: usize,
    dim: usize,
    a: &'a mut [f32],
    ml: &'a mut [f32],
) -> Vec<Unit<'a>> {
    let q_rows = work.tile.q_rows as usize;
    let tiles = rows.div_ceil(q_rows);
    let mut units: Vec<Unit<'a>> = ml
        .chunks_exact_mut(rows * 2)
        .enumerate()
        .flat_map(|(batch_head, ml)| {
            let class = work.class_of(batch_head / heads);
            ml.chunks_mut(q_rows * 2).enumerate().map(move |(tile, ml)| Unit {
                class,
                tile,
                head: batch_head % heads,
                a: Vec::with_capacity(ml.len() / 2),
                ml,
            })
        })
        .collect();
    for (i, a) in a.chunks_exact_mut(dim).enumerate() {
        let (head, row, batch) = (i % heads, i / heads % rows, i / heads / rows);
        if let Some(unit) = units.get_mut((batch * heads + head) * tiles + row / q_rows) {
            unit.a.push(a);
        }
    }
    units
}

/// Units that share keys, together: enough of them that packing a KV tile pays, few enough that their state stays in
/// the second-level cache and every thread has several jobs.
fn group<'a>(
    units: Vec<Unit<'a>>,
    kv_head_of: &[u32],
    dim: usize,
    threads: usize,
    call: &Call<'_>,
) -> Vec<Job<'a>> {
    let per_batch = kv_head_of.len() * call.work.q_tiles();
    let mut keyed: Vec<([usize; 4], Unit<'a>)> = units
        .into_iter()
        .enumerate()
        .map(|(i, unit)| {
            let kv_head = kv_head_of[unit.head] as usize;
            ([i / per_batch, kv_head, unit.tile, unit.head], unit)
        })
        .collect();
    keyed.sort_unstable_by_key(|(key, _)| *key);
    let unit_bytes = 2 * 4 * call.work.tile.q_rows as usize * dim;
    let most = (CACHE_BYTES / unit_bytes).clamp(1, UNITS_AT_ONCE);
    let size = (keyed.len() / (threads * JOBS_PER_THREAD)).clamp(1, most);
    let mut jobs: Vec<Job<'a>> = Vec::with_capacity(keyed.len() / size + 1);
    for ([batch, kv_head, ..], unit) in keyed {
        match jobs.last_mut() {
            Some(job) if job.batch == batch && job.kv_head == kv_head && job.units.len() < size => {
                job.units.push(unit);
            }
            _ => jobs.push(Job {
                batch,
                kv_head,
                units: vec![unit],
            }),
        }
    }
    jobs
}

/// Multiply-adds in a second before anything was measured: little, so that the first piece of a slow machine is short.
const FIRST_RATE: u64 = 5_000_000_000;
/// Aim of a piece, below the contract's 100 ms for what the measurement misses.
const PIECE_MS: u64 = 60;
/// Multiply-adds that a job may have: some 10 ms of one core.
const JOB_COST: u64 = 500_000_000;
/// Units of a job, at most.
const UNITS_AT_ONCE: usize = 6;
/// Second-level cache that packed q and accumulators of a job may fill.
const CACHE_BYTES: usize = 256 << 10;
/// Jobs that a thread should find at least, so that all end at about the same time.
const JOBS_PER_THREAD: usize = 6;
