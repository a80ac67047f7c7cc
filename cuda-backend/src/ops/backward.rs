//! The backward pass of a block of queries against a block of keys: one kernel for dQ, then one for dK and dV, each in pieces.

use std::time::Instant;

use kyklos::backend::{AttendBackward, Control, yield_now};
use kyklos::{Dtype, Error, Result};

use super::arguments::{tensor, to_u32};
use super::attend::{first_rate, pairs_argument, require_alignment};
use super::lists::Lists;
use super::pieces::PieceSplitter;
use crate::device::{CudaBuffer, InFlightPiece, LaunchConfig, OpenDevice};
use crate::kernels::{
    AttendArguments, BACKWARD_TILE, BackwardArguments, BackwardKernel, BackwardList, TensorArgument,
    head_readers, logits,
};

/// The kernels for a storage type and a head dim.
pub(crate) fn backward_kernels(dtype: Dtype, dim: usize) -> Result<[BackwardKernel; 2]> {
    let kernels = u32::try_from(dim).ok().and_then(|dim| BackwardKernel::both(dtype, dim));
    kernels.filter(|_| dim.is_multiple_of(8)).ok_or_else(|| {
        Error::request(
            format!("gradients with head dim {dim} on CUDA"),
            "use a head dim that is a multiple of 8 up to 256, or another backend",
        )
    })
}

pub(crate) async fn attend_backward(
    device: &OpenDevice,
    args: AttendBackward<'_, CudaBuffer>,
    control: &Control,
) -> Result<()> {
    let (shape, work) = (args.shape, args.work);
    if shape.batch == 0 || shape.rows == 0 || shape.heads == 0 || work.is_empty() {
        return Ok(());
    }
    if work.tile != BACKWARD_TILE {
        return Err(Error::request(
            format!("the work list is in tiles of {:?}, not of {BACKWARD_TILE:?}", work.tile),
            "lower the mask with this backend's backward_tile_shape",
        ));
    }
    let kernels = backward_kernels(args.dtype, shape.dim)?;
    let call = Call::new(device, &args, kernels)?;
    for pass in [0, 1] {
        call.run(pass, control).await?;
    }
    Ok(())
}

/// A call whose work lists are on the device.
struct Call<'a> {
    device: &'a OpenDevice,
    args: &'a AttendBackward<'a, CudaBuffer>,
    kernels: [BackwardKernel; 2],
    work: [BackwardList; 2],
    /// For each KV head the first query head that reads it, and behind them the number of query heads.
    readers: Vec<u32>,
    lists: CudaBuffer,
    /// Arguments of one launch of each kernel over the whole call.
    arguments: [BackwardArguments; 2],
}

impl<'a> Call<'a> {
    fn new(
        device: &'a OpenDevice,
        args: &'a AttendBackward<'a, CudaBuffer>,
        kernels: [BackwardKernel; 2],
    ) -> Result<Self> {
        let (shape, work) = (args.shape, args.work);
        let by_side = kernels.each_ref().map(|kernel| BackwardList::new(work, kernel));
        let readers = head_readers(args.kv_head_of);
        let mut lists = Lists::default();
        let spans = work.classes.iter().flat_map(|class| class.rows.iter().copied()).collect::<Vec<_>>();
        let spans = lists.append(&spans);
        let positions = lists.append(&work.kv_positions);
        let kv_head_of = lists.append(args.kv_head_of);
        let readers_at = lists.append(&readers);
        let starts = by_side.each_ref().map(|side| lists.append(&side.starts));
        let runs = by_side.each_ref().map(|side| lists.append(&side.runs));
        let lists = device.upload("a backward work list", &lists.bytes)?;
        let base = lists.address();
        let (scale, cap) = logits(args.scale, args.softcap);
        let operand = |operand: &kyklos::backend::Operand<'_, CudaBuffer>| {
            require_alignment(tensor(operand.buffer, &operand.layout, args.dtype.bytes()), args.dtype)
        };
        let (pairs, pair_kind) = pairs_argument(args.pairs.as_ref(), args.dtype);
        let [d_kv, dv] = [&*args.dk, &*args.dv].map(|sums| tensor(sums, &args.kv_layout, 4));
        let whole = BackwardArguments {
            attend: AttendArguments {
                q: operand(&args.q)?,
                k: operand(&args.k)?,
                v: operand(&args.v)?,
                pairs,
                spans: base + spans,
                positions: base + positions,
                kv_head_of: base + kv_head_of,
                rows: to_u32("the number of rows", shape.rows)?,
                keys: to_u32("the number of keys", work.kv_positions.len())?,
                heads: to_u32("the number of heads", shape.heads)?,
                dim: to_u32("the head dim", shape.dim)?,
                classes: to_u32("the batch", work.classes.len())?,
                pair_kind,
                scale,
                cap,
                ..AttendArguments::default()
            },
            d_o: operand(&args.d_o)?,
            stats: tensor(args.stats.buffer, &args.stats.layout, 4),
            d_kv: TensorArgument { data: 0, ..d_kv },
            dq: args.dq.address(),
            dk: d_kv.data,
            dv: dv.data,
            readers: base + readers_at,
            scale: args.scale,
            reserved: 0,
        };
        let of_side = |side: usize| BackwardArguments {
            attend: AttendArguments {
                starts: base + starts[side],
                runs: base + runs[side],
                q_tiles: by_side[side].tiles,
                ..whole.attend
            },
            ..whole
        };
        let arguments = [of_side(0), of_side(1)];
        Ok(Self { device, args, kernels, work: by_side, readers, lists, arguments })
    }

    /// Runs kernel `pass` over the whole call in pieces.
    async fn run(&self, pass: usize, control: &Control) -> Result<()> {
        let (device, kernel, whole) = (self.device, &self.kernels[pass], &self.arguments[pass]);
        let mut pieces = self.pieces(pass);
        while let Some((piece, flops)) =
            pieces.next(device.pacer.piece_flops(&kernel.name, first_rate(self.args.dtype)))
        {
            let blocks = kernel.tile_blocks() as usize;
            let count = |tiles: usize| to_u32("the number of tiles", tiles * blocks);
            let arguments = BackwardArguments {
                attend: AttendArguments {
                    first_tile: count(piece.tiles.start)?,
                    first_head: to_u32("the number of heads", piece.heads.start)?,
                    first_batch: to_u32("the batch", piece.batch.start)?,
                    ..whole.attend
                },
                ..*whole
            };
            let grid = [
                count(piece.tiles.len())?,
                to_u32("the number of heads", piece.heads.len())?,
                to_u32("the batch", piece.batch.len())?,
            ];
            device.pacer.wait_for_slot().await;
            let BackwardKernel { name, threads, shared_bytes, .. } = kernel;
            let launch = LaunchConfig { kernel: name, grid, threads: *threads, shared_bytes: *shared_bytes };
            let submitted = Instant::now();
            let done = device.launch(launch, &arguments, &self.reads(), &self.writes(pass))?;
            let done = device.completion_time(done);
            device.pacer.record_submission(InFlightPiece { kernel: name.clone(), flops, submitted, done });
            control.piece_done()?;
            yield_now().await;
        }
        Ok(())
    }

    fn pieces(&self, pass: usize) -> PieceSplitter {
        let (kernel, shape) = (&self.kernels[pass], self.args.shape);
        // Products of a pair, and query heads of a block.
        let (products, heads, readers) = if kernel.by_keys {
            let most = self.readers.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(1);
            (4.0, self.readers.len() - 1, most)
        } else {
            (3.0, shape.heads, 1)
        };
        let tile = f64::from(kernel.fixed * kernel.tile_blocks() * kernel.moving * readers);
        let flops = 2.0 * products * tile * shape.dim as f64;
        let costs = self.work[pass]
            .met()
            .into_iter()
            .map(|tiles| tiles.into_iter().map(|met| f64::from(met) * flops).collect());
        PieceSplitter::of_costs(costs.collect(), shape.batch, heads)
    }

    fn reads(&self) -> Vec<&CudaBuffer> {
        let args = self.args;
        let pairs = args.pairs.as_ref().map(|pairs| pairs.buffer);
        [args.q.buffer, args.k.buffer, args.v.buffer, args.d_o.buffer, args.stats.buffer, &self.lists]
            .into_iter()
            .chain(pairs)
            .collect()
    }

    fn writes(&self, pass: usize) -> Vec<&CudaBuffer> {
        let args = self.args;
        if self.kernels[pass].by_keys { vec![&*args.dk, &*args.dv] } else { vec![&*args.dq] }
    }
}
