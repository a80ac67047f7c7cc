//! Gradients: two kinds of jobs, whose sums no other job adds to.
//!
//! One kind has a tile of query rows in the lanes of vectors and adds up their dQ; the other has a tile of keys in the lanes and
//! adds up their dK and dV, over all query heads that read them. Both compute S and dP, so a pair costs seven products
//! instead of five. In return there is no memory for P or dS, and sums do not depend on the number of threads.

mod accumulate;
mod job;
mod panel;
mod stats;

use std::ops::Range;
use std::time::Instant;

use rayon::iter::{ParallelBridge, ParallelIterator};

pub(super) use self::accumulate::accumulate;
pub(super) use self::job::Space;
use self::job::{BroadcastTile, Job, Run};
use self::panel::Fixed;
pub(super) use self::stats::row_stats;
use super::call::Call;
use super::pack::Tensor;
use super::pairs::PairRows;
use super::{CpuBackend, CpuBuffer};
use crate::backend::{AttendBackward, Control, Layout, yield_now};
use crate::{Dtype, MaskClass, Result, TileShape};

/// Tiles of the backward pass: both sides are in lanes once, and 96 is a multiple of the lanes of every instruction set.
pub(super) const TILE: TileShape = TileShape { q_rows: 96, kv_cols: 96 };

/// The arguments of one call, as its jobs share them.
pub(super) struct BackwardCall<'a> {
    /// q, k, v and the mask.
    forward: Call<'a>,
    d_o: Tensor<'a>,
    stats: Tensor<'a>,
    /// For each KV head, the query heads that read it.
    q_heads_of: Vec<Range<usize>>,
    /// By class of the mask: for each KV tile the Q tiles that see any of it.
    by_keys: Vec<Vec<Vec<BroadcastTile>>>,
    /// By class of the mask: for each Q tile the KV tiles of which any row sees a key.
    by_rows: Vec<Vec<Vec<BroadcastTile>>>,
}

/// [`crate::backend::Backend::attend_backward`] of this backend.
pub(super) async fn attend_backward(
    backend: &CpuBackend,
    args: AttendBackward<'_, CpuBuffer>,
    control: &Control,
) -> Result<()> {
    let (work, shape) = (args.work, args.shape);
    if work.is_empty() {
        return control.piece_done();
    }
    let kv_heads = args.kv_head_of.iter().max().map_or(0, |head| *head as usize + 1);
    let readers = |kv_head: usize| {
        let reads = |head: &u32| *head as usize == kv_head;
        let first = args.kv_head_of.iter().position(reads).unwrap_or(0);
        first..first + args.kv_head_of.iter().filter(|head| reads(head)).count()
    };
    let call = BackwardCall {
        forward: Call {
            q: Tensor::new(args.dtype, args.q),
            k: Tensor::new(args.dtype, args.k),
            v: Tensor::new(args.dtype, args.v),
            work,
            dim: shape.dim,
            scale: args.scale,
            softcap: args.softcap,
            pairs: args.pairs.as_ref().map(|pairs| PairRows::new(args.dtype, pairs)),
        },
        d_o: Tensor::new(args.dtype, args.d_o),
        stats: Tensor::new(Dtype::F32, args.stats),
        q_heads_of: (0..kv_heads).map(readers).collect(),
        by_keys: work.classes.iter().map(|class| by_keys(class, work.kv_positions.len())).collect(),
        by_rows: work.classes.iter().map(by_rows).collect(),
    };
    let row = shape.heads * shape.dim;
    let dense = Layout { offset: 0, batch_stride: shape.rows * row, row_stride: row, head_stride: shape.dim };
    let dq = bytemuck::cast_slice_mut(args.dq.bytes_mut()?);
    let jobs = jobs(dq, dense, [shape.batch, shape.rows, shape.heads], shape.dim, TILE.q_rows);
    run(backend, &call, jobs, Fixed::Rows, control).await?;

    let keys = [shape.batch, work.kv_positions.len(), kv_heads];
    let dk = bytemuck::cast_slice_mut(args.dk.bytes_mut()?);
    let dv = bytemuck::cast_slice_mut(args.dv.bytes_mut()?);
    let mut of_keys = self::jobs(dk, args.kv_layout, keys, shape.dim, TILE.kv_cols);
    let of_values = self::jobs(dv, args.kv_layout, keys, shape.dim, TILE.kv_cols);
    for (job, values) in of_keys.iter_mut().zip(of_values) {
        job.second = values.first;
    }
    run(backend, &call, of_keys, Fixed::Keys, control).await
}

/// Runs all jobs of a kind in pieces. A job is cut into stretches of its tiles, so that no piece is long; the cuts do not
/// depend on speed, so neither do sums.
async fn run(
    backend: &CpuBackend,
    call: &BackwardCall<'_>,
    mut jobs: Vec<Job<'_>>,
    fixed: Fixed,
    control: &Control,
) -> Result<()> {
    let tile_cost = u64::from(TILE.q_rows * TILE.kv_cols) * call.forward.dim as u64 * fixed.products();
    let heads =
        if fixed == Fixed::Rows { 1 } else { call.q_heads_of.iter().map(Range::len).max().unwrap_or(1) };
    let stretch = usize::try_from(JOB_COST / (tile_cost * heads as u64)).unwrap_or(usize::MAX).max(1);
    let longest = jobs.iter().map(|job| job.tiles(call, fixed).len()).max().unwrap_or(0);
    let threads = backend.threads();
    for from in (0..longest).step_by(stretch) {
        let tiles = from..from + stretch;
        let count = |job: &Job<'_>| {
            let all = job.tiles(call, fixed).len();
            (all.min(tiles.end).saturating_sub(tiles.start)) as u64
        };
        // The longest first: with the short jobs at the end, threads finish together.
        jobs.sort_by_cached_key(|job| std::cmp::Reverse(count(job)));
        let used = jobs.partition_point(|job| count(job) > 0);
        let mut rest = &mut jobs[..used];
        while !rest.is_empty() {
            let budget = backend.backward_rate.piece_budget();
            let (mut sum, mut taken) = (0, 0);
            while taken < rest.len() && (sum < budget || !taken.is_multiple_of(threads)) {
                sum += count(&rest[taken]) * tile_cost * heads as u64;
                taken += 1;
            }
            let (piece, later) = rest.split_at_mut(taken);
            rest = later;
            let start = Instant::now();
            backend.install(|| {
                piece.iter_mut().par_bridge().for_each(|job| {
                    let mut space = backend.backward_scratch.take();
                    backend.level.run(Run { call, job, fixed, tiles: tiles.clone(), space: &mut space });
                    backend.backward_scratch.give(space);
                });
            });
            backend.backward_rate.measured(sum, start);
            control.piece_done()?;
            yield_now().await;
        }
    }
    Ok(())
}

/// One job for each (batch entry, head, tile of `tile_rows` rows) of the sums `sums`, whose rows and heads are at `layout`.
fn jobs<'a>(
    sums: &'a mut [f32],
    layout: Layout,
    [batches, rows, heads]: [usize; 3],
    dim: usize,
    tile_rows: u32,
) -> Vec<Job<'a>> {
    let tile_rows = tile_rows as usize;
    let tiles = rows.div_ceil(tile_rows);
    let mut jobs: Vec<Job<'a>> = Vec::with_capacity(batches * heads * tiles);
    for batch in 0..batches {
        for head in 0..heads {
            jobs.extend((0..tiles).map(|tile| Job {
                batch,
                head,
                tile,
                first: Vec::with_capacity(tile_rows),
                second: Vec::new(),
            }));
        }
    }
    let all_heads = layout.row_stride / dim;
    let all_rows = layout.batch_stride / layout.row_stride.max(1);
    let (first_row, first_head) =
        (layout.offset / layout.row_stride.max(1), layout.offset % layout.row_stride.max(1) / dim);
    for (index, sum) in sums.chunks_exact_mut(dim).enumerate() {
        let (head, row, batch) =
            (index % all_heads, index / all_heads % all_rows, index / all_heads / all_rows);
        let (Some(head), Some(row)) = (head.checked_sub(first_head), row.checked_sub(first_row)) else {
            continue;
        };
        if head < heads && row < rows && batch < batches {
            jobs[(batch * heads + head) * tiles + row / tile_rows].first.push(sum);
        }
    }
    jobs
}

/// For each Q tile its KV tiles.
fn by_rows(class: &MaskClass) -> Vec<Vec<BroadcastTile>> {
    let tiles_of = |bounds: &[u32]| {
        let runs = &class.runs[bounds[0] as usize..bounds[1] as usize];
        let tiles = runs.iter().flat_map(|run| {
            (run.kv_tile..run.kv_tile + run.count)
                .map(|tile| BroadcastTile { tile: tile as usize, full: run.full })
        });
        tiles.collect()
    };
    class.starts.windows(2).map(tiles_of).collect()
}

/// For each KV tile its Q tiles.
fn by_keys(class: &MaskClass, keys: usize) -> Vec<Vec<BroadcastTile>> {
    let mut of_keys = vec![Vec::new(); keys.div_ceil(TILE.kv_cols as usize)];
    for (q_tile, tiles) in by_rows(class).into_iter().enumerate() {
        for BroadcastTile { tile, full } in tiles {
            of_keys[tile].push(BroadcastTile { tile: q_tile, full });
        }
    }
    of_keys
}

/// Most multiply-adds of a stretch of a job: some milliseconds of one core.
const JOB_COST: u64 = 128_000_000;
