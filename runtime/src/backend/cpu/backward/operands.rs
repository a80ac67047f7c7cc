//! The operands of a job, packed in the order in which a panel reads them.

use super::super::pack::{
    pack_key_tiles, pack_keys, pack_lanes, pack_value_tiles, pack_value_words, pack_values,
};
use super::super::scratch::floats_mut;
use super::blocks::Blocks;
use super::job::{Job, OfHead, Space};
use super::lanes::Stats;
use super::{BackwardCall, TILE};
use crate::backend::EMPTY_M;
use kyklos_plan::RowSpan;

/// Spans and statistics of the query rows. A row whose log-sum-exp is −∞ sees nothing.
pub(super) fn load_rows(call: &BackwardCall<'_>, job: &Job<'_>, q_head: usize, of_head: &mut OfHead) {
    let class = call.forward.work.class_of(job.batch);
    let first = job.q_tiles.start * TILE.q_rows as usize;
    of_head.spans.clear();
    of_head.stats.clear();
    for row in first..first + job.rows() {
        let mut of_row = [0.0; 4];
        let stats = call.stats.row([job.batch, row, q_head], &mut of_row);
        let empty = stats[0] == -EMPTY_M;
        of_head.spans.push(if empty { RowSpan::EMPTY } else { class.rows[row] });
        of_head.stats.push(if empty { Stats::EMPTY } else { Stats([stats[0], stats[1], stats[2]]) });
    }
}

/// q and dO of a head, in lanes and by row. The factor is on q in lanes, as in the forward pass: so
/// scores have the same rounding as those in the log-sum-exp. `space` holds `lanes` rows.
#[inline(always)]
pub(super) fn pack_queries(
    call: &BackwardCall<'_>,
    job: &Job<'_>,
    q_head: usize,
    lanes: usize,
    blocks: Blocks,
    space: &mut [f32],
    of_head: &mut OfHead,
) {
    let forward = &call.forward;
    let (rows, words, in_words) = (job.rows(), forward.words(), forward.bf16.is_some());
    let padded = forward.panel_words();
    let first = job.q_tiles.start * TILE.q_rows as usize;
    of_head.finite.clear();
    of_head.finite.resize(rows.div_ceil(lanes), [true; 2]);
    let tensors = [(&forward.q, (!in_words).then(|| forward.factors()[0])), (&call.d_o, None)];
    for (index, (tensor, factor)) in tensors.into_iter().enumerate() {
        let in_lanes = floats_mut(&mut of_head.lanes[index]).chunks_exact_mut(lanes * padded);
        let by_row = floats_mut(&mut of_head.rows[index]).chunks_exact_mut(blocks.elements());
        for (panel, (in_lanes, by_row)) in in_lanes.zip(by_row).enumerate().take(rows.div_ceil(lanes)) {
            let from = panel * lanes;
            let (at, count) = ([job.batch, first + from, q_head], lanes.min(rows - from));
            let (in_lanes, padding) = in_lanes.split_at_mut(lanes * words);
            pack_lanes(tensor, at, count, lanes, factor, space, in_lanes);
            padding.fill(0.0);
            of_head.finite[panel][index] = if in_words {
                blocks.pack_words(tensor, at, count, space, by_row)
            } else {
                blocks.pack(tensor, at, count, space, by_row)
            };
        }
    }
}

/// k and v of a KV tile, and zeros for its sums. Whether k is finite.
#[inline(always)]
pub(super) fn pack_tile<const MR: usize>(
    call: &BackwardCall<'_>,
    job: &Job<'_>,
    tile: usize,
    count: usize,
    space: &mut Space,
) -> bool {
    let (words, stride) = (call.forward.words(), TILE.kv_cols as usize);
    let at = [job.batch, tile * stride, job.kv_head];
    for sums in &mut space.d_keys {
        floats_mut(sums).fill(0.0);
    }
    let row = floats_mut(&mut space.row);
    let columns = floats_mut(&mut space.columns);
    if call.forward.tiles.is_some() {
        let padded = call.forward.panel_words();
        for (tensor, into) in [&call.forward.k, &call.forward.v].into_iter().zip(&mut space.keys) {
            let into = &mut floats_mut(into)[..stride * padded];
            pack_key_tiles(tensor, at, count, words, &mut row[..padded], into);
        }
        let dim = (call.forward.dim, call.forward.panel_dim(MR));
        return pack_value_tiles(&call.forward.k, at, count, dim, row, columns);
    }
    let row = &mut row[..MR * words];
    for (tensor, into) in [&call.forward.k, &call.forward.v].into_iter().zip(&mut space.keys) {
        pack_keys::<MR>(tensor, at, count, row, floats_mut(into));
    }
    if call.forward.bf16.is_some() {
        pack_value_words::<MR>(&call.forward.k, at, count, stride / 2, &mut row[..2 * words], columns)
    } else {
        pack_values::<MR>(&call.forward.k, at, count, stride, &mut row[..words], columns)
    }
}
