//! Numbers of `attend/matrix.wgsl`.

use minijinja::context;
use minijinja::value::Value;

use crate::variant::AttendKernel;

/// Keys of a tile: fewer for large heads, so that both tiles and the scratch fit 32 KiB.
pub(crate) const fn kv_cols(head_dim: u32) -> u32 {
    if head_dim <= 128 { 32 } else { 16 }
}

/// Bytes of workgroup memory.
pub(crate) const fn workgroup_bytes(head_dim: u32, size: u32, subgroups: u32) -> u32 {
    let keys = kv_cols(head_dim);
    let rows = size * subgroups;
    let halves = keys * k_stride(head_dim) + head_dim * v_stride(keys) + rows * weight_stride(keys);
    // Scores, two factors for each row, two flags for all.
    2 * halves + 4 * (rows * score_stride(keys) + 2 * rows + 2)
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

pub(crate) fn values(kernel: AttendKernel, size: u32, lanes: u32, subgroups: u32) -> Value {
    let keys = kv_cols(kernel.head_dim);
    let distances: Vec<u32> = std::iter::successors(Some(size), |distance| Some(2 * distance))
        .take_while(|one| *one < lanes)
        .collect();
    let fragments = kernel.head_dim / size;
    let at_once = keys / size;
    let passes: Vec<Value> = (0..fragments)
        .step_by(at_once as usize)
        .map(|first| context! { first, end => fragments.min(first + at_once) })
        .collect();
    context! {
        size,
        lanes,
        subgroups,
        Br => size * subgroups,
        Bc => keys,
        k_stride => k_stride(kernel.head_dim),
        v_stride => v_stride(keys),
        score_stride => score_stride(keys),
        weight_stride => weight_stride(keys),
        // Lanes that share a row, and columns of each.
        parts => lanes / size,
        columns => keys * size / lanes,
        // Matrices side by side in q and in O, and in the scores; how O passes through the scores.
        fragments,
        at_once,
        passes,
        // Of the lanes that share a row.
        distances,
    }
}
