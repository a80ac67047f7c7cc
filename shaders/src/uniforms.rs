//! Uniform structs: one list of fields makes the Rust struct, its WGSL declaration and the table
//! that a test compares with naga's.

use bytemuck::{Pod, Zeroable};

/// A field of a uniform struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name in Rust and in WGSL.
    pub name: &'static str,
    /// Its type in Rust and in WGSL: `u32` or `f32`.
    pub ty: &'static str,
    /// Byte offset in the Rust struct.
    pub offset: usize,
}

/// A uniform struct as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uniform {
    /// Name of the type in Rust and in WGSL.
    pub name: &'static str,
    /// Its fields in order.
    pub fields: &'static [Field],
    /// Bytes of the Rust struct.
    pub bytes: usize,
}

macro_rules! uniform {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $ty:ident,)* }) => {
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
        pub struct $name {
            $($(#[$doc])* pub $field: $ty,)*
        }

        impl $name {
            /// This struct as data.
            pub const UNIFORM: Uniform = Uniform {
                name: stringify!($name),
                fields: &[$(Field {
                    name: stringify!($field),
                    ty: stringify!($ty),
                    offset: std::mem::offset_of!($name, $field),
                },)*],
                bytes: size_of::<Self>(),
            };
        }
    };
}

pub(crate) use uniform;

uniform! {
    /// Parameters of [`Kernel::Attend`](crate::Kernel::Attend).
    ///
    /// Offsets and strides of q, k, v and a count 16-byte units, those of ml 8-byte units. (Where k and v are textures,
    /// `k_batch` and `v_batch` count texel rows, and the other offsets and strides of both are not used.) An offset may be
    /// "negative" by wrapping: sums wrap too, so a binding may start behind the first element of its tensor as long
    /// as the rows in use lie inside.
    AttendParams {
        /// Offset of (batch 0, row 0, head 0) of q.
        q_offset: u32,
        /// Distance of batch entries in q.
        q_batch: u32,
        /// Distance of rows in q.
        q_row: u32,
        /// Distance of heads in q.
        q_head: u32,
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
        /// Offset of (batch 0, row 0, head 0) of the state's a, which is dense.
        a_offset: u32,
        /// Offset of (batch 0, head 0, row 0) of the state's ml, which is dense.
        ml_offset: u32,
        /// Query rows.
        rows: u32,
        /// Query heads.
        heads: u32,
        /// First key to use; a multiple of the KV tile.
        key_begin: u32,
        /// One past the last key to use.
        key_end: u32,
        /// First Q tile of this dispatch.
        tile_first: u32,
        /// Q tiles of this dispatch, for each batch entry and head.
        tile_count: u32,
        /// First batch entry of this dispatch.
        batch_first: u32,
        /// First item: item i is Q tile `tile_first + tile_count - 1 - i % tile_count` of the i / tile_count-th
        /// (batch entry, head). The last tiles come first: under a causal mask they are the longest.
        first_item: u32,
        /// Items, one workgroup each.
        items: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
        /// Mask classes less one: batch entry b is of class min(b, last_class).
        last_class: u32,
        /// Distance of classes in the starts of the work list.
        starts_class: u32,
        /// Index of the first run in the work list.
        runs_at: u32,
        /// Index of the first key position in the positions.
        keys_at: u32,
        /// Index of the first row span in the positions.
        spans_at: u32,
        /// Factor on q, at most 1 in size: scale; with softcap c, scale / c.
        q_scale: f32,
        /// What is left of the factor where it is larger: on the product, because its product with an element may be out of range.
        x_scale: f32,
        /// With softcap c: c.
        cap: f32,
        /// Where (batch 0, row 0, head 0) of the bias tensor is: of a mask in words, of an additive bias in elements.
        bias_offset: u32,
        /// Distance of batch entries in the bias; 0 where they share one.
        bias_batch: u32,
        /// Distance of rows in the bias.
        bias_row: u32,
        /// Distance of heads in the bias; 0 where they share one.
        bias_head: u32,
    }
}

uniform! {
    /// Parameters of [`Kernel::Decode`](crate::Kernel::Decode); units are those of [`AttendParams`].
    DecodeParams {
        /// Offset of (batch 0, row 0, head 0) of q.
        q_offset: u32,
        /// Distance of batch entries in q.
        q_batch: u32,
        /// Distance of rows in q.
        q_row: u32,
        /// Distance of heads in q.
        q_head: u32,
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
        /// Query rows.
        rows: u32,
        /// Query heads of a workgroup; they lie next to each other and have the same KV head.
        group_heads: u32,
        /// Workgroups that it takes for the heads of a batch entry.
        groups: u32,
        /// First key of the first split.
        key_begin: u32,
        /// One past the last key to use.
        key_end: u32,
        /// Splits of the keys.
        splits: u32,
        /// Keys of a split; the last may have fewer.
        split_keys: u32,
        /// First batch entry of item 0.
        batch_first: u32,
        /// First item of this dispatch: item i is split `i % splits` of the i / splits-th (batch entry, group).
        first_item: u32,
        /// Items, one workgroup each.
        items: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
        /// Mask classes less one: batch entry b is of class min(b, last_class).
        last_class: u32,
        /// Distance of classes in the starts of the work list.
        starts_class: u32,
        /// Index of the first run in the work list.
        runs_at: u32,
        /// Index of the first key position in the positions.
        keys_at: u32,
        /// Index of the first row span in the positions.
        spans_at: u32,
        /// Factor on q, at most 1 in size: scale; with softcap c, scale / c.
        q_scale: f32,
        /// What is left of the factor where it is larger: on the product, because its product with an element may be out of range.
        x_scale: f32,
        /// With softcap c: c.
        cap: f32,
        /// Where (batch 0, row 0, head 0) of the bias tensor is: of a mask in words, of an additive bias in elements.
        bias_offset: u32,
        /// Distance of batch entries in the bias; 0 where they share one.
        bias_batch: u32,
        /// Distance of rows in the bias.
        bias_row: u32,
        /// Distance of heads in the bias; 0 where they share one.
        bias_head: u32,
        /// Not used; makes the size a multiple of 16.
        pad: u32,
    }
}

uniform! {
    /// Parameters of [`Kernel::MergeParts`](crate::Kernel::MergeParts). Row-heads are (batch, row, head) triples in this
    /// order.
    MergePartsParams {
        /// First row-head of this dispatch.
        first: u32,
        /// One past its last row-head.
        end: u32,
        /// Query rows of the state.
        rows: u32,
        /// Query heads of the state.
        heads: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
        /// 16-byte units of the state's a that lie before its binding.
        a_skipped: u32,
        /// 8-byte units of the state's ml that lie before its binding.
        ml_skipped: u32,
        /// First batch entry that has parts.
        batch_first: u32,
        /// As in [`DecodeParams`].
        group_heads: u32,
        /// As in [`DecodeParams`].
        splits: u32,
        /// Slots of a part.
        slots: u32,
        /// Not used; makes the size a multiple of 16.
        pad: u32,
    }
}

uniform! {
    /// Parameters of [`Kernel::Merge`](crate::Kernel::Merge). Row-heads are (batch, row, head) triples in this order.
    MergeParams {
        /// First row-head of this dispatch.
        first: u32,
        /// One past its last row-head.
        end: u32,
        /// Query rows of the state.
        rows: u32,
        /// Query heads of the state.
        heads: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
        /// 16-byte units of the a of `into` that lie before its binding.
        into_skipped: u32,
        /// 16-byte units of the a of `from` that lie before its binding.
        from_skipped: u32,
        /// Not used; makes the size a multiple of 16.
        pad: u32,
    }
}

uniform! {
    /// Parameters of [`Kernel::Finalize`](crate::Kernel::Finalize). Row-heads are (batch, row, head) triples in this order.
    FinalizeParams {
        /// First row-head of this dispatch.
        first: u32,
        /// One past its last row-head.
        end: u32,
        /// Query rows of the state.
        rows: u32,
        /// Query heads of the state.
        heads: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
        /// 16-byte units of a that lie before its binding.
        a_skipped: u32,
        /// 16-byte units of o that lie before its binding.
        o_skipped: u32,
        /// Not used; makes the size a multiple of 16.
        pad: u32,
    }
}

uniform! {
    /// Parameters of [`Kernel::Repack`](crate::Kernel::Repack); everything counts copied units.
    RepackParams {
        /// Where (0, 0, 0) of the source is.
        from_offset: u32,
        /// Distance of batch entries in the source.
        from_batch: u32,
        /// Distance of rows in the source.
        from_row: u32,
        /// Distance of heads in the source.
        from_head: u32,
        /// Where (0, 0, 0) of the destination is.
        into_offset: u32,
        /// Distance of batch entries in the destination.
        into_batch: u32,
        /// Distance of rows in the destination.
        into_row: u32,
        /// Distance of heads in the destination.
        into_head: u32,
        /// Units in one head of one row.
        row_units: u32,
        /// Heads.
        heads: u32,
        /// Rows.
        rows: u32,
        /// Units in all.
        units: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
        /// Not used; makes the size a multiple of 16.
        pad0: u32,
        /// Not used.
        pad1: u32,
        /// Not used.
        pad2: u32,
    }
}

uniform! {
    /// Parameters of [`Kernel::Convert`](crate::Kernel::Convert); offsets count 16-byte units of each side.
    ConvertParams {
        /// Where the source begins.
        from_offset: u32,
        /// Where the destination begins.
        into_offset: u32,
        /// Eights of elements.
        count: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
    }
}

uniform! {
    /// Parameters of [`Kernel::ToCodes`](crate::Kernel::ToCodes) and [`Kernel::FromCodes`](crate::Kernel::FromCodes). A
    /// chunk is 8 elements. A batch entry is cut into parts of `together` tokens; group g of channels is chunk g %
    /// lanes of the tokens of part g / lanes. Group g of a row is the row itself. Offsets may be "negative" by
    /// wrapping.
    CodesParams {
        /// Where the elements begin, in 16-byte units.
        data_offset: u32,
        /// Where the codes begin, in words.
        codes_offset: u32,
        /// Where the scales begin.
        scales_offset: u32,
        /// Chunks of one token of all heads, or of a row.
        lanes: u32,
        /// Tokens of a batch entry.
        tokens: u32,
        /// Tokens that share the scales of channels.
        together: u32,
        /// First group of this dispatch.
        first: u32,
        /// Groups of this dispatch, one thread each.
        count: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
        /// Not used; makes the size a multiple of 16.
        pad0: u32,
        /// Not used.
        pad1: u32,
        /// Not used.
        pad2: u32,
    }
}

uniform! {
    /// Parameters of [`Kernel::ResetState`](crate::Kernel::ResetState).
    ResetParams {
        /// (batch, head, row) triples.
        row_heads: u32,
        /// Workgroups in the x direction of the dispatch.
        grid_width: u32,
        /// Not used; makes the size a multiple of 16.
        pad0: u32,
        /// Not used.
        pad1: u32,
    }
}
