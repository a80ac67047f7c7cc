//! Uniform structs of backward kernels.

use bytemuck::{Pod, Zeroable};

use crate::uniforms::{Field, Uniform, uniform};

uniform! {
    /// Parameters of [`Kernel::AttendBackward`](crate::Kernel::AttendBackward).
    ///
    /// Offsets and strides of q, d_o, k, v, the statistics and the sums count 16-byte units, those of the gradient of a bias elements.
    /// Offsets may be "negative" by wrapping, as in [`AttendParams`](crate::AttendParams). What a workgroup has a tile of is called
    /// fixed here, what it loops over is called moving.
    BackwardParams {
        /// Offset of (batch 0, row 0, head 0) of q.
        q_offset: u32,
        /// Distance of batch entries in q.
        q_batch: u32,
        /// Distance of rows in q.
        q_row: u32,
        /// Distance of heads in q.
        q_head: u32,
        /// Offset of (batch 0, row 0, head 0) of d_o.
        d_o_offset: u32,
        /// Distance of batch entries in d_o.
        d_o_batch: u32,
        /// Distance of rows in d_o.
        d_o_row: u32,
        /// Distance of heads in d_o.
        d_o_head: u32,
        /// Offset of (batch 0, row 0, head 0) of the statistics.
        stats_offset: u32,
        /// Distance of batch entries in the statistics.
        stats_batch: u32,
        /// Distance of rows in the statistics.
        stats_row: u32,
        /// Distance of heads in the statistics.
        stats_head: u32,
        /// Offset of (batch 0, row 0, head 0) of k.
        k_offset: u32,
        /// Distance of batch entries in k.
        k_batch: u32,
        /// Distance of rows in k.
        k_row: u32,
        /// Distance of heads in k.
        k_head: u32,
        /// Offset of (batch 0, row 0, head 0) of v.
        v_offset: u32,
        /// Distance of batch entries in v.
        v_batch: u32,
        /// Distance of rows in v.
        v_row: u32,
        /// Distance of heads in v.
        v_head: u32,
        /// Offset of (batch 0, row 0, head 0) of the sums.
        sum_offset: u32,
        /// Distance of batch entries in the sums.
        sum_batch: u32,
        /// Distance of rows in the sums; 0 in the gradient of a bias whose row all queries share.
        sum_row: u32,
        /// Distance of heads in the sums.
        sum_head: u32,
        /// Where (batch 0, row 0, head 0) of the bias tensor is: of a mask in words, of an additive bias in elements.
        bias_offset: u32,
        /// Distance of batch entries in the bias; 0 where they share one.
        bias_batch: u32,
        /// Distance of rows in the bias; 0 where they share one.
        bias_row: u32,
        /// Distance of heads in the bias; 0 where they share one.
        bias_head: u32,
        /// Query rows of a class in the lists.
        rows: u32,
        /// Heads of this dispatch: query heads, or KV heads where those are looped over.
        heads: u32,
        /// One past the last fixed row or key of this dispatch.
        fixed_end: u32,
        /// First moving row or key of this dispatch; a multiple of the list's tile.
        moving_begin: u32,
        /// One past the last moving row or key.
        moving_end: u32,
        /// First tile of this dispatch, in tiles of [`BackwardKernel::tile_rows`](crate::BackwardKernel::tile_rows).
        tile_first: u32,
        /// Tiles of this dispatch, for each batch entry and head.
        tile_count: u32,
        /// First batch entry of this dispatch.
        batch_first: u32,
        /// First item: item i is of the i / tile_count-th (batch entry, head). Under a causal mask the last tiles of rows and the
        /// first tiles of keys are the longest, and come first.
        first_item: u32,
        /// Items, one workgroup each.
        items: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
        /// Mask classes less one: batch entry b is of class min(b, last_class).
        last_class: u32,
        /// Index of the first start of the work list in the lists.
        starts_at: u32,
        /// Distance of classes in the starts.
        starts_class: u32,
        /// Index of the first run in the lists.
        runs_at: u32,
        /// Index in the lists of what is known of each head.
        heads_at: u32,
        /// Index of the first key position in the lists.
        keys_at: u32,
        /// Index of the first row span in the lists.
        spans_at: u32,
        /// Factor on q, at most 1 in size: scale; with softcap c, scale / c.
        q_scale: f32,
        /// What is left of the factor where it is larger: on the product, because its product with an element may be out of range.
        x_scale: f32,
        /// With softcap c: c.
        cap: f32,
        /// Factor on dQ and dK.
        scale: f32,
        /// Factor on dK, which has that on q: scale / q_scale.
        unscale: f32,
        /// Where moving tensors are textures, texel rows of a batch entry.
        moving_texels: u32,
        /// First head of this dispatch.
        head_first: u32,
        /// Not used; makes the size a multiple of 16.
        pad0: u32,
        /// Not used.
        pad1: u32,
        /// Not used.
        pad2: u32,
    }
}

uniform! {
    /// Parameters of [`Kernel::RowStats`](crate::Kernel::RowStats). Row-heads are (batch, row, head) triples in this order; all
    /// tensors are dense.
    RowStatsParams {
        /// First row-head of this dispatch.
        first: u32,
        /// One past its last row-head.
        end: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
        /// 16-byte units of o that lie before its binding.
        o_skipped: u32,
        /// 16-byte units of d_o that lie before its binding.
        d_o_skipped: u32,
        /// Row-heads of lse that lie before its binding.
        lse_skipped: u32,
        /// Row-heads of d_lse that lie before its binding.
        d_lse_skipped: u32,
        /// Row-heads of the statistics that lie before their binding.
        stats_skipped: u32,
    }
}
