//! Attention of a block of queries over a block of keys: the work list and the launches.

use std::sync::Arc;
use std::time::Instant;

use bytemuck::Pod;
use futures_util::future::LocalBoxFuture;
use kyklos::backend::{Attend, BiasInput, Control, Layout, Results, State, StateMut, yield_now};
use kyklos::{BiasKind, Dtype, Error, Result};

use super::arguments::{row_launch_config, state_arguments, tensor, to_u32};
use super::choose::choose_kernel;
use super::lists::Lists;
use super::pieces::{Piece, PieceSplitter, take};
use super::state::{deferred_reset, finalize, upload_sinks};
use crate::device::{CudaBuffer, Deferred, InFlightPiece, LaunchConfig, OpenDevice, PieceSize};
use crate::driver::{self, Event};
use crate::kernels::{
    AttendArguments, AttendKernel, DecodeArguments, DeviceWork, HeadPack, HopperArguments, KernelChoice,
    PartsArguments, StateArguments, TensorArgument, TensorMap, decode_parts, head_packs, logits,
};

/// Assumed speed in FLOP/s before the first measurement. Too low a value only makes the first piece
/// short.
pub(super) fn first_rate(dtype: Dtype) -> f64 {
    if dtype == Dtype::F32 { 1e12 } else { 1e13 }
}

/// In a box: the code of a future is compiled in each crate that awaits it as its own type, with
/// all that it calls in closures.
#[inline(never)]
pub(crate) fn attend<'a>(
    device: &'a OpenDevice,
    args: Attend<'a, CudaBuffer>,
    control: &'a Control,
) -> LocalBoxFuture<'a, Result<()>> {
    Box::pin(async move { attend_in_pieces(device, args, None, control).await.map(drop) })
}

/// As [`attend`], and then the results, by the same kernel if it can write them.
#[inline(never)]
pub(crate) fn attend_and_finalize<'a>(
    device: &'a OpenDevice,
    args: Attend<'a, CudaBuffer>,
    results: Results<'a, CudaBuffer>,
    control: &'a Control,
) -> LocalBoxFuture<'a, Result<()>> {
    Box::pin(async move {
        let (dtype, StateMut { a, ml, shape }) = (args.dtype, args.state);
        let args = Attend { state: StateMut { a: &mut *a, ml: &mut *ml, shape }, ..args };
        let Results { sinks, o, lse } = results;
        let wanted = Results { sinks, o: &mut *o, lse: &mut *lse };
        if attend_in_pieces(device, args, Some(wanted), control).await? {
            return Ok(());
        }
        finalize(device, &State { a, ml, shape }, sinks, dtype, o, lse)
    })
}

/// Returns whether the results were written. Only the kernel for Hopper writes them, and only those
/// of a fresh state.
async fn attend_in_pieces(
    device: &OpenDevice,
    args: Attend<'_, CudaBuffer>,
    wanted: Option<Results<'_, CudaBuffer>>,
    control: &Control,
) -> Result<bool> {
    let shape = args.state.shape;
    if shape.batch == 0 || shape.rows == 0 || shape.heads == 0 || args.work.is_empty() {
        return Ok(false);
    }
    let packs = head_packs(args.kv_head_of);
    let (choice, kernel) = choose_kernel(device, &args, &packs)?;
    let work = DeviceWork::new(args.work);
    let reset = deferred_reset(device, &args.state)?;
    let order = match choice {
        KernelChoice::Hopper => work.longest_first(to_u32("the batch", shape.batch)?, reset.is_some()),
        KernelChoice::Tiled | KernelChoice::Decode => Vec::new(),
    };
    let list: &[u8] = match choice {
        KernelChoice::Tiled => &[],
        KernelChoice::Decode => bytemuck::cast_slice(&packs),
        KernelChoice::Hopper => bytemuck::cast_slice(&order),
    };
    let (lists, list_at, mut arguments) = prepare(device, &args, &work, list)?;
    arguments.fresh = u32::from(reset.is_some());
    let results = wanted.filter(|_| choice == KernelChoice::Hopper && reset.is_some());
    let written = results.is_some();
    let call = Call { device, control, args, kernel, lists, arguments, reset };
    match choice {
        KernelChoice::Tiled => call.run_tiled().await?,
        KernelChoice::Decode => call.run_decode(&packs, list_at).await?,
        KernelChoice::Hopper => call.run_hopper(&order, list_at, results).await?,
    }
    Ok(written)
}

/// A call whose work list is on the device.
struct Call<'a> {
    device: &'a OpenDevice,
    control: &'a Control,
    args: Attend<'a, CudaBuffer>,
    kernel: AttendKernel,
    /// The work list, and the packs or the order of query tiles that the kernel needs besides.
    lists: CudaBuffer,
    /// Arguments of one launch over the whole call.
    arguments: AttendArguments,
    /// The reset of the state, which the first launch makes needless.
    reset: Option<Deferred>,
}

/// The arguments of a launch, its grid, and its floating-point operations.
type Submission<A> = (A, [u32; 3], f64);

impl Call<'_> {
    /// One block for each query tile of a head.
    async fn run_tiled(&self) -> Result<()> {
        let mut pieces = self.pieces(self.args.state.shape.heads, self.arguments.fresh);
        let all_flops = pieces.all_flops();
        let next = |size| {
            let (piece, flops) = pieces.next(size)?;
            Some(self.arguments_of(&piece).map(|(arguments, grid)| (arguments, grid, flops)))
        };
        self.submit(1, (next, all_flops), |arguments, grid| self.launch(&arguments, grid)).await
    }

    /// One block for each part of the keys of a query tile of a pack, then a merge of all parts
    /// into the state.
    async fn run_decode(&self, packs: &[HeadPack], packs_at: u64) -> Result<()> {
        let (device, state, dtype) = (self.device, &self.args.state, self.args.dtype);
        let shape = state.shape;
        let key_tiles = self.arguments.keys.div_ceil(self.kernel.tile.kv_cols);
        // One query tile has all rows.
        let tile_rows = self.arguments.rows;
        let rows = packs.iter().map(|pack| pack.count).max().unwrap_or(1) * tile_rows;
        let groups = (packs.len() * shape.batch) as u64;
        let parts = decode_parts(dtype, groups, rows, key_tiles, device.multiprocessors);
        let tile_blocks = AttendKernel::tile_blocks(dtype, rows, parts);
        let [a_bytes, ml_bytes] = [shape.a_bytes(), shape.ml_bytes()].map(|bytes| bytes * parts as usize);
        let states = device.buffer("the states of parts", a_bytes + ml_bytes)?;
        let (from_a, from_ml) = (states.address(), states.address() + a_bytes as u64);
        // A part without keys has a state too, which its block initialises. So no piece may be left out.
        let mut pieces = self.pieces(packs.len(), parts);
        let all_flops = pieces.all_flops();
        let next = |size| {
            let (piece, flops) = pieces.next(size)?;
            let last = pieces.is_finished();
            Some(self.arguments_of(&piece).map(|(attend, [tiles, packs, batch])| {
                let packs_at = packs_at + (piece.heads.start * size_of::<HeadPack>()) as u64;
                let attend = AttendArguments { a: from_a, ml: from_ml, first_head: 0, ..attend };
                let arguments = DecodeArguments {
                    attend,
                    packs: packs_at,
                    parts,
                    batch: self.batch(),
                    tile_rows,
                    tile_blocks,
                };
                ((arguments, last), [tiles * tile_blocks, packs, batch], flops)
            }))
        };
        let into = StateArguments {
            a: state.a.address(),
            ml: state.ml.address(),
            from_a,
            from_ml,
            ..state_arguments(shape)?
        };
        let merge = PartsArguments { state: into, parts, fresh: self.arguments.fresh };
        let merge_parts = row_launch_config("merge_parts", shape)?.expect("there are rows");
        self.submit(tile_blocks, (next, all_flops), |(arguments, last), grid| {
            if !last {
                return device.launch(self.launch_config(grid), &arguments, &self.reads(), &[&states]);
            }
            // The last parts and their merge are submitted together, without a chance to cancel in between.
            device.launch_deferred(self.launch_config(grid), &arguments, &self.reads(), &[&states])?;
            let writes = [&*state.a, &*state.ml];
            device.launch_instead_of(self.reset.as_ref(), merge_parts, &merge, &[&states], &writes)
        })
        .await
    }

    /// One block for each multiprocessor. Each computes several query tiles of `order`, one after
    /// the other.
    async fn run_hopper(
        &self,
        order: &[[u32; 2]],
        order_at: u64,
        results: Option<Results<'_, CudaBuffer>>,
    ) -> Result<()> {
        let sinks = results.as_ref().map(|results| upload_sinks(self.device, results.sinks)).transpose()?;
        let sinks = sinks.flatten();
        let (args, whole, tile) = (&self.args, &self.arguments, self.kernel.tile);
        let kv_heads = args.kv_head_of.iter().max().map_or(0, |head| head + 1);
        let map = |tensor: &TensorArgument, rows, heads, tile_rows| {
            let map = TensorMap::new(tensor, args.dtype, [self.batch(), rows, heads, whole.dim], tile_rows);
            driver::encode_tensor_map(&map).map_err(|error| self.device.error("encode a tensor map", &error))
        };
        let whole = HopperArguments {
            q: map(&whole.q, whole.rows, whole.heads, tile.q_rows)?,
            k: map(&whole.k, whole.keys, kv_heads, tile.kv_cols)?,
            v: map(&whole.v, whole.keys, kv_heads, tile.kv_cols)?,
            attend: *whole,
            order: order_at,
            o: results.as_ref().map_or(0, |results| results.o.address()),
            lse: results.as_ref().map_or(0, |results| results.lse.address()),
            sinks: sinks.as_ref().map_or(0, CudaBuffer::address),
            ..HopperArguments::default()
        };
        let reads: Vec<_> = self.reads().into_iter().chain(&sinks).collect();
        let writes = match &results {
            Some(Results { o, lse, .. }) => [&**o, &**lse],
            None => [&*args.state.a, &*args.state.ml],
        };
        let heads = args.state.shape.heads;
        let (mut done, items) = (0, order.len() * heads);
        let pieces = self.pieces(heads, whole.attend.fresh);
        let cost = |item: usize| {
            let [tile, batch] = order[item / heads];
            pieces.tile_flops(batch as usize)[tile as usize]
        };
        let next = |size| {
            let first = done;
            if first == items {
                return None;
            }
            let (end, flops) = take(first..items, size, 1, cost);
            done = end;
            let count = |items| to_u32("query tiles times heads", items);
            Some(count(first).and_then(|first_item| {
                let arguments = HopperArguments { first_item, end_item: count(end)?, ..whole };
                let blocks = (arguments.end_item - first_item).min(self.device.multiprocessors);
                Ok((arguments, [blocks, 1, 1], flops))
            }))
        };
        self.submit(1, (next, pieces.all_flops()), |arguments, grid| {
            let launch = self.launch_config(grid);
            self.device.launch_instead_of(self.reset.as_ref(), launch, &arguments, &reads, &writes)
        })
        .await
    }

    fn pieces(&self, heads: usize, extra_tiles: u32) -> PieceSplitter {
        let shape = self.args.state.shape;
        PieceSplitter::new(self.args.work, shape.batch, heads, shape.dim, extra_tiles)
    }

    fn batch(&self) -> u32 {
        u32::try_from(self.args.state.shape.batch).expect("pieces were counted in 32 bits")
    }

    /// The arguments and the grid of a piece.
    fn arguments_of(&self, piece: &Piece) -> Result<(AttendArguments, [u32; 3])> {
        let arguments = AttendArguments {
            first_tile: to_u32("the number of query tiles", piece.tiles.start)?,
            first_head: to_u32("the number of heads", piece.heads.start)?,
            first_batch: to_u32("the batch", piece.batch.start)?,
            ..self.arguments
        };
        let grid = [
            to_u32("the number of query tiles", piece.tiles.len())?,
            to_u32("the number of heads", piece.heads.len())?,
            to_u32("the batch", piece.batch.len())?,
        ];
        Ok((arguments, grid))
    }

    /// Submits a call in pieces: `next` gives the next piece, whose tiles have `tile_blocks` blocks
    /// each, and its operations, of `all_flops`; `launch` submits it.
    async fn submit<A>(
        &self,
        tile_blocks: u32,
        (mut next, all_flops): (impl FnMut(PieceSize) -> Option<Result<Submission<A>>>, f64),
        launch: impl Fn(A, [u32; 3]) -> Result<Arc<Event>>,
    ) -> Result<()> {
        let Self { device, args, kernel, .. } = self;
        let first_rate = first_rate(args.dtype);
        let fewest_tiles =
            device.resident_blocks(kernel.threads, kernel.shared_bytes).div_ceil(tile_blocks) as usize;
        let size = || PieceSize { flops: device.pacer.piece_flops(&kernel.name, first_rate), fewest_tiles };
        while let Some(submission) = next(size()) {
            let (arguments, grid, flops) = submission?;
            device.pacer.wait_for_slot().await;
            let submitted = Instant::now();
            let done = device.completion_time(launch(arguments, grid)?);
            device.pacer.record_submission(InFlightPiece {
                kernel: kernel.name.clone(),
                flops,
                first_flops_per_s: first_rate,
                submitted,
                done,
            });
            self.control.share_done(flops / all_flops)?;
            yield_now().await;
        }
        Ok(())
    }

    /// Launches the kernel, which reads and writes the state.
    fn launch(&self, arguments: &impl Pod, grid: [u32; 3]) -> Result<Arc<Event>> {
        let (state, launch) = (&self.args.state, self.launch_config(grid));
        let writes = [&*state.a, &*state.ml];
        self.device.launch_instead_of(self.reset.as_ref(), launch, arguments, &self.reads(), &writes)
    }

    fn launch_config(&self, grid: [u32; 3]) -> LaunchConfig<'_> {
        let AttendKernel { name, threads, shared_bytes, .. } = &self.kernel;
        LaunchConfig { kernel: name, grid, threads: *threads, shared_bytes: *shared_bytes }
    }

    /// The buffers that the kernel reads besides the state.
    fn reads(&self) -> Vec<&CudaBuffer> {
        let args = &self.args;
        let bias = args.bias.as_ref().map(|bias| bias.buffer);
        [args.q.buffer, args.k.buffer, args.v.buffer, &self.lists].into_iter().chain(bias).collect()
    }
}

/// Uploads the work list, with `list` behind it. Returns their buffer, the address of `list`, and
/// the arguments of one launch over the whole call.
fn prepare(
    device: &OpenDevice,
    args: &Attend<'_, CudaBuffer>,
    work: &DeviceWork,
    list: &[u8],
) -> Result<(CudaBuffer, u64, AttendArguments)> {
    let shape = args.state.shape;
    let mut lists = Lists::default();
    let spans = lists.append(&work.spans);
    let positions = lists.append(&work.positions);
    let starts = lists.append(&work.starts);
    let runs = lists.append(&work.runs);
    let kv_head_of = lists.append(args.kv_head_of);
    let list = lists.append(list);
    let buffer = device.upload("a work list", &lists.bytes)?;
    let base = buffer.address();
    let (scale, cap) = logits(args.scale, args.softcap);
    let operand = |buffer: &CudaBuffer, layout: &Layout| {
        require_alignment(tensor(buffer, layout, args.dtype.bytes()), args.dtype)
    };
    let (bias, bias_kind) = bias_argument(args.bias.as_ref(), args.dtype);
    let arguments = AttendArguments {
        q: operand(args.q.buffer, &args.q.layout)?,
        k: operand(args.k.buffer, &args.k.layout)?,
        v: operand(args.v.buffer, &args.v.layout)?,
        bias,
        a: args.state.a.address(),
        ml: args.state.ml.address(),
        spans: base + spans,
        positions: base + positions,
        starts: base + starts,
        runs: base + runs,
        kv_head_of: base + kv_head_of,
        rows: to_u32("the number of rows", shape.rows)?,
        keys: to_u32("the number of keys", work.positions.len())?,
        heads: to_u32("the number of heads", shape.heads)?,
        dim: to_u32("the head dim", shape.dim)?,
        classes: work.classes,
        q_tiles: work.q_tiles,
        bias_kind,
        scale,
        cap,
        ..AttendArguments::default()
    };
    Ok((buffer, base + list, arguments))
}

/// The mask or bias tensor of a call, and its kind as kernels take it.
pub(super) fn bias_argument(bias: Option<&BiasInput<'_, CudaBuffer>>, dtype: Dtype) -> (TensorArgument, u32) {
    match bias {
        None => (TensorArgument::default(), 0),
        Some(bias) => match bias.kind {
            BiasKind::Mask => (tensor(bias.buffer, &bias.layout, 4), 1),
            BiasKind::Additive => (tensor(bias.buffer, &bias.layout, dtype.bytes()), 2),
        },
    }
}

/// Refuses a tensor whose heads are not on 16-byte boundaries: kernels load 16 bytes at a time.
pub(super) fn require_alignment(tensor: TensorArgument, dtype: Dtype) -> Result<TensorArgument> {
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
