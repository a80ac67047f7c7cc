//! One call of `attend`. It is cut into regions that fit the device's bindings, and each region
//! into pieces of bounded time.

use std::ops::Range;

use futures_util::future::LocalBoxFuture;
use kyklos_shaders::{AttendKernel, AttendParams, Kernel};

use super::decode;
use super::operands::{BiasRows, KeysValues, Operands, bias_kind, factors, units};
use super::work::WorkList;
use crate::backend::wgpu::backend::WgpuBackend;
use crate::backend::wgpu::numbers::{checked_dim, narrow};
use crate::backend::wgpu::running::clock::now_s;
use crate::backend::wgpu::running::dispatch::Window;
use crate::backend::wgpu::running::items::Items;
use crate::backend::wgpu::running::pacing::whole_tiles;
use crate::backend::wgpu::running::pieces::{Flight, Pace};
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::wgpu::storage::region::cut;
use crate::backend::{Attend, Control, yield_now};
use crate::error::{Error, Result};

/// In a box: the code of a future is compiled in each crate that awaits it as its own type, with
/// all that it calls in closures.
#[inline(never)]
pub(in crate::backend::wgpu) fn attend<'a>(
    backend: &'a WgpuBackend,
    args: Attend<'a, WgpuBuffer>,
    control: &'a Control,
) -> LocalBoxFuture<'a, Result<()>> {
    Box::pin(attend_in_pieces(backend, args, control))
}

async fn attend_in_pieces(
    backend: &WgpuBackend,
    args: Attend<'_, WgpuBuffer>,
    control: &Control,
) -> Result<()> {
    let shape = args.state.shape;
    if shape.batch == 0 || shape.rows == 0 || shape.heads == 0 || args.work.is_empty() {
        return Ok(());
    }
    if let Some(decode) = decode::decode(backend, &args)? {
        return decode.run(control).await;
    }
    let call = Call::new(backend, &args)?;
    let all_flops = call.items(&call.whole()).all_flops();
    for region in call.regions() {
        let mut pieces = call.items(&region);
        let windows = call.windows(&region)?;
        while let Some((items, flops)) = pieces.next(backend.pace.size(&Kernel::Attend(call.kernel))) {
            backend.pace.room().await;
            backend.gpu.check()?;
            call.submit(&region, &windows, items, flops)?;
            control.share_done(flops / all_flops)?;
            yield_now().await;
        }
    }
    Ok(())
}

/// Keys of one running sum, at most. The digits that a long sum of values of one sign loses grow
/// with its length: at 32,768 keys the error is 1e-5 of the values.
const STRETCH_KEYS: usize = 2048;

/// Data that all pieces of a call share.
struct Call<'a> {
    backend: &'a WgpuBackend,
    args: &'a Attend<'a, WgpuBuffer>,
    kernel: AttendKernel,
    list: WorkList,
    positions: WgpuBuffer,
    work: WgpuBuffer,
    operands: Operands,
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
    bias: Option<BiasRows<'a>>,
}

impl<'a> Call<'a> {
    fn new(backend: &'a WgpuBackend, args: &'a Attend<'a, WgpuBuffer>) -> Result<Self> {
        let shape = args.state.shape;
        let softcap = args.softcap.is_some();
        let head_dim = checked_dim(shape.dim)?;
        let of_shape = (!args.fixed_order).then_some(shape);
        let kernel = backend.attend_kernel(args.dtype, head_dim, of_shape, softcap, bias_kind(args));
        let tile = kernel.tile();
        if (args.work.tile.q_rows, args.work.tile.kv_cols) != (tile.q_rows, tile.kv_cols) {
            return Err(Error::request(
                format!("the work list is in tiles of {:?}, the kernel's are {tile:?}", args.work.tile),
                "lower the mask with this backend's tile_shape for the shape of the state",
            ));
        }
        let list = WorkList::new(args.work, args.kv_head_of)?;
        let gpu = &backend.gpu;
        let upload = |label, words: &[u32]| gpu.buffer_with(label, bytemuck::cast_slice(words));
        Ok(Self {
            operands: Operands::new(args),
            positions: upload("attend positions", &list.positions)?,
            work: upload("attend work list", &list.work)?,
            backend,
            args,
            kernel,
            list,
        })
    }

    fn whole(&self) -> Region {
        let keys = 0..u32::try_from(self.args.work.kv_positions.len()).unwrap_or(u32::MAX);
        Region { batch: 0..self.args.state.shape.batch, tiles: 0..self.args.work.q_tiles(), keys }
    }

    /// Cuts a call that does not fit the device's bindings: by batch entries, then rows, then keys.
    /// Keys are also cut so that as many Q tiles as fill the device take a short time, see
    /// [`Grain`](crate::backend::wgpu::running::pacing::Grain), and into stretches of
    /// [`STRETCH_KEYS`].
    ///
    /// The cuts depend only on shapes and on the kind of device, not on measured times: a kernel
    /// sums its keys from zero and merges the sums into the state, so a cut rounds, and the
    /// same call must give the same bytes.
    fn regions(&self) -> Vec<Region> {
        let limit = self.backend.gpu.window_bytes();
        let shape = self.args.state.shape;
        let tile = self.kernel.tile();
        let (q_rows, kv_cols) = (tile.q_rows as usize, tile.kv_cols as usize);
        let operands = &self.operands;
        let mut batch_step = if operands.fit(limit) { shape.batch } else { 1 };
        let rows = operands.q_rows_within(limit);
        let tile_step = (rows / q_rows).max(1);
        let mut keys = operands.k.rows_within(limit).min(operands.v.rows_within(limit));
        if Kernel::Attend(self.kernel).reads_textures() {
            // One row of a texture for each key of each batch entry.
            let most = self.backend.gpu.limits.max_texture_dimension_2d as usize;
            batch_step = batch_step.min((most / self.args.work.kv_positions.len()).max(1));
            keys = keys.min(most);
        }
        let tiles = self.args.work.q_tiles();
        // How many rows are computed with them must not cut the keys: the rows of a call have the same bits
        // wherever it is cut. A fixed order has its own, few keys.
        let at_once = match self.args.fixed_order {
            true => STRETCH_KEYS,
            false => {
                self.backend.pace.grain.keys_at_once(Pace::flops_per_key(&self.kernel), u64::MAX, kv_cols)
            }
        };
        let most = whole_tiles(keys.min(STRETCH_KEYS).min(at_once), kv_cols);
        let keys = self.args.work.kv_positions.len();
        // Stretches of the same length: a short one costs as much state as a long one.
        let key_step = keys.div_ceil(keys.div_ceil(most).max(1)).next_multiple_of(kv_cols);
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

    fn items(&self, region: &Region) -> Items {
        let tile_keys = |class| {
            let tiles = region.tiles.clone().rev();
            tiles.map(|tile| self.list.keys_of(class, tile, &region.keys)).collect()
        };
        Items::new(
            (0..=self.list.last_class()).map(tile_keys).collect(),
            &region.batch,
            self.args.state.shape.heads,
            Pace::flops_per_key(&self.kernel),
        )
    }

    fn windows(&self, region: &Region) -> Result<Windows<'_>> {
        let gpu = &self.backend.gpu;
        let (args, shape) = (self.args, self.args.state.shape);
        let q_rows = self.kernel.tile().q_rows as usize;
        let rows = region.tiles.start * q_rows..shape.rows.min(region.tiles.end * q_rows);
        let keys = region.keys.start as usize..region.keys.end as usize;
        let batch = &region.batch;
        Ok(Windows {
            q: gpu.window("q", args.q.buffer, self.operands.q.bytes(batch, &rows))?,
            kv: KeysValues::new(
                gpu,
                args,
                &self.operands,
                batch,
                &keys,
                Kernel::Attend(self.kernel).reads_textures(),
            )?,
            a: gpu.window("state a", args.state.a, self.operands.a.bytes(batch, &rows))?,
            ml: gpu.window("state ml", args.state.ml, self.operands.ml.bytes(batch, &(0..shape.heads)))?,
            bias: BiasRows::new(gpu, (args.bias.as_ref(), args.dtype), self.operands.bias, batch, &rows)?,
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
        let [k, v] = windows.kv.bound();
        let mut encoder = gpu.encoder("attend");
        let mut bound = vec![
            windows.q.into(),
            k,
            v,
            windows.a.into(),
            windows.ml.into(),
            gpu.whole("positions", &self.positions)?.into(),
            gpu.whole("work list", &self.work)?.into(),
        ];
        bound.extend(windows.bias.map(|bias| bias.bound()));
        gpu.record(&mut encoder, Kernel::Attend(self.kernel), bytemuck::bytes_of(&params), &bound, grid)?;
        let submitted_s = now_s();
        let done = gpu.submit(Some(encoder.finish()));
        self.backend.pace.submitted(Flight { kernel: Kernel::Attend(self.kernel), flops, submitted_s, done });
        Ok(())
    }

    /// Parameters of the kernel, except for the range of items.
    fn params(&self, region: &Region, windows: &Windows<'_>) -> Result<AttendParams> {
        let (args, shape) = (self.args, self.args.state.shape);
        let unit = self.kernel.storage.unit_elements() as usize;
        let q = units(&args.q.layout, unit, windows.q)?;
        let [k, v] = windows.kv.units(args, unit)?;
        let (q_scale, x_scale, cap) = factors(args.scale, args.softcap);
        let bias = windows.bias.map_or(Ok([0; 4]), |bias| bias.units())?;
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
            x_scale,
            cap,
            bias_offset: bias[0],
            bias_batch: bias[1],
            bias_row: bias[2],
            bias_head: bias[3],
            ..AttendParams::default()
        })
    }
}
