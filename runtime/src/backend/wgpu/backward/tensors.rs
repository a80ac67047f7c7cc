//! The tensors of a backward call: which fit one binding, and where kernels find them.

use std::ops::Range;

use super::super::buffer::WgpuBuffer;
use super::super::device::Gpu;
use super::super::dispatch::{Bound, Window};
use super::super::numbers::narrow;
use super::super::operands::{PairRows, pairs_tensor, units};
use super::super::region::Strided;
use crate::backend::{AttendBackward, Layout, Operand};
use crate::{Error, Result};
use kyklos_shaders::{BackwardParams, Sums};

/// Byte layouts of a call's tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensors {
    q: Strided,
    d_o: Strided,
    stats: Strided,
    k: Strided,
    v: Strided,
    dq: Strided,
    d_kv: Strided,
    pairs: Option<Strided>,
    dense: Layout,
}

/// Batch entries, query rows and keys whose tensors can be bound together.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) batch: Range<usize>,
    pub(super) rows: Range<usize>,
    pub(super) keys: Range<usize>,
}

/// The tensors of a region, as a kernel reads and writes them.
pub(super) struct Windows<'a> {
    q: Window<'a>,
    d_o: Window<'a>,
    stats: Window<'a>,
    k: Window<'a>,
    v: Window<'a>,
    /// dq, or dk and dv.
    sums: Vec<Window<'a>>,
    pairs: Option<PairRows<'a>>,
}

impl Tensors {
    pub(super) fn new(args: &AttendBackward<'_, WgpuBuffer>, kv_heads: usize) -> Self {
        let shape = args.shape;
        let keys = args.work.kv_positions.len();
        let strided = |operand: &Operand<'_, WgpuBuffer>, rows, heads| {
            Strided::new(operand.layout, args.dtype.bytes(), [shape.batch, rows, heads, shape.dim])
        };
        let row_stride = shape.heads * shape.dim;
        Self {
            q: strided(&args.q, shape.rows, shape.heads),
            d_o: strided(&args.d_o, shape.rows, shape.heads),
            stats: Strided::new(args.stats.layout, 4, [shape.batch, shape.rows, shape.heads, 2]),
            k: strided(&args.k, keys, kv_heads),
            v: strided(&args.v, keys, kv_heads),
            dq: Strided::dense_f32([shape.batch, shape.rows, shape.heads, shape.dim]),
            d_kv: Strided::new(args.kv_layout, 4, [shape.batch, keys, kv_heads, shape.dim]),
            pairs: args
                .pairs
                .as_ref()
                .map(|pairs| pairs_tensor(pairs, args.dtype, shape, &args.work.kv_positions)),
            dense: Layout {
                offset: 0,
                batch_stride: shape.rows * row_stride,
                row_stride,
                head_stride: shape.dim,
            },
        }
    }

    /// Whether each tensor fits one window of `limit` bytes.
    pub(super) fn fit(&self, limit: u64) -> bool {
        self.of_rows().chain(self.of_keys()).all(|tensor| tensor.fits(limit))
    }

    /// Rows of one batch entry whose tensors windows of `limit` bytes hold.
    pub(super) fn rows_within(&self, limit: u64) -> usize {
        self.of_rows().map(|tensor| tensor.rows_within(limit)).min().unwrap_or(1)
    }

    /// The same for keys.
    pub(super) fn keys_within(&self, limit: u64) -> usize {
        self.of_keys().map(|tensor| tensor.rows_within(limit)).min().unwrap_or(1)
    }

    fn of_rows(&self) -> impl Iterator<Item = &Strided> {
        [&self.q, &self.d_o, &self.stats, &self.dq].into_iter().chain(&self.pairs)
    }

    fn of_keys(&self) -> impl Iterator<Item = &Strided> {
        [&self.k, &self.v, &self.d_kv].into_iter()
    }

    pub(super) fn windows<'a>(
        &self,
        gpu: &Gpu,
        args: &'a AttendBackward<'_, WgpuBuffer>,
        sums: Sums,
        Region { batch, rows, keys }: &Region,
    ) -> Result<Windows<'a>> {
        let of_rows = |what, operand: &Operand<'a, WgpuBuffer>, tensor: &Strided| {
            gpu.window(what, operand.buffer, tensor.bytes(batch, rows))
        };
        let of_keys = |what, buffer: &'a WgpuBuffer, tensor: &Strided| {
            gpu.window(what, buffer, tensor.bytes(batch, keys))
        };
        let dk = || of_keys("dk", args.dk, &self.d_kv);
        let dv = || of_keys("dv", args.dv, &self.d_kv);
        Ok(Windows {
            q: of_rows("q", &args.q, &self.q)?,
            d_o: of_rows("d_o", &args.d_o, &self.d_o)?,
            stats: of_rows("row statistics", &args.stats, &self.stats)?,
            k: of_keys("k", args.k.buffer, &self.k)?,
            v: of_keys("v", args.v.buffer, &self.v)?,
            sums: match sums {
                Sums::Queries => vec![gpu.window("dq", args.dq, self.dq.bytes(batch, rows))?],
                Sums::KeysValues => vec![dk()?, dv()?],
                Sums::Keys => vec![dk()?],
                Sums::Values => vec![dv()?],
            },
            pairs: PairRows::new(gpu, (args.pairs.as_ref(), args.dtype), self.pairs, batch, rows)?,
        })
    }
}

impl<'a> Windows<'a> {
    /// What the kernel of `sums` binds, with the lists.
    pub(super) fn bound(&self, sums: Sums, lists: Window<'a>) -> Vec<Bound<'a>> {
        let mut bound: Vec<Bound<'a>> = vec![self.q.into(), self.d_o.into(), self.k.into()];
        if sums != Sums::Values {
            bound.push(self.v.into());
        }
        bound.push(self.stats.into());
        bound.extend(self.sums.iter().map(|sum| Bound::from(*sum)));
        bound.push(lists.into());
        bound.extend(self.pairs.map(|pairs| pairs.bound()));
        bound
    }

    /// The offsets and strides among the parameters.
    pub(super) fn params(
        &self,
        args: &AttendBackward<'_, WgpuBuffer>,
        tensors: &Tensors,
        sums: Sums,
        unit: usize,
    ) -> Result<BackwardParams> {
        let q = units(&args.q.layout, unit, self.q)?;
        let d_o = units(&args.d_o.layout, unit, self.d_o)?;
        let k = units(&args.k.layout, unit, self.k)?;
        let v = units(&args.v.layout, unit, self.v)?;
        let stats = pairs_of_words(&args.stats.layout, self.stats)?;
        let layout = if sums.rows_are_fixed() { &tensors.dense } else { &args.kv_layout };
        // Both sums have one layout and cover the same bytes of their buffers.
        let sum = units(layout, 4, self.sums[0])?;
        let pairs = self.pairs.map_or(Ok([0; 4]), |pairs| pairs.units())?;
        Ok(BackwardParams {
            q_offset: q[0],
            q_batch: q[1],
            q_row: q[2],
            q_head: q[3],
            d_o_offset: d_o[0],
            d_o_batch: d_o[1],
            d_o_row: d_o[2],
            d_o_head: d_o[3],
            stats_offset: stats[0],
            stats_batch: stats[1],
            stats_row: stats[2],
            stats_head: stats[3],
            k_offset: k[0],
            k_batch: k[1],
            k_row: k[2],
            k_head: k[3],
            v_offset: v[0],
            v_batch: v[1],
            v_row: v[2],
            v_head: v[3],
            sum_offset: sum[0],
            sum_batch: sum[1],
            sum_row: sum[2],
            sum_head: sum[3],
            pairs_offset: pairs[0],
            pairs_batch: pairs[1],
            pairs_row: pairs[2],
            pairs_head: pairs[3],
            ..BackwardParams::default()
        })
    }
}

/// Offset and strides of the statistics in their 8-byte units, the offset relative to a window.
fn pairs_of_words(layout: &Layout, window: Window<'_>) -> Result<[u32; 4]> {
    let mut units = [0; 4];
    let elements = [layout.offset, layout.batch_stride, layout.row_stride, layout.head_stride];
    for (units, elements) in units.iter_mut().zip(elements) {
        if !elements.is_multiple_of(2) {
            return Err(Error::request(
                format!("row statistics at {layout:?}"),
                "use offsets and strides that are multiples of 2 elements",
            ));
        }
        *units = narrow("an offset or a stride", elements / 2)?;
    }
    units[0] = units[0].wrapping_sub(window.skipped_units()?.wrapping_mul(2));
    Ok(units)
}
