//! The backward pass of a block of queries against a block of keys: one kernel for dQ, then one for
//! dK and dV, and on request one for the gradient of the bias, each in pieces.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::LocalBoxFuture;
use kyklos::backend::{AttendBackward, Control, yield_now};
use kyklos::{BiasKind, Dtype, Error, Result};

use super::arguments::{tensor, to_u32};
use super::attend::{bias_argument, first_rate, require_alignment};
use super::lists::Lists;
use super::pieces::PieceSplitter;
use crate::device::{CudaBuffer, InFlightPiece, LaunchConfig, OpenDevice, PieceSize};
use crate::driver::{self, Event};
use crate::kernels::{
    AttendArguments, BACKWARD_TILE, BackwardArguments, BackwardKernel, BackwardList, BackwardShape,
    BackwardSums, HopperBackwardArguments, TensorArgument, TensorMap, head_readers, logits,
};

/// Whether there are kernels for a storage type and a head dim.
pub(crate) fn supports_backward(dtype: Dtype, dim: usize) -> Result<()> {
    backward_kernels(dtype, dim, [0, 0], Given::default(), false).map(|_| ())
}

/// What a call has besides q, k, v and the gradient of the output.
#[derive(Clone, Copy, Default)]
struct Given {
    bias: bool,
    d_bias: bool,
}

/// The kernels for a storage type, a head dim and numbers of query rows and keys. `wgmma`: with
/// those for Hopper.
fn backward_kernels(
    dtype: Dtype,
    dim: usize,
    [rows, keys]: [usize; 2],
    given: Given,
    wgmma: bool,
) -> Result<Vec<BackwardKernel>> {
    let kernels = u32::try_from(dim).ok().and_then(|dim| {
        let call = BackwardShape { dtype, dim, rows, keys, bias: given.bias };
        let third = if given.d_bias { Some(BackwardKernel::of_bias(dtype, dim)?) } else { None };
        Some(BackwardKernel::for_call(&call, wgmma)?.into_iter().chain(third).collect())
    });
    kernels.filter(|_| dim.is_multiple_of(8)).ok_or_else(|| {
        Error::request(
            format!("gradients with head dim {dim} on CUDA"),
            "use a head dim that is a multiple of 8 up to 256, or another backend",
        )
    })
}

/// In a box: the code of a future is compiled in each crate that awaits it as its own type, with
/// all that it calls in closures.
#[inline(never)]
pub(crate) fn attend_backward<'a>(
    device: &'a OpenDevice,
    args: AttendBackward<'a, CudaBuffer>,
    control: &'a Control,
) -> LocalBoxFuture<'a, Result<()>> {
    Box::pin(backward_in_pieces(device, args, control))
}

async fn backward_in_pieces(
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
    if args.d_bias.is_some() && args.bias.as_ref().is_none_or(|bias| bias.kind != BiasKind::Additive) {
        return Err(Error::request(
            "the gradient of a bias on CUDA, in a backward call without an additive bias tensor",
            "give the bias tensor, or leave its gradient out",
        ));
    }
    let given = Given { bias: args.bias.is_some(), d_bias: args.d_bias.is_some() };
    let extents = [shape.rows, work.kv_positions.len()];
    let kernels = backward_kernels(args.dtype, shape.dim, extents, given, device.wgmma)?;
    let call = Call::new(device, &args, kernels)?;
    let all_flops = call.all_flops();
    for pass in &call.passes {
        for part in call.parts(pass) {
            call.run(pass, part, (control, all_flops)).await?;
        }
    }
    Ok(())
}

/// q, k, v and d_o for TMA, in tiles of 64 rows.
fn encoded(
    device: &OpenDevice,
    dtype: Dtype,
    whole: &BackwardArguments,
    kv_heads: u32,
    batch: usize,
) -> Result<[TensorMap; 4]> {
    let AttendArguments { rows, keys, heads, dim, .. } = whole.attend;
    let batch = to_u32("the batch", batch)?;
    let map = |tensor: &TensorArgument, rows, heads| {
        let map = TensorMap::new(tensor, dtype, [batch, rows, heads, dim], BACKWARD_TILE.q_rows);
        driver::encode_tensor_map(&map).map_err(|error| device.error("encode a tensor map", &error))
    };
    Ok([
        map(&whole.attend.q, rows, heads)?,
        map(&whole.attend.k, keys, kv_heads)?,
        map(&whole.attend.v, keys, kv_heads)?,
        map(&whole.d_o, rows, heads)?,
    ])
}

/// A kernel over the whole call.
struct Pass {
    kernel: BackwardKernel,
    work: BackwardList,
    /// Arguments of one launch over the whole call.
    arguments: BackwardArguments,
}

/// Batch entries and heads whose pieces may be in any order.
struct Part {
    batch: Range<usize>,
    heads: Range<usize>,
}

/// A call whose work lists are on the device.
struct Call<'a> {
    device: &'a OpenDevice,
    args: &'a AttendBackward<'a, CudaBuffer>,
    passes: Vec<Pass>,
    /// q, k, v and d_o as TMA copies them, where a kernel is one for Hopper.
    maps: Option<[TensorMap; 4]>,
    /// For each KV head the first query head that reads it, and behind them the number of query
    /// heads.
    readers: Vec<u32>,
    lists: CudaBuffer,
}

impl<'a> Call<'a> {
    fn new(
        device: &'a OpenDevice,
        args: &'a AttendBackward<'a, CudaBuffer>,
        kernels: Vec<BackwardKernel>,
    ) -> Result<Self> {
        let (shape, work) = (args.shape, args.work);
        let readers = head_readers(args.kv_head_of);
        let mut lists = Lists::default();
        let spans = work.classes.iter().flat_map(|class| class.rows.iter().copied()).collect::<Vec<_>>();
        let spans = lists.append(&spans);
        let positions = lists.append(&work.kv_positions);
        let kv_head_of = lists.append(args.kv_head_of);
        let readers_at = lists.append(&readers);
        let passes = kernels.into_iter().map(|kernel| {
            let list = BackwardList::new(work, &kernel);
            (lists.append(&list.starts), lists.append(&list.runs), kernel, list)
        });
        let passes: Vec<_> = passes.collect();
        let lists = device.upload("a backward work list", &lists.bytes)?;
        let base = lists.address();
        let (scale, cap) = logits(args.scale, args.softcap);
        let operand = |operand: &kyklos::backend::Operand<'_, CudaBuffer>| {
            require_alignment(tensor(operand.buffer, &operand.layout, args.dtype.bytes()), args.dtype)
        };
        let (bias, bias_kind) = bias_argument(args.bias.as_ref(), args.dtype);
        let d_bias = args
            .d_bias
            .as_ref()
            .map_or_else(TensorArgument::default, |of_bias| tensor(of_bias.buffer, &of_bias.layout, 4));
        let [d_kv, dv] = [&*args.dk, &*args.dv].map(|sums| tensor(sums, &args.kv_layout, 4));
        let whole = BackwardArguments {
            attend: AttendArguments {
                q: operand(&args.q)?,
                k: operand(&args.k)?,
                v: operand(&args.v)?,
                bias,
                spans: base + spans,
                positions: base + positions,
                kv_head_of: base + kv_head_of,
                rows: to_u32("the number of rows", shape.rows)?,
                keys: to_u32("the number of keys", work.kv_positions.len())?,
                heads: to_u32("the number of heads", shape.heads)?,
                dim: to_u32("the head dim", shape.dim)?,
                classes: to_u32("the batch", work.classes.len())?,
                bias_kind,
                scale,
                cap,
                ..AttendArguments::default()
            },
            d_o: operand(&args.d_o)?,
            stats: tensor(args.stats.buffer, &args.stats.layout, 4),
            d_kv: TensorArgument { data: 0, ..d_kv },
            bias_sum: TensorArgument { data: 0, ..d_bias },
            d_bias: d_bias.data,
            dq: args.dq.address(),
            dk: d_kv.data,
            dv: dv.data,
            readers: base + readers_at,
            scale: args.scale,
            reserved: 0,
        };
        let wgmma = passes.iter().any(|(_, _, kernel, _)| kernel.wgmma);
        let kv_heads = to_u32("the number of KV heads", readers.len() - 1)?;
        let maps =
            if wgmma { Some(encoded(device, args.dtype, &whole, kv_heads, shape.batch)?) } else { None };
        let pass = |(starts, runs, kernel, work): (u64, u64, BackwardKernel, BackwardList)| Pass {
            arguments: BackwardArguments {
                attend: AttendArguments {
                    starts: base + starts,
                    runs: base + runs,
                    q_tiles: work.tiles,
                    ..whole.attend
                },
                ..whole
            },
            kernel,
            work,
        };
        Ok(Self { device, args, passes: passes.into_iter().map(pass).collect(), maps, readers, lists })
    }

    /// The parts of a pass, in their order. Where query heads or batch entries share elements of
    /// the gradient of a bias, each is a part: so each element has one order of additions.
    fn parts(&self, pass: &Pass) -> Vec<Part> {
        let (batch, heads) = (self.args.shape.batch, self.heads(pass));
        let of_bias = self.args.d_bias.as_ref().filter(|_| pass.kernel.makes == BackwardSums::Bias);
        let shared = of_bias.map(|sum| [sum.layout.batch_stride, sum.layout.head_stride].map(|n| n == 0));
        let [one_entry, one_head] = shared.unwrap_or_default();
        let cut = |all: usize, one: bool| {
            let step = if one { 1 } else { all };
            (0..all).step_by(step).map(move |first| first..first + step)
        };
        let entries = cut(batch, one_entry);
        entries
            .flat_map(|batch| cut(heads, one_head).map(move |heads| Part { batch: batch.clone(), heads }))
            .collect()
    }

    /// Query heads, or KV heads where a block has keys of one of them.
    fn heads(&self, pass: &Pass) -> usize {
        let of_keys = pass.kernel.makes == BackwardSums::Keys;
        if of_keys { self.readers.len() - 1 } else { self.args.shape.heads }
    }

    /// Floating-point operations of all passes.
    fn all_flops(&self) -> f64 {
        let of_pass =
            |pass| self.parts(pass).iter().map(|part| self.pieces(pass, part).all_flops()).sum::<f64>();
        self.passes.iter().map(of_pass).sum()
    }

    /// Runs a part of a pass in pieces.
    async fn run(&self, pass: &Pass, part: Part, (control, all_flops): (&Control, f64)) -> Result<()> {
        let (device, kernel, whole) = (self.device, &pass.kernel, &pass.arguments);
        let mut pieces = self.pieces(pass, &part);
        let first_flops_per_s = first_rate(self.args.dtype);
        let blocks = kernel.tile_blocks() as usize;
        let fewest_blocks = device.resident_blocks(kernel.threads, kernel.shared_bytes) as usize;
        let size = || PieceSize {
            flops: device.pacer.piece_flops(&kernel.name, first_flops_per_s),
            fewest_tiles: fewest_blocks.div_ceil(blocks),
        };
        while let Some((piece, flops)) = pieces.next(size()) {
            let count = |tiles: usize| to_u32("the number of tiles", tiles * blocks);
            let arguments = BackwardArguments {
                attend: AttendArguments {
                    first_tile: count(piece.tiles.start)?,
                    first_head: to_u32("the number of heads", part.heads.start + piece.heads.start)?,
                    first_batch: to_u32("the batch", part.batch.start + piece.batch.start)?,
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
            let done = self.launch(pass, launch, arguments)?;
            let done = device.completion_time(done);
            let kernel = name.clone();
            let piece = InFlightPiece { kernel, flops, first_flops_per_s, submitted, done };
            device.pacer.record_submission(piece);
            control.share_done(flops / all_flops)?;
            yield_now().await;
        }
        Ok(())
    }

    fn launch(
        &self,
        pass: &Pass,
        launch: LaunchConfig<'_>,
        backward: BackwardArguments,
    ) -> Result<Arc<Event>> {
        let (device, reads, writes) = (self.device, self.reads(), self.writes(pass));
        match self.maps {
            Some([q, k, v, d_o]) if pass.kernel.wgmma => {
                let arguments = HopperBackwardArguments { q, k, v, d_o, backward, reserved: [0; 12] };
                device.launch(launch, &arguments, &reads, &writes)
            }
            _ => device.launch(launch, &backward, &reads, &writes),
        }
    }

    fn pieces(&self, pass: &Pass, part: &Part) -> PieceSplitter {
        let kernel = &pass.kernel;
        // Products of a pair, and query heads of a block.
        let (products, readers) = match kernel.makes {
            BackwardSums::Queries => (3.0, 1),
            BackwardSums::Keys => {
                (4.0, self.readers.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(1))
            }
            BackwardSums::Bias => (2.0, 1),
        };
        let tile = f64::from(kernel.fixed * kernel.tile_blocks() * kernel.moving * readers);
        let flops = 2.0 * products * tile * self.args.shape.dim as f64;
        let costs = pass.work.met().into_iter();
        let costs = costs.map(|tiles| tiles.into_iter().map(|met| f64::from(met) * flops).collect());
        let mut costs: Vec<Vec<f64>> = costs.collect();
        if costs.len() > 1 {
            // A mask class for each batch entry.
            costs = costs[part.batch.clone()].to_vec();
        }
        PieceSplitter::of_costs(costs, part.batch.len(), part.heads.len())
    }

    fn reads(&self) -> Vec<&CudaBuffer> {
        let args = self.args;
        let bias = args.bias.as_ref().map(|bias| bias.buffer);
        [args.q.buffer, args.k.buffer, args.v.buffer, args.d_o.buffer, args.stats.buffer, &self.lists]
            .into_iter()
            .chain(bias)
            .collect()
    }

    fn writes(&self, pass: &Pass) -> Vec<&CudaBuffer> {
        let args = self.args;
        match pass.kernel.makes {
            BackwardSums::Queries => vec![&*args.dq],
            BackwardSums::Keys => vec![&*args.dk, &*args.dv],
            BackwardSums::Bias => args.d_bias.iter().map(|of_bias| &*of_bias.buffer).collect(),
        }
    }
}
