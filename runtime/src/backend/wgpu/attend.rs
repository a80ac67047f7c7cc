//! One call of `attend`: cut into regions that fit the device's bindings, and those into pieces of bounded time.

use std::ops::Range;

use kyklos_shaders::{AttendKernel, AttendParams, AttendVariant, Kernel};

use super::clock::now_s;
use super::dispatch::{Bound, Window};
use super::pieces::{Flight, Pace};
use super::region::{Strided, cut};
use super::work::WorkList;
use super::{WgpuBackend, WgpuBuffer, checked_dim, narrow, texture};
use crate::backend::{Attend, Control, Layout, Operand, yield_now};
use crate::{Error, Result};

pub(super) async fn attend(
    backend: &WgpuBackend,
    args: Attend<'_, WgpuBuffer>,
    control: &Control,
) -> Result<()> {
    let shape = args.state.shape;
    if shape.batch == 0 || shape.rows == 0 || shape.heads == 0 || args.work.is_empty() {
        return Ok(());
    }
    let call = Call::new(backend, &args)?;
    for region in call.regions() {
        let mut pieces = Pieces::new(&call, &region);
        let windows = call.windows(&region)?;
        while let Some((items, flops)) = pieces.next(backend.pace.piece_flops(&call.kernel)) {
            backend.pace.room().await;
            backend.gpu.check()?;
            call.submit(&region, &windows, items, flops)?;
            control.piece_done()?;
            yield_now().await;
        }
    }
    Ok(())
}

/// What all pieces of a call share.
struct Call<'a> {
    backend: &'a WgpuBackend,
    args: &'a Attend<'a, WgpuBuffer>,
    kernel: AttendKernel,
    list: WorkList,
    positions: WgpuBuffer,
    work: WgpuBuffer,
    q: Strided,
    k: Strided,
    v: Strided,
    a: Strided,
}

/// Batch entries, Q tiles and keys whose tensors can be bound together.
#[derive(Clone, Debug)]
struct Region {
    batch: Range<usize>,
    tiles: Range<usize>,
    keys: Range<u32>,
}

/// The tensors of a region.
struct Windows<'a> {
    q: Window<'a>,
    kv: KeysValues<'a>,
    a: Window<'a>,
    ml: Window<'a>,
}

/// Keys and values, as the kernel's variant reads them.
enum KeysValues<'a> {
    Buffers { k: Window<'a>, v: Window<'a> },
    Textures { k: wgpu::TextureView, v: wgpu::TextureView },
}

impl<'a> Call<'a> {
    fn new(backend: &'a WgpuBackend, args: &'a Attend<'a, WgpuBuffer>) -> Result<Self> {
        let shape = args.state.shape;
        let softcap = args.softcap.is_some();
        let kernel = backend.attend_kernel(args.dtype, checked_dim(shape.dim)?, softcap);
        let tile = kernel.tile();
        if (args.work.tile.q_rows, args.work.tile.kv_cols) != (tile.q_rows, tile.kv_cols) {
            return Err(Error::request(
                format!("the work list is in tiles of {:?}, the kernel's are {tile:?}", args.work.tile),
                "lower the mask with this backend's tile_shape",
            ));
        }
        let list = WorkList::new(args.work, args.kv_head_of)?;
        let gpu = &backend.gpu;
        let upload = |label, words: &[u32]| gpu.buffer_with(label, bytemuck::cast_slice(words));
        let kv_heads = 1 + args.kv_head_of.iter().max().copied().unwrap_or(0) as usize;
        let strided = |operand: &Operand<'_, WgpuBuffer>, rows, heads| {
            Strided::new(operand.layout, args.dtype.bytes(), [shape.batch, rows, heads, shape.dim])
        };
        let keys = args.work.kv_positions.len();
        Ok(Self {
            q: strided(&args.q, shape.rows, shape.heads),
            k: strided(&args.k, keys, kv_heads),
            v: strided(&args.v, keys, kv_heads),
            a: Strided::dense_f32([shape.batch, shape.rows, shape.heads, shape.dim]),
            positions: upload("attend positions", &list.positions)?,
            work: upload("attend work list", &list.work)?,
            backend,
            args,
            kernel,
            list,
        })
    }

    /// Cuts what does not fit the device's bindings: into batch entries, then rows, then keys. Keys are also cut where
    /// as many Q tiles as keep the device busy would take longer than a piece should.
    ///
    /// The cut depends on shapes and on the kind of device only, not on measured times: where a state is stored and
    /// loaded again it is rounded, and the same call must give the same bytes.
    fn regions(&self) -> Vec<Region> {
        let limit = self.backend.gpu.window_bytes();
        let shape = self.args.state.shape;
        let tile = self.kernel.tile();
        let (q_rows, kv_cols) = (tile.q_rows as usize, tile.kv_cols as usize);
        let all = [&self.q, &self.k, &self.v, &self.a];
        let mut batch_step = if all.iter().all(|tensor| tensor.fits(limit)) { shape.batch } else { 1 };
        let rows = self.q.rows_within(limit).min(self.a.rows_within(limit));
        let tile_step = (rows / q_rows).max(1);
        let mut keys = self.k.rows_within(limit).min(self.v.rows_within(limit));
        if self.reads_textures() {
            // One row of a texture for each key of each batch entry.
            let most = self.backend.gpu.limits.max_texture_dimension_2d as usize;
            batch_step = batch_step.min((most / self.args.work.kv_positions.len()).max(1));
            keys = keys.min(most);
        }
        let tiles = self.args.work.q_tiles();
        let items = (batch_step * shape.heads * tiles.min(tile_step)) as u64;
        let key_step =
            keys.min(self.backend.pace.keys_at_once(&self.kernel, items)).max(kv_cols) / kv_cols * kv_cols;
        let keys = self.args.work.kv_positions.len();
        let mut regions = Vec::new();
        for batch in cut(0..shape.batch, batch_step) {
            for tiles in cut(0..tiles, tile_step) {
                for keys in cut(0..keys, key_step) {
                    let narrow = |n: usize| u32::try_from(n).expect("WorkList::new counted the keys in u32");
                    regions.push(Region {
                        batch: batch.clone(),
                        tiles: tiles.clone(),
                        keys: narrow(keys.start)..narrow(keys.end),
                    });
                }
            }
        }
        regions
    }

    /// Whether the kernel has k and v as textures.
    fn reads_textures(&self) -> bool {
        matches!(self.kernel.variant, AttendVariant::SubgroupBroadcast { .. })
    }

    fn windows(&self, region: &Region) -> Result<Windows<'_>> {
        let gpu = &self.backend.gpu;
        let (args, shape) = (self.args, self.args.state.shape);
        let q_rows = self.kernel.tile().q_rows as usize;
        let rows = region.tiles.start * q_rows..shape.rows.min(region.tiles.end * q_rows);
        let keys = region.keys.start as usize..region.keys.end as usize;
        let batch = &region.batch;
        let ml = Strided::dense_f32([shape.batch, shape.heads, shape.rows, 2]);
        Ok(Windows {
            q: gpu.window("q", args.q.buffer, self.q.bytes(batch, &rows))?,
            kv: if self.reads_textures() {
                let texture = |label, operand: &Operand<'_, WgpuBuffer>, tensor: &Strided| {
                    texture::texture(gpu, label, tensor.source(operand.buffer), batch, &keys)
                };
                KeysValues::Textures {
                    k: texture("k", &args.k, &self.k)?,
                    v: texture("v", &args.v, &self.v)?,
                }
            } else {
                KeysValues::Buffers {
                    k: gpu.window("k", args.k.buffer, self.k.bytes(batch, &keys))?,
                    v: gpu.window("v", args.v.buffer, self.v.bytes(batch, &keys))?,
                }
            },
            a: gpu.window("state a", args.state.a, self.a.bytes(batch, &rows))?,
            ml: gpu.window("state ml", args.state.ml, ml.bytes(batch, &(0..shape.heads)))?,
        })
    }

    fn submit(&self, region: &Region, windows: &Windows<'_>, items: Range<u64>, flops: f64) -> Result<()> {
        let gpu = &self.backend.gpu;
        let grid = gpu.grid(items.end - items.start)?;
        let mut params = self.params(region, windows)?;
        let narrow = |n: u64| narrow("the number of tiles", usize::try_from(n).unwrap_or(usize::MAX));
        params.first_item = narrow(items.start)?;
        params.items = narrow(items.end - items.start)?;
        params.grid_width = grid.width;
        let [k, v] = match &windows.kv {
            KeysValues::Buffers { k, v } => [Bound::Buffer(*k), Bound::Buffer(*v)],
            KeysValues::Textures { k, v } => [Bound::Texture(k), Bound::Texture(v)],
        };
        let mut encoder = gpu.encoder("attend");
        gpu.record(
            &mut encoder,
            Kernel::Attend(self.kernel),
            bytemuck::bytes_of(&params),
            &[
                windows.q.into(),
                k,
                v,
                windows.a.into(),
                windows.ml.into(),
                gpu.whole("positions", &self.positions)?.into(),
                gpu.whole("work list", &self.work)?.into(),
            ],
            grid,
        )?;
        let submitted_s = now_s();
        let done = gpu.submit(Some(encoder.finish()));
        self.backend.pace.submitted(Flight { kernel: self.kernel, flops, submitted_s, done });
        Ok(())
    }

    /// All but which items.
    fn params(&self, region: &Region, windows: &Windows<'_>) -> Result<AttendParams> {
        let (args, shape) = (self.args, self.args.state.shape);
        let unit = self.kernel.storage.unit_elements() as usize;
        let q = units(&args.q.layout, unit, windows.q)?;
        let [k, v] = match &windows.kv {
            KeysValues::Buffers { k, v } => {
                [units(&args.k.layout, unit, *k)?, units(&args.v.layout, unit, *v)?]
            }
            KeysValues::Textures { .. } => [[0, narrow("the number of keys", region.keys.len())?, 0, 0]; 2],
        };
        let (q_scale, cap) = match args.softcap {
            Some(cap) => (args.scale / cap, cap * std::f32::consts::LOG2_E),
            None => (args.scale * std::f32::consts::LOG2_E, 0.0),
        };
        Ok(AttendParams {
            q_offset: q[0],
            q_batch: q[1],
            q_row: q[2],
            q_head: q[3],
            k_offset: k[0],
            k_batch: k[1],
            k_row: k[2],
            k_head: k[3],
            v_offset: v[0],
            v_batch: v[1],
            v_row: v[2],
            v_head: v[3],
            a_offset: windows.a.skipped_units()?.wrapping_neg(),
            ml_offset: windows.ml.skipped_units()?.wrapping_mul(2).wrapping_neg(),
            rows: narrow("the number of rows", shape.rows)?,
            heads: narrow("the number of heads", shape.heads)?,
            key_begin: region.keys.start,
            key_end: region.keys.end,
            tile_first: narrow("the number of Q tiles", region.tiles.start)?,
            tile_count: narrow("the number of Q tiles", region.tiles.len())?,
            batch_first: narrow("the batch", region.batch.start)?,
            last_class: narrow("the number of mask classes", self.list.last_class())?,
            starts_class: self.list.starts_class,
            runs_at: self.list.runs_at,
            keys_at: self.list.keys_at,
            spans_at: self.list.spans_at,
            q_scale,
            cap,
            ..AttendParams::default()
        })
    }
}

/// Offset and strides of a layout in 16-byte units, the offset relative to a window.
fn units(layout: &Layout, unit: usize, window: Window<'_>) -> Result<[u32; 4]> {
    let mut units = [0; 4];
    let elements = [layout.offset, layout.batch_stride, layout.row_stride, layout.head_stride];
    for (units, elements) in units.iter_mut().zip(elements) {
        if !elements.is_multiple_of(unit) {
            return Err(Error::request(
                format!("{layout:?} does not keep heads on 16-byte boundaries"),
                format!("use offsets and strides that are multiples of {unit} elements"),
            ));
        }
        *units = narrow("an offset or a stride", elements / unit)?;
    }
    units[0] = units[0].wrapping_sub(window.skipped_units()?);
    Ok(units)
}

/// The items of a region, a budget at a time.
struct Pieces {
    /// For each mask class, the keys of each Q tile in the order of items.
    keys: Vec<Vec<u32>>,
    batch_first: usize,
    heads: usize,
    flops_per_key: f64,
    next: u64,
    items: u64,
}

impl Pieces {
    fn new(call: &Call<'_>, region: &Region) -> Self {
        let tile_keys = |class| {
            let tiles = region.tiles.clone().rev();
            tiles.map(|tile| call.list.keys_of(class, tile, &region.keys)).collect()
        };
        let heads = call.args.state.shape.heads;
        Self {
            keys: (0..=call.list.last_class()).map(tile_keys).collect(),
            batch_first: region.batch.start,
            heads,
            flops_per_key: Pace::flops_per_key(&call.kernel),
            next: 0,
            items: (region.batch.len() * heads * region.tiles.len()) as u64,
        }
    }

    /// The next items, at least one, of about `budget` operations, and those operations. Items without work at either
    /// end are left out.
    fn next(&mut self, budget: f64) -> Option<(Range<u64>, f64)> {
        while self.next < self.items && self.flops(self.next) == 0.0 {
            self.next += 1;
        }
        let first = self.next;
        let (mut end, mut flops) = (first, 0.0);
        while self.next < self.items {
            let item = self.flops(self.next);
            if flops > 0.0 && flops + item > budget {
                break;
            }
            self.next += 1;
            flops += item;
            if item > 0.0 {
                end = self.next;
            }
        }
        (end > first).then_some((first..end, flops))
    }

    fn flops(&self, item: u64) -> f64 {
        let tiles = self.keys[0].len() as u64;
        let index = |n: u64| usize::try_from(n).expect("an index into a Vec, or a batch entry");
        let batch = self.batch_first + index(item / tiles) / self.heads;
        let class = batch.min(self.keys.len() - 1);
        f64::from(self.keys[class][index(item % tiles)]) * self.flops_per_key
    }
}
