//! One call of `attend_backward`: a kernel whose workgroups own the gradients of query rows, then
//! one or two whose workgroups own those of keys, and on request one for the gradient of a bias. As
//! in `attend` each is cut into regions that fit the device's bindings, and each region into pieces
//! of bounded time. No cut depends on measured speed. So on a device whose kernels are not compared
//! with each other, neither does a byte of the sums.
//!
//! Where query heads or batch entries share elements of the gradient of a bias, the heads of a
//! region, and the batch entries, have submissions of their own. The device runs them one after the
//! other.

mod lists;
mod stats;
mod tensors;

use std::ops::Range;

use futures_util::future::LocalBoxFuture;
use kyklos_shaders::{BackwardKernel, BackwardParams, BackwardVariant, Kernel, Sums};

use self::lists::{Lists, Side};
pub(super) use self::stats::row_stats;
use self::tensors::{Region, Tensors, Windows};
use super::backend::WgpuBackend;
use super::numbers::{checked_dim, narrow, storage};
use crate::backend::wgpu::attention::operands::{bias_of, factors};
use crate::backend::wgpu::running::clock::now_s;
use crate::backend::wgpu::running::items::Items;
use crate::backend::wgpu::running::pacing::whole_tiles;
use crate::backend::wgpu::running::pieces::{Flight, Pace};
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::wgpu::storage::region::cut;
use crate::backend::{AttendBackward, Control, Layout, yield_now};
use crate::error::{Error, Result};
use kyklos_plan::TileShape;

/// The tiles of work lists for heads of `head_dim` elements.
pub(super) fn tile_shape(variant: BackwardVariant, head_dim: u32) -> TileShape {
    let tile = variant.list_tile(head_dim);
    TileShape { q_rows: tile.q_rows, kv_cols: tile.kv_cols }
}

/// In a box: the code of a future is compiled in each crate that awaits it as its own type, with
/// all that it calls in closures.
#[inline(never)]
pub(super) fn attend_backward<'a>(
    backend: &'a WgpuBackend,
    args: AttendBackward<'a, WgpuBuffer>,
    control: &'a Control,
) -> LocalBoxFuture<'a, Result<()>> {
    Box::pin(backward_in_pieces(backend, args, control))
}

async fn backward_in_pieces(
    backend: &WgpuBackend,
    args: AttendBackward<'_, WgpuBuffer>,
    control: &Control,
) -> Result<()> {
    let shape = args.shape;
    if shape.batch == 0 || shape.rows == 0 || shape.heads == 0 || args.work.is_empty() {
        return control.piece_done();
    }
    let call = Call::new(backend, &args)?;
    let tile = tile_shape(call.variant, call.head_dim);
    if args.work.tile != tile {
        return Err(Error::request(
            format!("the work list is in tiles of {:?}, the backward kernels' are {tile:?}", args.work.tile),
            "lower the mask with this backend's backward_tile_shape",
        ));
    }
    let of_keys = call.variant.of_keys(call.head_dim, call.bias).iter().copied();
    let all = [Sums::Queries].into_iter().chain(of_keys).chain(call.of_bias()?);
    let passes: Vec<_> = all.map(|sums| Pass::new(&call, sums)).collect();
    backend.gpu.compile(passes.iter().map(|pass| pass.kernel))?;
    let all_flops: f64 = passes.iter().map(Pass::all_flops).sum();
    for pass in passes {
        for region in pass.regions() {
            let windows = call.tensors.windows(&backend.gpu, &args, pass.kernel, &region)?;
            for heads in pass.heads_at_once() {
                let mut items = pass.items(&region, heads.len());
                while let Some((items, flops)) = items.next(backend.pace.size(&pass.kernel)) {
                    backend.pace.room().await;
                    backend.gpu.check()?;
                    pass.submit(&region, &heads, &windows, items, flops)?;
                    control.share_done(flops / all_flops)?;
                    yield_now().await;
                }
            }
        }
    }
    Ok(())
}

/// Data that all kernels of a call share.
struct Call<'a> {
    backend: &'a WgpuBackend,
    args: &'a AttendBackward<'a, WgpuBuffer>,
    variant: BackwardVariant,
    head_dim: u32,
    bias: kyklos_shaders::BiasInput,
    tensors: Tensors,
    lists: Lists,
    uploaded: WgpuBuffer,
}

impl<'a> Call<'a> {
    fn new(backend: &'a WgpuBackend, args: &'a AttendBackward<'a, WgpuBuffer>) -> Result<Self> {
        let lists = Lists::new(args.work, args.kv_head_of)?;
        let head_dim = checked_dim(args.shape.dim)?;
        let bias = bias_of(args.bias.as_ref().map(|bias| bias.kind));
        Ok(Self {
            variant: backend.backward_variant(args.dtype, head_dim, args.shape, bias),
            head_dim,
            bias,
            tensors: Tensors::new(args, lists.readers.len()),
            uploaded: backend.gpu.buffer_with("backward lists", bytemuck::cast_slice(&lists.words))?,
            lists,
            backend,
            args,
        })
    }

    /// The kernel for the gradient of the bias, if the call asks for it.
    fn of_bias(&self) -> Result<Option<Sums>> {
        let Some(of_bias) = &self.args.d_bias else { return Ok(None) };
        if self.bias != kyklos_shaders::BiasInput::Bias {
            return Err(Error::request(
                "the gradient of a bias, in a backward call without an additive bias tensor",
                "give the bias tensor, or leave its gradient out",
            ));
        }
        Ok(Some(if of_bias.layout.row_stride == 0 { Sums::SharedBias } else { Sums::Bias }))
    }
}

/// One kernel over all of a call.
struct Pass<'a> {
    call: &'a Call<'a>,
    backward: BackwardKernel,
    kernel: Kernel,
    side: &'a Side,
    /// Operations of a workgroup for each row or key that it loops over.
    flops: f64,
}

impl<'a> Pass<'a> {
    fn new(call: &'a Call<'a>, sums: Sums) -> Self {
        let backward = BackwardKernel {
            variant: call.variant,
            sums,
            storage: storage(call.args.dtype),
            head_dim: call.head_dim,
            softcap: call.args.softcap.is_some(),
            bias: call.bias,
        };
        let most_readers = call.lists.readers.iter().map(ExactSizeIterator::len).max().unwrap_or(1);
        let heads =
            if sums.of_one_query_head() { 1 } else { u32::try_from(most_readers).unwrap_or(u32::MAX) };
        Self {
            call,
            backward,
            kernel: Kernel::AttendBackward(backward),
            side: &call.lists.sides[usize::from(!sums.rows_are_fixed())],
            flops: Pace::backward_flops(&backward, heads),
        }
    }

    /// Query heads, or KV heads where a workgroup is of one of them.
    fn heads(&self) -> usize {
        let of_query = self.backward.sums.of_one_query_head();
        if of_query { self.call.args.shape.heads } else { self.call.lists.readers.len() }
    }

    /// The layout of the gradient of the bias, if this is its kernel.
    fn bias_layout(&self) -> Option<Layout> {
        self.call.args.d_bias.as_ref().filter(|_| self.backward.sums.of_bias()).map(|of_bias| of_bias.layout)
    }

    /// Heads that add to elements of their own, and so may be in one dispatch.
    fn heads_at_once(&self) -> Vec<Range<usize>> {
        let shared = self.bias_layout().is_some_and(|layout| layout.head_stride == 0);
        cut(0..self.heads(), if shared { 1 } else { self.heads() }).collect()
    }

    fn by_rows(&self) -> bool {
        self.backward.sums.rows_are_fixed()
    }

    /// What workgroups have tiles of, and what they loop over.
    fn sides(&self, region: &Region) -> [Range<usize>; 2] {
        let sides = [region.rows.clone(), region.keys.clone()];
        if self.by_rows() { sides } else { [sides[1].clone(), sides[0].clone()] }
    }

    /// Cuts what does not fit the device's bindings, and loops that would take longer than a piece
    /// may.
    fn regions(&self) -> Vec<Region> {
        let gpu = &self.call.backend.gpu;
        let limit = gpu.window_bytes();
        let (shape, keys) = (self.call.args.shape, self.call.args.work.kv_positions.len());
        let tensors = &self.call.tensors;
        let TileShape { q_rows, kv_cols } = self.call.args.work.tile;
        let whole = |rows: usize, tile: u32| whole_tiles(rows, tile as usize);
        let shared_batch = self.bias_layout().is_some_and(|layout| layout.batch_stride == 0);
        let mut batch_step = if tensors.fit(limit) && !shared_batch { shape.batch } else { 1 };
        let mut row_step = whole(tensors.rows_within(limit), q_rows);
        let mut key_step = whole(tensors.keys_within(limit), kv_cols);
        let (fixed, moving, all, tile) = if self.by_rows() {
            (shape.rows.min(row_step), &mut key_step, keys, kv_cols)
        } else {
            (keys.min(key_step), &mut row_step, shape.rows, q_rows)
        };
        if self.kernel.reads_textures() {
            // One row of a texture for each moving row of each batch entry.
            let most = gpu.limits.max_texture_dimension_2d as usize;
            batch_step = batch_step.min((most / all).max(1));
            *moving = (*moving).min(most);
        }
        let heads = self.heads_at_once().first().map_or(0, ExactSizeIterator::len);
        let items = batch_step * heads * fixed.div_ceil(self.backward.tile_rows() as usize);
        let at_once = self.call.backend.pace.grain.keys_at_once(self.flops, items as u64, tile as usize);
        *moving = whole((*moving).min(at_once), tile);
        let mut regions = Vec::new();
        for batch in cut(0..shape.batch, batch_step) {
            for rows in cut(0..shape.rows, row_step) {
                for keys in cut(0..keys, key_step) {
                    regions.push(Region { batch: batch.clone(), rows: rows.clone(), keys });
                }
            }
        }
        regions
    }

    /// Tiles of the workgroups of a region, in their own size.
    fn tiles(&self, region: &Region) -> Range<usize> {
        let [fixed, _] = self.sides(region);
        let own = self.backward.tile_rows() as usize;
        fixed.start / own..fixed.end.div_ceil(own)
    }

    /// Operations of the pass.
    fn all_flops(&self) -> f64 {
        let batch = 0..self.call.args.shape.batch;
        let keys = 0..self.call.args.work.kv_positions.len();
        self.items(&Region { batch, rows: 0..self.call.args.shape.rows, keys }, self.heads()).all_flops()
    }

    fn items(&self, region: &Region, heads: usize) -> Items {
        let [_, moving] = self.sides(region);
        let narrow = |n: usize| u32::try_from(n).expect("Lists::new counted rows and keys in u32");
        let moving = narrow(moving.start)..narrow(moving.end);
        let own = self.backward.tiles_of_list() as usize;
        let tiles: Vec<usize> =
            if self.by_rows() { self.tiles(region).rev().collect() } else { self.tiles(region).collect() };
        let met = |class| {
            tiles.iter().map(|tile| self.side.list.met(class, tile / own, &moving)).collect::<Vec<_>>()
        };
        let classes = 0..=self.call.lists.last_class;
        Items::new(classes.map(met).collect(), &region.batch, heads, self.flops)
    }

    fn submit(
        &self,
        region: &Region,
        heads: &Range<usize>,
        windows: &Windows<'_>,
        items: Range<u64>,
        flops: f64,
    ) -> Result<()> {
        let gpu = &self.call.backend.gpu;
        let grid = gpu.grid(items.end - items.start)?;
        let mut params = self.params(region, windows)?;
        let narrow =
            |n: u64| narrow("the number of tiles or heads", usize::try_from(n).unwrap_or(usize::MAX));
        params.heads = narrow(heads.len() as u64)?;
        params.head_first = narrow(heads.start as u64)?;
        params.first_item = narrow(items.start)?;
        params.items = narrow(items.end - items.start)?;
        params.grid_width = grid.width;
        let lists = gpu.whole("backward lists", &self.call.uploaded)?;
        let bound = windows.bound(self.backward.sums, lists);
        let mut encoder = gpu.encoder("attend backward");
        gpu.record(&mut encoder, self.kernel, bytemuck::bytes_of(&params), &bound, grid)?;
        let submitted_s = now_s();
        let done = gpu.submit(Some(encoder.finish()));
        self.call.backend.pace.submitted(Flight { kernel: self.kernel, flops, submitted_s, done });
        Ok(())
    }

    /// Parameters of the kernel, except for the ranges of heads and of items.
    fn params(&self, region: &Region, windows: &Windows<'_>) -> Result<BackwardParams> {
        let (args, lists, side) = (self.call.args, &self.call.lists, self.side);
        let [fixed, moving] = self.sides(region);
        let tiles = self.tiles(region);
        let (q_scale, x_scale, cap) = factors(args.scale, args.softcap);
        let unit = self.backward.storage.unit_elements() as usize;
        let of_tensors = windows.params(args, &self.call.tensors, self.backward.sums, unit)?;
        Ok(BackwardParams {
            rows: narrow("the number of rows", args.shape.rows)?,
            fixed_end: narrow("the number of rows", fixed.end)?,
            moving_begin: narrow("the number of rows", moving.start)?,
            moving_end: narrow("the number of rows", moving.end)?,
            tile_first: narrow("the number of tiles", tiles.start)?,
            tile_count: narrow("the number of tiles", tiles.len())?,
            batch_first: narrow("the batch", region.batch.start)?,
            last_class: narrow("the number of mask classes", lists.last_class)?,
            starts_at: side.starts_at,
            starts_class: side.list.starts_class,
            runs_at: side.runs_at,
            heads_at: if self.backward.sums.of_one_query_head() { 0 } else { lists.readers_at },
            keys_at: lists.keys_at,
            spans_at: lists.spans_at,
            q_scale,
            x_scale,
            cap,
            scale: args.scale,
            unscale: if x_scale == 1.0 { args.softcap.unwrap_or(1.0) } else { args.scale },
            moving_texels: narrow("the number of rows", moving.len())?,
            ..of_tensors
        })
    }
}
