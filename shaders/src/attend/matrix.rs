//! Numbers of `attend/matrix.wgsl`.

use minijinja::context;
use minijinja::value::Value;

use crate::Storage;
use crate::variant::{AttendKernel, AttendVariant, Matrices};

/// Largest head dim for which the matrix variant is made.
const MAX_COOPERATIVE_HEAD_DIM: u32 = 256;

impl AttendVariant {
    /// The variant with these matrices, where it can be made for these tensors.
    pub const fn cooperative(matrices: Matrices, storage: Storage, head_dim: u32) -> Option<Self> {
        let Matrices { size, subgroup_size, subgroups, .. } = matrices;
        let made = matches!(storage, Storage::F16)
            && head_dim <= MAX_COOPERATIVE_HEAD_DIM
            && (size == 8 || size == 16)
            && head_dim.is_multiple_of(size)
            && subgroup_size > 0
            && subgroups > 0
            && fits(head_dim, matrices);
        if made { Some(Self::Cooperative(matrices)) } else { None }
    }
}

/// Keys of a tile: fewer for large heads, so that both tiles and the scratch fit the memory of the
/// devices that have matrices of this size, but at least two matrices, for two subgroups to share.
pub(crate) const fn kv_cols(head_dim: u32, size: u32) -> u32 {
    if head_dim <= 128 { 32 } else { 2 * size }
}

/// Query rows of a workgroup.
pub(crate) const fn q_rows(head_dim: u32, matrices: Matrices) -> u32 {
    matrices.size * matrices.subgroups / sharers(head_dim, matrices)
}

/// Subgroups, at their most lanes, that compute the same rows, so that each holds a part of O only.
/// Two read no more than one, and leave registers for twice as many subgroups. Four compute a part
/// of S twice: only where half of O takes 64 registers of a lane and more.
const fn sharers(head_dim: u32, matrices: Matrices) -> u32 {
    let Matrices { size, subgroup_size, subgroups, .. } = matrices;
    if size * head_dim / subgroup_size >= 128 && subgroups.is_multiple_of(4) {
        4
    } else if subgroups.is_multiple_of(2) {
        2
    } else {
        1
    }
}

/// Neighbouring lanes that share a row of the scores.
const fn parts(head_dim: u32, matrices: Matrices) -> u32 {
    matrices.subgroup_size * sharers(head_dim, matrices) / matrices.size
}

/// Whether the lanes of a subgroup, also if it has half of them, have whole rows of the scores, and
/// each lane a part of the columns and of a matrix.
const fn fits(head_dim: u32, matrices: Matrices) -> bool {
    let Matrices { size, subgroup_size, halves, .. } = matrices;
    let parts = parts(head_dim, matrices);
    let fewest_lanes = if halves { subgroup_size / 2 } else { subgroup_size };
    subgroup_size.is_multiple_of(size)
        && parts <= size
        && parts <= kv_cols(head_dim, size)
        && parts <= fewest_lanes
}

/// Bytes of workgroup memory.
pub(crate) const fn workgroup_bytes(kernel: AttendKernel, matrices: Matrices) -> u32 {
    let head_dim = kernel.head_dim;
    let keys = kv_cols(head_dim, matrices.size);
    let rows = q_rows(head_dim, matrices);
    let halves = keys * k_stride(head_dim) + head_dim * v_stride(keys) + rows * weight_stride(keys);
    // Scores, two factors for each row, flags for all.
    let flags = if matrices.halves { 3 } else { 2 };
    2 * halves + 4 * (score_words(head_dim, matrices) + 2 * rows + flags)
}

/// Words of the scores, through which every subgroup also passes its matrices of O, one at a time.
const fn score_words(head_dim: u32, matrices: Matrices) -> u32 {
    let size = matrices.size;
    let scores = q_rows(head_dim, matrices) * score_stride(kv_cols(head_dim, size));
    let squares = matrices.most_subgroups() * size * size;
    if scores > squares { scores } else { squares }
}

/// Elements of K from one key to the next, and of V from one element of the head to the next: 16
/// bytes more than they need, so that neighbours are in different banks. Loads of matrices want
/// them aligned to 16 bytes.
const fn k_stride(head_dim: u32) -> u32 {
    head_dim + 8
}

const fn v_stride(keys: u32) -> u32 {
    keys + 8
}

const fn weight_stride(keys: u32) -> u32 {
    keys + 8
}

const fn score_stride(keys: u32) -> u32 {
    keys + 4
}

pub(crate) fn values(kernel: AttendKernel, matrices: Matrices) -> Value {
    let (head_dim, Matrices { size, subgroup_size, halves, subgroups }) = (kernel.head_dim, matrices);
    let keys = kv_cols(head_dim, size);
    let share = sharers(head_dim, matrices);
    let most_sharers = if halves { 2 * share } else { share };
    let rows = q_rows(head_dim, matrices);
    let parts = parts(head_dim, matrices);
    let distances: Vec<u32> = std::iter::successors(Some(1), |distance| Some(2 * distance))
        .take_while(|one| *one < parts)
        .collect();
    let fragments = head_dim / size;
    context! {
        size,
        lanes => subgroup_size,
        halves,
        subgroups,
        share,
        sharings => if halves { vec![share, 2 * share] } else { vec![share] },
        most_sharers,
        Br => rows,
        Bc => keys,
        k_stride => k_stride(head_dim),
        v_stride => v_stride(keys),
        score_stride => score_stride(keys),
        score_words => score_words(head_dim, matrices),
        weight_stride => weight_stride(keys),
        // Units of a row, of 8 elements, that neighbouring threads stage: 4, 2 or 1.
        units_at_once => 1 << (head_dim / 8).trailing_zeros().min(2),
        // Lanes that share a row, how far apart they are, and columns of each.
        parts,
        distances,
        columns => keys / parts,
        // Matrices side by side in q, those of them in O of one subgroup, at most and at least, and those in the
        // scores.
        fragments,
        accumulators => fragments.div_ceil(share),
        always => fragments.div_ceil(most_sharers),
        at_once => keys / size,
    }
}
