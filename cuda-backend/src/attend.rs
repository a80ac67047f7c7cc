//! One call of `attend`: its work on the device, and its pieces.

use std::ops::Range;
use std::time::Instant;

use kyklos::backend::{Attend, Control, Layout, yield_now};
use kyklos::{BlockWork, Dtype, Error, PairKind, Result};

use crate::arguments::{AttendArguments, TensorArgument, logits};
use crate::backend::{CudaBackend, narrow};
use crate::device::{Launch, moment};
use crate::kernels::AttendKernel;
use crate::pace::Flight;
use crate::pool::CudaBuffer;
use crate::work::DeviceWork;

/// Blocks of a grid in its second and third direction.
const MOST_BLOCKS: usize = 65_535;

pub(crate) async fn attend(
    backend: &CudaBackend,
    args: Attend<'_, CudaBuffer>,
    control: &Control,
) -> Result<()> {
    let shape = args.state.shape;
    if shape.batch == 0 || shape.rows == 0 || shape.heads == 0 || args.work.is_empty() {
        return Ok(());
    }
    let kernel = kernel_for(args.dtype, shape.dim)?;
    if args.work.tile != kernel.tile {
        return Err(Error::request(
            format!("the work list is in tiles of {:?}, the kernel's are {:?}", args.work.tile, kernel.tile),
            "lower the mask with this backend's tile_shape for the shape of the state",
        ));
    }
    let (work, mut arguments) = prepare(backend, &args)?;
    let mut reads = vec![args.q.buffer, args.k.buffer, args.v.buffer, &work];
    reads.extend(args.pairs.as_ref().map(|pairs| pairs.buffer));
    let mut pieces = Pieces::new(args.work, shape.batch, shape.heads, shape.dim);
    while let Some((piece, flops)) =
        pieces.next(backend.pace.piece_flops(&kernel.name, first_rate(args.dtype)))
    {
        backend.pace.room().await;
        arguments.first_tile = narrow("the number of query tiles", piece.tiles.start)?;
        arguments.first_head = narrow("the number of heads", piece.heads.start)?;
        arguments.first_batch = narrow("the batch", piece.batch.start)?;
        let launch = Launch {
            kernel: &kernel.name,
            grid: [
                narrow("the number of query tiles", piece.tiles.len())?,
                narrow("the number of heads", piece.heads.len())?,
                narrow("the batch", piece.batch.len())?,
            ],
            threads: kernel.threads,
            shared_bytes: kernel.shared_bytes,
        };
        let submitted = Instant::now();
        let end = backend.gpu.launch(launch, &arguments, &reads, &[args.state.a, args.state.ml])?;
        let done = moment(&backend.watch, end);
        backend.pace.submitted(Flight { kernel: kernel.name.clone(), flops, submitted, done });
        control.piece_done()?;
        yield_now().await;
    }
    Ok(())
}

/// The kernel for tensors of this type and head dim.
pub(crate) fn kernel_for(dtype: Dtype, dim: usize) -> Result<AttendKernel> {
    let fits = u32::try_from(dim).ok().filter(|dim| *dim > 0 && dim.is_multiple_of(8));
    fits.and_then(|dim| AttendKernel::of(dtype, dim)).ok_or_else(|| {
        Error::request(format!("head dim {dim} is not supported"), "use a multiple of 8 up to 256")
    })
}

/// Operations a second, before anything was measured: too few only make the first piece short.
fn first_rate(dtype: Dtype) -> f64 {
    if dtype == Dtype::F32 { 1e12 } else { 1e13 }
}

/// Uploads the work list; the arguments of a launch over everything.
fn prepare(backend: &CudaBackend, args: &Attend<'_, CudaBuffer>) -> Result<(CudaBuffer, AttendArguments)> {
    let shape = args.state.shape;
    let work = DeviceWork::new(args.work);
    let mut bytes = Vec::new();
    let mut place = |part: &[u8]| {
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        let at = bytes.len() as u64;
        bytes.extend_from_slice(part);
        at
    };
    let spans = place(bytemuck::cast_slice(&work.spans));
    let positions = place(bytemuck::cast_slice(&work.positions));
    let starts = place(bytemuck::cast_slice(&work.starts));
    let runs = place(bytemuck::cast_slice(&work.runs));
    let kv_head_of = place(bytemuck::cast_slice(args.kv_head_of));
    let buffer = backend.gpu.upload(&backend.watch, "a work list", &bytes)?;
    let base = buffer.address();
    let (scale, cap) = logits(args.scale, args.softcap);
    let operand = |buffer: &CudaBuffer, layout: &Layout| {
        aligned(tensor(buffer, layout, args.dtype.bytes()), args.dtype)
    };
    let (pairs, pair_kind) = match &args.pairs {
        None => (TensorArgument::default(), 0),
        Some(pairs) => match pairs.kind {
            PairKind::Visible => (tensor(pairs.buffer, &pairs.layout, 4), 1),
            PairKind::Bias => (tensor(pairs.buffer, &pairs.layout, args.dtype.bytes()), 2),
        },
    };
    let arguments = AttendArguments {
        q: operand(args.q.buffer, &args.q.layout)?,
        k: operand(args.k.buffer, &args.k.layout)?,
        v: operand(args.v.buffer, &args.v.layout)?,
        pairs,
        a: args.state.a.address(),
        ml: args.state.ml.address(),
        spans: base + spans,
        positions: base + positions,
        starts: base + starts,
        runs: base + runs,
        kv_head_of: base + kv_head_of,
        rows: narrow("the number of rows", shape.rows)?,
        keys: narrow("the number of keys", work.positions.len())?,
        heads: narrow("the number of heads", shape.heads)?,
        dim: narrow("the head dim", shape.dim)?,
        classes: work.classes,
        q_tiles: work.q_tiles,
        pair_kind,
        scale,
        cap,
        ..AttendArguments::default()
    };
    Ok((buffer, arguments))
}

/// A tensor whose offset counts elements of so many bytes.
pub(crate) fn tensor(buffer: &CudaBuffer, layout: &Layout, element_bytes: usize) -> TensorArgument {
    TensorArgument {
        data: buffer.address() + (layout.offset * element_bytes) as u64,
        batch_stride: layout.batch_stride as u64,
        row_stride: layout.row_stride as u64,
        head_stride: layout.head_stride as u64,
    }
}

/// Kernels load 16 bytes at a time.
fn aligned(tensor: TensorArgument, dtype: Dtype) -> Result<TensorArgument> {
    let unit = 16 / dtype.bytes() as u64;
    let strides = [tensor.batch_stride, tensor.row_stride, tensor.head_stride];
    if tensor.data.is_multiple_of(16) && strides.iter().all(|stride| stride.is_multiple_of(unit)) {
        return Ok(tensor);
    }
    Err(Error::request(
        format!("{tensor:?} does not keep heads on 16-byte boundaries"),
        format!("use offsets and strides that are multiples of {unit} elements"),
    ))
}

/// Part of a call: these tiles of these heads of these batch entries.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    tiles: Range<usize>,
    heads: Range<usize>,
    batch: Range<usize>,
}

/// The tiles of a call, a budget at a time: whole batch entries while they fit, else heads of one, else tiles of a head.
/// Keys are never cut, so that results do not depend on the pace.
struct Pieces {
    /// Operations of each query tile of a head, for each mask class.
    tiles: Vec<Vec<f64>>,
    batch: usize,
    heads: usize,
    /// Where the next piece begins.
    next: (usize, usize, usize),
}

impl Pieces {
    fn new(work: &BlockWork, batch: usize, heads: usize, dim: usize) -> Self {
        let flops_of_tile = 4.0 * f64::from(work.tile.q_rows) * f64::from(work.tile.kv_cols) * dim as f64;
        let tiles = work.classes.iter().map(|class| {
            let runs = class.starts.windows(2).map(|ends| &class.runs[ends[0] as usize..ends[1] as usize]);
            runs.map(|runs| runs.iter().map(|run| f64::from(run.count)).sum::<f64>() * flops_of_tile)
                .collect()
        });
        Self { tiles: tiles.collect(), batch, heads, next: (0, 0, 0) }
    }

    fn tiles_of(&self, batch: usize) -> &[f64] {
        &self.tiles[batch.min(self.tiles.len() - 1)]
    }

    /// The next piece with work in it, of about `budget` operations, and those operations.
    fn next(&mut self, budget: f64) -> Option<(Piece, f64)> {
        loop {
            let (piece, flops) = self.advance(budget)?;
            if flops > 0.0 {
                return Some((piece, flops));
            }
        }
    }

    fn advance(&mut self, budget: f64) -> Option<(Piece, f64)> {
        let (batch, head, tile) = self.next;
        if batch == self.batch {
            return None;
        }
        let of_head: f64 = self.tiles_of(batch).iter().sum();
        let tiles = 0..self.tiles_of(batch).len();
        let of_batch = |batch: usize| self.tiles_of(batch).iter().sum::<f64>() * self.heads as f64;
        if (head, tile) == (0, 0) && self.heads <= MOST_BLOCKS && of_batch(batch) <= budget {
            let (end, flops) = fill(batch..self.batch, budget, of_batch);
            self.next = (end, 0, 0);
            return Some((Piece { tiles, heads: 0..self.heads, batch: batch..end }, flops));
        }
        if tile == 0 && of_head <= budget {
            let (end, flops) = fill(head..self.heads, budget, |_| of_head);
            self.next = if end == self.heads { (batch + 1, 0, 0) } else { (batch, end, 0) };
            return Some((Piece { tiles, heads: head..end, batch: batch..batch + 1 }, flops));
        }
        let of_tile = self.tiles_of(batch);
        let (end, flops) = fill(tile..tiles.end, budget, |tile| of_tile[tile]);
        self.next = match (end == tiles.end, head + 1 == self.heads) {
            (false, _) => (batch, head, end),
            (true, false) => (batch, head + 1, 0),
            (true, true) => (batch + 1, 0, 0),
        };
        Some((Piece { tiles: tile..end, heads: head..head + 1, batch: batch..batch + 1 }, flops))
    }
}

/// How far a range goes within a budget, at least one and at most what a grid has, and what that costs.
fn fill(range: Range<usize>, budget: f64, cost: impl Fn(usize) -> f64) -> (usize, f64) {
    let (mut end, mut sum) = (range.start + 1, cost(range.start));
    while end < range.end && end - range.start < MOST_BLOCKS && sum + cost(end) <= budget {
        sum += cost(end);
        end += 1;
    }
    (end, sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kyklos::{AttentionProblem, Mask, TileShape, TokenRuns};

    /// Every tile of every head of every batch entry that has work is in just one piece, whatever the budget.
    #[test]
    fn pieces_are_everything_once() {
        let tile = TileShape { q_rows: 16, kv_cols: 16 };
        let problem = AttentionProblem::new([2, 100, 3, 3, 8], Dtype::F32, Mask::causal()).unwrap();
        let tokens = TokenRuns::contiguous(0..100);
        let work = &BlockWork::layers(&problem, &tokens, &tokens, tile)[0];
        let all = {
            let pieces = Pieces::new(work, 2, 3, 8);
            pieces.tiles_of(0).iter().sum::<f64>() * 6.0
        };
        for budget in [0.0, all / 40.0, all / 6.0, all / 5.0, all / 2.0, all] {
            let mut pieces = Pieces::new(work, 2, 3, 8);
            let (mut seen, mut sum, mut count) = (vec![0; 7 * 3 * 2], 0.0, 0);
            while let Some((piece, flops)) = pieces.next(budget) {
                for batch in piece.batch.clone() {
                    for head in piece.heads.clone() {
                        piece.tiles.clone().for_each(|tile| seen[(batch * 3 + head) * 7 + tile] += 1);
                    }
                }
                let one = piece.tiles.len() * piece.heads.len() * piece.batch.len() == 1;
                assert!(flops <= budget || one, "{piece:?}: {flops} of {budget}");
                sum += flops;
                count += 1;
            }
            assert!(seen.iter().all(|times| *times == 1), "{budget}: {seen:?}");
            assert_eq!(sum, all);
            assert_eq!(count == 1, budget == all, "{count} pieces of {budget}");
        }
    }
}
