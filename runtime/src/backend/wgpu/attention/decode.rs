//! A call of `attend` with few query rows. The keys are split over workgroups, each of which takes
//! all rows that share a KV head; a second kernel merges their partial states into the running
//! state.
//!
//! The number of splits depends on shapes, the mask and the kind of device only: the same call
//! gives the same bytes.

use std::ops::Range;

use kyklos_shaders::{DecodeKernel, DecodeParams, Kernel, MergePartsParams};

use super::operands::{BiasRows, KeysValues, Operands, bias_kind, factors, units};
use super::work::WorkList;
use crate::backend::wgpu::backend::WgpuBackend;
use crate::backend::wgpu::numbers::{checked_dim, narrow, storage};
use crate::backend::wgpu::running::clock::now_s;
use crate::backend::wgpu::running::dispatch::Window;
use crate::backend::wgpu::running::items::Items;
use crate::backend::wgpu::running::pieces::Flight;
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::wgpu::storage::region::cut;
use crate::backend::wgpu::variant::MOST_SLOTS;
use crate::backend::{Attend, Control, yield_now};
use crate::error::Result;

/// Keys of a block below which splitting does not pay.
const FEWEST_KEYS: usize = 256;
/// Fewest keys of a split: fewer would not be worth the merge.
const SPLIT_KEYS: usize = 256;
/// Rows of queries for which a workgroup computes as long as it reads keys and values. The cost of
/// fewer is that of reading.
const FEWEST_SLOTS: u32 = 8;

/// Prepares the call for the decoding kernels; `None` where it has too many rows or too few keys
/// for them.
pub(in crate::backend::wgpu) fn decode<'a>(
    backend: &'a WgpuBackend,
    args: &'a Attend<'a, WgpuBuffer>,
) -> Result<Option<Decode<'a>>> {
    let shape = args.state.shape;
    let head_dim = checked_dim(shape.dim)?;
    let variant = backend.variants.decode();
    let most = (variant.most_slots(head_dim) as usize).min(MOST_SLOTS);
    let shared = shared_heads(args.kv_head_of);
    if args.fixed_order
        || !args.inference
        || args.work.q_tiles() != 1
        || args.work.kv_positions.len() < FEWEST_KEYS
        || shape.rows > most
        || shape.rows > 1 && shape.rows * shared > MOST_SLOTS
    {
        return Ok(None);
    }
    let group_heads = (1..=shared)
        .rev()
        .find(|heads| shared.is_multiple_of(*heads) && shape.rows * heads <= most)
        .expect("one head divides all, and its rows are within the most");
    let operands = Operands::new(args);
    let limit = backend.gpu.window_bytes();
    if operands.q_rows_within(limit) < shape.rows {
        return Ok(None);
    }
    let list = WorkList::new(args.work, args.kv_head_of)?;
    let gpu = &backend.gpu;
    let upload = |label, words: &[u32]| gpu.buffer_with(label, bytemuck::cast_slice(words));
    Ok(Some(Decode {
        kernel: DecodeKernel {
            variant,
            storage: storage(args.dtype),
            head_dim,
            slots: narrow("the number of rows", shape.rows * group_heads)?,
            softcap: args.softcap.is_some(),
            bias: bias_kind(args),
        },
        group_heads,
        groups: shape.heads / group_heads,
        operands,
        positions: upload("decode positions", &list.positions)?,
        work: upload("decode work list", &list.work)?,
        list,
        backend,
        args,
    }))
}

/// The largest number that divides every run of query heads with the same KV head.
fn shared_heads(kv_head_of: &[u32]) -> usize {
    let runs = kv_head_of.chunk_by(|a, b| a == b).map(<[u32]>::len);
    runs.fold(0, |mut a, mut b| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    })
}

/// Data that all pieces of the call share.
pub(in crate::backend::wgpu) struct Decode<'a> {
    backend: &'a WgpuBackend,
    args: &'a Attend<'a, WgpuBuffer>,
    kernel: DecodeKernel,
    /// Query heads of a workgroup, and how many such groups a batch entry has.
    group_heads: usize,
    groups: usize,
    operands: Operands,
    list: WorkList,
    positions: WgpuBuffer,
    work: WgpuBuffer,
}

/// Batch entries and keys whose tensors can be bound together, and how the keys are split.
#[derive(Clone, Debug)]
struct Region {
    batch: Range<usize>,
    keys: Range<usize>,
    splits: Splits,
}

/// `keys` in equal splits; the last may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Splits {
    count: usize,
    keys: usize,
}

/// Keys of each split, where `tiles` workgroups read `keys` keys and the device needs `target`
/// workgroups to be busy. At most `most` splits, each a multiple of `unit` keys, and of no more
/// than `longest` keys if so many splits are not too many.
fn splits(keys: usize, tiles: usize, target: usize, most: usize, longest: usize, unit: usize) -> Splits {
    let wanted = target.div_ceil(tiles).min(keys.div_ceil(SPLIT_KEYS));
    let count = wanted.max(keys.div_ceil(longest)).min(most).max(1);
    let split = keys.div_ceil(count).next_multiple_of(unit);
    Splits { count: keys.div_ceil(split), keys: split }
}

/// The tensors of a region, and room for its parts.
struct Bindings<'a> {
    q: Window<'a>,
    kv: KeysValues<'a>,
    a: Window<'a>,
    ml: Window<'a>,
    part_a: WgpuBuffer,
    part_ml: WgpuBuffer,
    bias: Option<BiasRows<'a>>,
}

impl Decode<'_> {
    pub(in crate::backend::wgpu) async fn run(&self, control: &Control) -> Result<()> {
        let kernel = Kernel::Decode(self.kernel);
        let regions = self.regions();
        #[expect(clippy::cast_precision_loss, reason = "what a region costs, about")]
        let cost = |region: &Region| (region.batch.len() * region.keys.len()) as f64;
        let all: f64 = regions.iter().map(cost).sum();
        for region in regions {
            let share = cost(&region) / all;
            let bindings = self.bind(&region)?;
            let keys = narrow("the number of keys", region.splits.keys)?;
            let met = vec![vec![keys; region.splits.count]];
            let mut pieces = Items::new(met, &region.batch, self.groups, self.flops_per_key());
            let items = (region.batch.len() * self.groups * region.splits.count) as u64;
            let all_flops = pieces.all_flops();
            while let Some((piece, flops)) = pieces.next(self.backend.pace.size(&kernel)) {
                self.backend.pace.room().await;
                self.backend.gpu.check()?;
                let last = piece.end == items;
                self.submit(&region, &bindings, piece, last, flops)?;
                control.share_done(share * flops / all_flops)?;
                yield_now().await;
            }
        }
        Ok(())
    }

    /// Operations of a workgroup for one key, counted so that they take the time that it takes.
    fn flops_per_key(&self) -> f64 {
        4.0 * f64::from(self.kernel.slots.max(FEWEST_SLOTS) * self.kernel.head_dim)
    }

    fn regions(&self) -> Vec<Region> {
        let limit = self.backend.gpu.window_bytes();
        let shape = self.args.state.shape;
        let grain = &self.backend.pace.grain;
        let unit = self.kernel.variant.keys_at_once() as usize;
        let longest = grain.keys_at_once(self.flops_per_key(), u64::MAX, unit).max(SPLIT_KEYS);
        let mut batch_step = if self.operands.fit(limit) { shape.batch } else { 1 };
        let all_keys = self.args.work.kv_positions.len();
        let mut key_step = self.operands.k.rows_within(limit).min(self.operands.v.rows_within(limit));
        if Kernel::Decode(self.kernel).reads_textures() {
            // One row of a texture for each key of each batch entry.
            let most = self.backend.gpu.limits.max_texture_dimension_2d as usize;
            batch_step = batch_step.min((most / all_keys).max(1));
            key_step = key_step.min(most);
        }
        let mut regions = Vec::new();
        for batch in cut(0..shape.batch, batch_step) {
            let tiles = batch.len() * self.groups;
            // A part of one split is as large as the state, which fits a binding.
            let part_bytes = tiles * (self.kernel.slots * self.kernel.head_dim) as usize * 4;
            let most = (usize::try_from(limit).unwrap_or(usize::MAX) / part_bytes).max(1);
            // Keys that no row sees are neither bound nor split.
            let visible = self.list.key_range(&batch, 0);
            for keys in cut(visible, key_step.min(most.saturating_mul(longest))) {
                let splits = splits(keys.len(), tiles, grain.decode_groups(), most, longest, unit);
                regions.push(Region { batch: batch.clone(), keys, splits });
            }
        }
        regions
    }

    fn bind(&self, region: &Region) -> Result<Bindings<'_>> {
        let (gpu, args, operands) = (&self.backend.gpu, self.args, &self.operands);
        let shape = args.state.shape;
        let (batch, rows) = (&region.batch, 0..shape.rows);
        let as_textures = Kernel::Decode(self.kernel).reads_textures();
        let slots = batch.len() * self.groups * region.splits.count * self.kernel.slots as usize;
        Ok(Bindings {
            q: gpu.window("q", args.q.buffer, operands.q.bytes(batch, &rows))?,
            kv: KeysValues::new(gpu, args, operands, batch, &region.keys, as_textures)?,
            a: gpu.window("state a", args.state.a, operands.a.bytes(batch, &rows))?,
            ml: gpu.window("state ml", args.state.ml, operands.ml.bytes(batch, &(0..shape.heads)))?,
            part_a: gpu.buffer("decode parts", slots * shape.dim * 4)?,
            part_ml: gpu.buffer("decode parts", slots * 8)?,
            bias: BiasRows::new(gpu, (args.bias.as_ref(), args.dtype), operands.bias, batch, &rows)?,
        })
    }

    /// Submits the items of a piece, and after the last piece of a region the merge of its parts.
    fn submit(
        &self,
        region: &Region,
        bindings: &Bindings<'_>,
        items: Range<u64>,
        last: bool,
        flops: f64,
    ) -> Result<()> {
        let gpu = &self.backend.gpu;
        let kernel = Kernel::Decode(self.kernel);
        let grid = gpu.grid(items.end - items.start)?;
        let mut params = self.params(region, bindings)?;
        let splits = |n: u64| narrow("the number of splits", usize::try_from(n).unwrap_or(usize::MAX));
        params.first_item = splits(items.start)?;
        params.items = splits(items.end - items.start)?;
        params.grid_width = grid.width;
        let [k, v] = bindings.kv.bound();
        let part_a = gpu.whole("decode parts", &bindings.part_a)?;
        let part_ml = gpu.whole("decode parts", &bindings.part_ml)?;
        let mut encoder = gpu.encoder("decode");
        let mut bound = vec![
            bindings.q.into(),
            k,
            v,
            part_a.into(),
            part_ml.into(),
            gpu.whole("positions", &self.positions)?.into(),
            gpu.whole("work list", &self.work)?.into(),
        ];
        bound.extend(bindings.bias.map(|bias| bias.bound()));
        gpu.record(&mut encoder, kernel, bytemuck::bytes_of(&params), &bound, grid)?;
        if last {
            let shape = self.args.state.shape;
            let merge = Kernel::MergeParts { head_dim: self.kernel.head_dim };
            let entry = shape.rows * shape.heads;
            let row_heads = region.batch.len() * entry;
            let grid = gpu.grid((row_heads as u64).div_ceil(u64::from(merge.rows_per_workgroup())))?;
            let params = MergePartsParams {
                first: narrow("rows times heads", region.batch.start * entry)?,
                end: narrow("rows times heads", region.batch.end * entry)?,
                rows: params.rows,
                heads: narrow("the number of heads", shape.heads)?,
                grid_width: grid.width,
                a_skipped: bindings.a.skipped_units()?,
                ml_skipped: bindings.ml.skipped_units()?.wrapping_mul(2),
                batch_first: params.batch_first,
                group_heads: params.group_heads,
                splits: params.splits,
                slots: self.kernel.slots,
                ..MergePartsParams::default()
            };
            let bound = [bindings.a, bindings.ml, part_a, part_ml].map(Into::into);
            gpu.record(&mut encoder, merge, bytemuck::bytes_of(&params), &bound, grid)?;
        }
        let submitted_s = now_s();
        let done = gpu.submit(Some(encoder.finish()));
        self.backend.pace.submitted(Flight { kernel, flops, submitted_s, done });
        Ok(())
    }

    /// Parameters of the kernel, except for the range of items.
    fn params(&self, region: &Region, bindings: &Bindings<'_>) -> Result<DecodeParams> {
        let args = self.args;
        let unit = self.kernel.storage.unit_elements() as usize;
        let q = units(&args.q.layout, unit, bindings.q)?;
        let [k, v] = bindings.kv.units(args, unit)?;
        let (q_scale, x_scale, cap) = factors(args.scale, args.softcap);
        let bias = bindings.bias.map_or(Ok([0; 4]), |bias| bias.units())?;
        Ok(DecodeParams {
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
            rows: narrow("the number of rows", args.state.shape.rows)?,
            group_heads: narrow("the number of heads", self.group_heads)?,
            groups: narrow("the number of heads", self.groups)?,
            key_begin: narrow("the number of keys", region.keys.start)?,
            key_end: narrow("the number of keys", region.keys.end)?,
            splits: narrow("the number of splits", region.splits.count)?,
            split_keys: narrow("the number of keys", region.splits.keys)?,
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
            ..DecodeParams::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_packed_as_far_as_all_runs_of_them_allow() {
        assert_eq!(shared_heads(&[0, 0, 0, 0, 1, 1, 1, 1]), 4);
        assert_eq!(shared_heads(&[0, 0, 0, 0, 1, 1]), 2);
        assert_eq!(shared_heads(&[0, 1, 0, 1]), 1);
        assert_eq!(shared_heads(&[3]), 1);
    }

    #[test]
    fn splits_keep_the_device_busy_and_cover_the_keys() {
        assert_eq!(splits(4096, 2, 32, 1000, 9000, 64), Splits { count: 16, keys: 256 });
        assert_eq!(splits(300, 1, 32, 1000, 9000, 64), Splits { count: 2, keys: 192 });
        assert_eq!(splits(5000, 64, 32, 1000, 9000, 64), Splits { count: 1, keys: 5056 });
        assert_eq!(splits(100_000, 64, 32, 1000, 32768, 64), Splits { count: 4, keys: 25024 });
        assert_eq!(splits(4096, 1, 32, 3, 9000, 64), Splits { count: 3, keys: 1408 });
        assert_eq!(splits(1, 1, 32, 3, 9000, 64), Splits { count: 1, keys: 64 });
    }
}
