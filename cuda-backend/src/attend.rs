//! One call of `attend`: its work on the device, and its launches.

use std::sync::Arc;
use std::time::Instant;

use bytemuck::Pod;
use kyklos::backend::{Attend, Control, Layout, StateShape, yield_now};
use kyklos::{AttentionProblem, BiasKind, Dtype, Error, Result, TileShape};

use crate::arguments::{
    AttendArguments, DecodeArguments, HeadPack, PartsArguments, StateArguments, TensorArgument, logits,
};
use crate::backend::{CudaBackend, narrow};
use crate::decode::{decode_parts, head_packs};
use crate::device::{Launch, moment};
use crate::driver::{self, Event};
use crate::hopper::{HopperArguments, TensorMap};
use crate::kernels::{AttendKernel, PACKED_ROWS};
use crate::ops;
use crate::pace::Flight;
use crate::pieces::{Piece, Pieces, fill};
use crate::pool::CudaBuffer;
use crate::way::{CallShape, Way};
use crate::work::DeviceWork;

/// Operations a second, before anything was measured: too few only make the first piece short.
fn first_rate(dtype: Dtype) -> f64 {
    if dtype == Dtype::F32 { 1e12 } else { 1e13 }
}

pub(crate) async fn attend(
    backend: &CudaBackend,
    args: Attend<'_, CudaBuffer>,
    control: &Control,
) -> Result<()> {
    let shape = args.state.shape;
    if shape.batch == 0 || shape.rows == 0 || shape.heads == 0 || args.work.is_empty() {
        return Ok(());
    }
    let packs = head_packs(args.kv_head_of);
    let (way, kernel) = way_of(backend, &args, &packs)?;
    let work = DeviceWork::new(args.work);
    let order = match way {
        Way::Hopper => work.longest_first(narrow("the batch", shape.batch)?),
        Way::Tiles | Way::Parts => Vec::new(),
    };
    let list: &[u8] = match way {
        Way::Tiles => &[],
        Way::Parts => bytemuck::cast_slice(&packs),
        Way::Hopper => bytemuck::cast_slice(&order),
    };
    let (lists, list, arguments) = prepare(backend, &args, &work, list)?;
    let call = Call { backend, control, args, kernel, lists, arguments };
    match way {
        Way::Tiles => call.tiles().await,
        Way::Parts => call.parts(&packs, list).await,
        Way::Hopper => call.hopper(&order, list).await,
    }
}

/// The tiles for calls of `problem` on states of this shape; none for a head dim without a kernel.
pub(crate) fn tile_shape(problem: &AttentionProblem, shape: StateShape, wgmma: bool) -> Option<TileShape> {
    // Which heads they are is not known here: of a KV head all that share it.
    let pack = (problem.q_heads / problem.kv_heads).min(PACKED_ROWS);
    let call = CallShape {
        dtype: problem.dtype,
        dim: problem.head_dim,
        // A number of rows that is too large is refused by the call.
        rows: u32::try_from(shape.rows).unwrap_or(u32::MAX),
        pack: pack.min(u32::try_from(shape.heads).unwrap_or(u32::MAX)).max(1),
        pairs: problem.bias.is_some(),
        fixed_order: problem.fixed_order,
    };
    Way::all(&call, wgmma).first().map(|(_, kernel)| kernel.tile)
}

/// The way that the tiles of a call are for, and its kernel.
fn way_of(
    backend: &CudaBackend,
    args: &Attend<'_, CudaBuffer>,
    packs: &[HeadPack],
) -> Result<(Way, AttendKernel)> {
    let shape = args.state.shape;
    let call = CallShape {
        dtype: args.dtype,
        dim: narrow("the head dim", shape.dim)?,
        rows: narrow("the number of rows", shape.rows)?,
        pack: packs.iter().map(|pack| pack.count).max().unwrap_or(1),
        pairs: args.pairs.is_some(),
        fixed_order: args.fixed_order,
    };
    let ways = Way::all(&call, backend.wgmma);
    if ways.is_empty() || !call.dim.is_multiple_of(8) {
        return Err(Error::request(
            format!("head dim {} is not supported", call.dim),
            "use a multiple of 8 up to 256",
        ));
    }
    let tile = args.work.tile;
    let tiles: Vec<_> = ways.iter().map(|(_, kernel)| kernel.tile).collect();
    ways.into_iter().find(|(way, kernel)| way.takes(&call, kernel, tile)).ok_or_else(|| {
        Error::request(
            format!("the work list is in tiles of {tile:?}, kernels for this call have {tiles:?}"),
            "lower the mask with this backend's tile_shape for the shape of the state",
        )
    })
}

/// A call whose lists are on the device.
struct Call<'a> {
    backend: &'a CudaBackend,
    control: &'a Control,
    args: Attend<'a, CudaBuffer>,
    kernel: AttendKernel,
    /// The work list, and the list of this way.
    lists: CudaBuffer,
    /// Of a launch over everything.
    arguments: AttendArguments,
}

/// What is launched, its grid, and how many operations it is.
type Submission<A> = (A, [u32; 3], f64);

impl Call<'_> {
    /// A block for each query tile of a head.
    async fn tiles(&self) -> Result<()> {
        let mut pieces = self.pieces(self.args.state.shape.heads, 0);
        let next = |budget| {
            let (piece, flops) = pieces.next(budget)?;
            Some(self.at(&piece).map(|(arguments, grid)| (arguments, grid, flops)))
        };
        self.submit(next, |arguments, grid| self.launch(&arguments, grid)).await
    }

    /// A block for each part of the keys of a query tile of a pack, then the merge of all parts.
    async fn parts(&self, packs: &[HeadPack], packs_at: u64) -> Result<()> {
        let (backend, state, dtype) = (self.backend, &self.args.state, self.args.dtype);
        let shape = state.shape;
        let key_tiles = self.arguments.keys.div_ceil(self.kernel.tile.kv_cols);
        // All rows are in one tile.
        let tile_rows = self.arguments.rows;
        let rows = packs.iter().map(|pack| pack.count).max().unwrap_or(1) * tile_rows;
        let groups = (packs.len() * shape.batch) as u64;
        let parts = decode_parts(dtype, groups, rows, key_tiles, backend.multiprocessors);
        let tile_blocks = AttendKernel::tile_blocks(dtype, rows, parts);
        let [a_bytes, ml_bytes] = [shape.a_bytes(), shape.ml_bytes()].map(|bytes| bytes * parts as usize);
        let states = backend.gpu.buffer("the states of parts", a_bytes + ml_bytes)?;
        let (from_a, from_ml) = (states.address(), states.address() + a_bytes as u64);
        // Parts without keys have a state too: no piece may be left out.
        let mut pieces = self.pieces(packs.len(), parts);
        let next = |budget| {
            let (piece, flops) = pieces.next(budget)?;
            let last = pieces.are_done();
            Some(self.at(&piece).map(|(attend, [tiles, packs, batch])| {
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
            ..ops::state(shape)?
        };
        let merge = PartsArguments { state: into, parts, reserved: 0 };
        let merge_parts = ops::over_rows("merge_parts", shape)?.expect("there are rows");
        self.submit(next, |(arguments, last), grid| {
            if !last {
                return backend.gpu.launch(self.kernel_over(grid), &arguments, &self.reads(), &[&states]);
            }
            // Nothing comes between the last parts and their merge, no cancellation either.
            backend.gpu.hold(self.kernel_over(grid), &arguments, &self.reads(), &[&states])?;
            backend.gpu.launch(merge_parts, &merge, &[&states], &[&*state.a, &*state.ml])
        })
        .await
    }

    /// As many blocks as the device has multiprocessors, which take query tiles of `order` as they come.
    async fn hopper(&self, order: &[[u32; 2]], order_at: u64) -> Result<()> {
        let (args, whole, tile) = (&self.args, &self.arguments, self.kernel.tile);
        let kv_heads = args.kv_head_of.iter().max().map_or(0, |head| head + 1);
        let map = |tensor: &TensorArgument, rows, heads, tile_rows| {
            let map = TensorMap::new(tensor, args.dtype, [self.batch(), rows, heads, whole.dim], tile_rows);
            driver::encode(&map).map_err(|fault| self.backend.gpu.health.error("describe a tensor", &fault))
        };
        let whole = HopperArguments {
            q: map(&whole.q, whole.rows, whole.heads, tile.q_rows)?,
            k: map(&whole.k, whole.keys, kv_heads, tile.kv_cols)?,
            v: map(&whole.v, whole.keys, kv_heads, tile.kv_cols)?,
            attend: *whole,
            order: order_at,
            ..HopperArguments::default()
        };
        let heads = args.state.shape.heads;
        let (mut done, items) = (0, order.len() * heads);
        let pieces = self.pieces(heads, 0);
        let cost = |item: usize| {
            let [tile, batch] = order[item / heads];
            pieces.tiles_of(batch as usize)[tile as usize]
        };
        let next = |budget| {
            let first = done;
            if first == items {
                return None;
            }
            let (end, flops) = fill(first..items, budget, cost);
            done = end;
            let count = |items| narrow("query tiles times heads", items);
            Some(count(first).and_then(|first_item| {
                let arguments = HopperArguments { first_item, end_item: count(end)?, ..whole };
                let blocks = (arguments.end_item - first_item).min(self.backend.multiprocessors);
                Ok((arguments, [blocks, 1, 1], flops))
            }))
        };
        self.submit(next, |arguments, grid| self.launch(&arguments, grid)).await
    }

    fn pieces(&self, heads: usize, more_tiles: u32) -> Pieces {
        let shape = self.args.state.shape;
        Pieces::new(self.args.work, shape.batch, heads, shape.dim, more_tiles)
    }

    fn batch(&self) -> u32 {
        u32::try_from(self.args.state.shape.batch).expect("pieces were counted in 32 bits")
    }

    /// Arguments and grid of a piece.
    fn at(&self, piece: &Piece) -> Result<(AttendArguments, [u32; 3])> {
        let arguments = AttendArguments {
            first_tile: narrow("the number of query tiles", piece.tiles.start)?,
            first_head: narrow("the number of heads", piece.heads.start)?,
            first_batch: narrow("the batch", piece.batch.start)?,
            ..self.arguments
        };
        let grid = [
            narrow("the number of query tiles", piece.tiles.len())?,
            narrow("the number of heads", piece.heads.len())?,
            narrow("the batch", piece.batch.len())?,
        ];
        Ok((arguments, grid))
    }

    /// Has `launch` submit what `next` makes of each budget of operations, until it makes nothing.
    async fn submit<A>(
        &self,
        mut next: impl FnMut(f64) -> Option<Result<Submission<A>>>,
        launch: impl Fn(A, [u32; 3]) -> Result<Arc<Event>>,
    ) -> Result<()> {
        let Self { backend, args, kernel, .. } = self;
        let first_rate = first_rate(args.dtype);
        while let Some(submission) = next(backend.pace.piece_flops(&kernel.name, first_rate)) {
            let (arguments, grid, flops) = submission?;
            backend.pace.room().await;
            let submitted = Instant::now();
            let done = moment(&backend.watch, launch(arguments, grid)?);
            backend.pace.submitted(Flight { kernel: kernel.name.clone(), flops, submitted, done });
            self.control.piece_done()?;
            yield_now().await;
        }
        Ok(())
    }

    /// Launches the kernel on the state itself.
    fn launch(&self, arguments: &impl Pod, grid: [u32; 3]) -> Result<Arc<Event>> {
        let state = &self.args.state;
        let launch = self.kernel_over(grid);
        self.backend.gpu.launch(launch, arguments, &self.reads(), &[&*state.a, &*state.ml])
    }

    fn kernel_over(&self, grid: [u32; 3]) -> Launch<'_> {
        let AttendKernel { name, threads, shared_bytes, .. } = &self.kernel;
        Launch { kernel: name, grid, threads: *threads, shared_bytes: *shared_bytes }
    }

    /// What the kernel reads besides a state.
    fn reads(&self) -> Vec<&CudaBuffer> {
        let args = &self.args;
        let pairs = args.pairs.as_ref().map(|pairs| pairs.buffer);
        [args.q.buffer, args.k.buffer, args.v.buffer, &self.lists].into_iter().chain(pairs).collect()
    }
}

/// Uploads the work list and another list. Their buffer, the other list's address in it, and the arguments of a launch over
/// everything.
fn prepare(
    backend: &CudaBackend,
    args: &Attend<'_, CudaBuffer>,
    work: &DeviceWork,
    list: &[u8],
) -> Result<(CudaBuffer, u64, AttendArguments)> {
    let shape = args.state.shape;
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
    let list = place(list);
    let buffer = backend.gpu.upload(&backend.watch, "a work list", &bytes)?;
    let base = buffer.address();
    let (scale, cap) = logits(args.scale, args.softcap);
    let operand = |buffer: &CudaBuffer, layout: &Layout| {
        aligned(tensor(buffer, layout, args.dtype.bytes()), args.dtype)
    };
    let (pairs, pair_kind) = match &args.pairs {
        None => (TensorArgument::default(), 0),
        Some(pairs) => match pairs.kind {
            BiasKind::Mask => (tensor(pairs.buffer, &pairs.layout, 4), 1),
            BiasKind::Additive => (tensor(pairs.buffer, &pairs.layout, args.dtype.bytes()), 2),
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
    Ok((buffer, base + list, arguments))
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
