//! Numbers and names of `backward/matrix.wgsl`.

use minijinja::context;
use minijinja::value::Value;

use super::portable::products;
use super::variant::{BackwardKernel, BackwardVariant};
use crate::Storage;
use crate::variant::{Matrices, Tile};

/// Largest head dim for which the matrix variant is made: above, the sums of dK and dV do not fit
/// the registers of a lane.
const MAX_HEAD_DIM: u32 = 128;

/// Fewest rows and keys of the tiles of the list: those of the portable variant.
const LEAST_LIST_TILE: u32 = 32;

/// Workgroup memory up to which 32 moving rows are taken at once, and 16 above: that of Apple's
/// GPUs, and so that two workgroups and more have room on others.
const MOST_BYTES: u32 = 32 << 10;

/// Subgroups, at their most lanes, that compute the same fixed rows: one for S, one for dP.
const SHARERS: u32 = 2;

impl BackwardVariant {
    /// The variant with these matrices, where it can be made for these tensors.
    pub const fn cooperative(matrices: Matrices, storage: Storage, head_dim: u32) -> Option<Self> {
        let Matrices { size, subgroup_size, subgroups, .. } = matrices;
        let made = matches!(storage, Storage::F16)
            && head_dim <= MAX_HEAD_DIM
            && (size == 8 || size == 16)
            && head_dim.is_multiple_of(size)
            && subgroup_size > 0
            && subgroups > 0
            && subgroups.is_multiple_of(SHARERS)
            && fits(head_dim, matrices);
        if made { Some(Self::Cooperative(matrices)) } else { None }
    }
}

/// Fixed rows of a workgroup.
pub(crate) const fn tile_rows(matrices: Matrices) -> u32 {
    matrices.size * matrices.subgroups / SHARERS
}

pub(crate) const fn list_tile(matrices: Matrices) -> Tile {
    let rows = tile_rows(matrices);
    let rows = if rows > LEAST_LIST_TILE { rows } else { LEAST_LIST_TILE };
    Tile { q_rows: rows, kv_cols: rows }
}

/// Moving rows of a tile.
const fn moving_rows(head_dim: u32, matrices: Matrices) -> u32 {
    if bytes_with(32, head_dim, matrices) <= MOST_BYTES { 32 } else { 16 }
}

/// Neighbouring lanes that share a row of S and dP.
const fn parts(matrices: Matrices) -> u32 {
    matrices.subgroup_size * SHARERS / matrices.size
}

/// Whether the lanes of a subgroup, also if it has half of them, have whole rows of S, and each
/// lane a part of the columns and of a matrix; and whether tiles of fixed rows divide the list's.
const fn fits(head_dim: u32, matrices: Matrices) -> bool {
    let Matrices { size, subgroup_size, halves, .. } = matrices;
    let parts = parts(matrices);
    let fewest_lanes = if halves { subgroup_size / 2 } else { subgroup_size };
    subgroup_size.is_multiple_of(size)
        && parts <= size
        && moving_rows(head_dim, matrices).is_multiple_of(parts)
        && parts <= fewest_lanes
        && list_tile(matrices).q_rows.is_multiple_of(tile_rows(matrices))
        && list_tile(matrices).q_rows.is_multiple_of(32)
}

/// Bytes of workgroup memory.
pub(crate) const fn workgroup_bytes(head_dim: u32, matrices: Matrices) -> u32 {
    bytes_with(moving_rows(head_dim, matrices), head_dim, matrices)
}

const fn bytes_with(moving: u32, head_dim: u32, matrices: Matrices) -> u32 {
    let rows = tile_rows(matrices);
    let halves = 2 * area(moving, head_dim) + 2 * rows * padded(moving);
    // A factor for each row, flags for all.
    let flags = if matrices.halves { 3 } else { 2 };
    2 * halves + 4 * (score_words(moving, matrices) + rows + flags)
}

/// Elements of a tensor's moving rows: row by row, or element by element.
const fn area(moving: u32, head_dim: u32) -> u32 {
    let (by_row, by_element) = (moving * padded(head_dim), head_dim * padded(moving));
    if by_row > by_element { by_row } else { by_element }
}

/// Words of S and dP, through which every subgroup also passes its matrices of the sums, one at a
/// time.
const fn score_words(moving: u32, matrices: Matrices) -> u32 {
    let scores = 2 * tile_rows(matrices) * score_stride(moving);
    let squares = matrices.most_subgroups() * matrices.size * matrices.size;
    if scores > squares { scores } else { squares }
}

/// Elements from one line of a matrix to the next: 16 bytes more than it needs, so that neighbours
/// are in different banks. Loads of matrices want them aligned to 16 bytes.
const fn padded(elements: u32) -> u32 {
    elements + 8
}

const fn score_stride(moving: u32) -> u32 {
    moving + 4
}

pub(crate) fn values(kernel: BackwardKernel, matrices: Matrices) -> Value {
    let Matrices { size, subgroup_size, halves, subgroups } = matrices;
    let (head_dim, by_rows) = (kernel.head_dim, kernel.sums.rows_are_fixed());
    let moving = moving_rows(head_dim, matrices);
    let parts = parts(matrices);
    let distances: Vec<u32> = std::iter::successors(Some(1), |distance| Some(2 * distance))
        .take_while(|one| *one < parts)
        .collect();
    // Those of dQ are shared by all that have the same rows, those of dK and of dV by a role.
    let most_sharers = if halves { 2 * SHARERS } else { SHARERS };
    let [sharers, most_of_sums] = if by_rows { [SHARERS, most_sharers] } else { [1, most_sharers / SHARERS] };
    let fragments = head_dim / size;
    let areas: Vec<Value> = products(kernel.sums)
        .into_iter()
        .enumerate()
        .map(|(index, (_, fixed, moving))| {
            context! { index, fixed, moving, summed => index == 0 || !by_rows }
        })
        .collect();
    let sum = |name, moving| context! { name, moving };
    let sums = if by_rows { vec![sum("dq", "k")] } else { vec![sum("dk", "q"), sum("dv", "d_o")] };
    context! {
        size,
        lanes => subgroup_size,
        halves,
        subgroups,
        sharings => if halves { vec![SHARERS, 2 * SHARERS] } else { vec![SHARERS] },
        most_sharers,
        most_per_role => most_sharers / SHARERS,
        T => tile_rows(matrices),
        M => moving,
        area => area(moving, head_dim),
        row_stride => padded(head_dim),
        sum_stride => padded(moving),
        weight_stride => padded(moving),
        score_stride => score_stride(moving),
        score_words => score_words(moving, matrices),
        // Units of a row, of 8 elements, that neighbouring threads stage: 4, 2 or 1.
        units_at_once => 1 << (head_dim / 8).trailing_zeros().min(2),
        // Lanes that share a row, how far apart they are, and columns of each.
        parts,
        distances,
        columns => moving / parts,
        // Matrices side by side in a fixed row, those of them in the sums of one subgroup, at most and at least, and those in
        // S.
        fragments,
        accumulators => fragments.div_ceil(sharers),
        always => fragments.div_ceil(most_of_sums),
        at_once => moving / size,
        areas,
        sums,
    }
}
