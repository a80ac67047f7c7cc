//! Attention of few query rows against many keys: numbers of the kernels in `wgsl/decode/`, whose
//! `portable.wgsl` describes them.

use minijinja::context;
use minijinja::value::Value;

use crate::variant::DecodeKernel;

/// Threads of the portable kernel, and keys that it takes at a time.
pub(crate) const THREADS: u32 = 64;

/// Most slots of any kernel.
const MAX_SLOTS: u32 = 16;

/// More slots than these need care for registers.
const MANY_SLOTS: u32 = 4;

/// The largest number of slots whose queries fit 8 KiB.
pub(crate) const fn portable_slots(head_dim: u32) -> u32 {
    at_most(2048 / head_dim, MAX_SLOTS)
}

/// The largest number of slots of the kernel with lanes. Unrolled statements grow with slots × dim;
/// beyond some hundred, compilation takes seconds.
pub(crate) const fn lanes_slots(head_dim: u32) -> u32 {
    at_most(256 / head_dim, MAX_SLOTS)
}

const fn at_most(number: u32, limit: u32) -> u32 {
    if number < limit { number } else { limit }
}

/// Chunks of 4 elements in a column of v. With many slots a column is one chunk: two would take 128
/// registers of a thread.
const fn column_chunks(kernel: &DecodeKernel) -> u32 {
    if kernel.slots > MANY_SLOTS { 1 } else { kernel.storage.unit_chunks() }
}

/// Columns of a head.
const fn all_columns(kernel: &DecodeKernel) -> u32 {
    kernel.head_dim / 4 / column_chunks(kernel)
}

/// Threads side by side that take columns of v.
const fn columns(kernel: &DecodeKernel) -> u32 {
    at_most(all_columns(kernel), THREADS)
}

/// Threads that share a column.
const fn slices(kernel: &DecodeKernel) -> u32 {
    THREADS / columns(kernel)
}

/// Threads that look for the maximum of a slot.
const fn finders(kernel: &DecodeKernel) -> u32 {
    at_most(THREADS / kernel.slots, 8)
}

/// Bytes of workgroup memory of the portable kernel.
pub(crate) const fn portable_bytes(kernel: &DecodeKernel) -> u32 {
    let sums = if slices(kernel) > 1 { 4 * slices(kernel) * kernel.head_dim } else { 0 };
    kernel.slots * (4 * kernel.head_dim + 4 * THREADS + 4 * finders(kernel) + 8) + sums
}

/// The numbers of `decode/portable.wgsl`.
pub(crate) fn portable_values(kernel: DecodeKernel) -> Value {
    context! {
        slots => kernel.slots,
        many => kernel.slots > MANY_SLOTS,
        column_chunks => column_chunks(&kernel),
        all_columns => all_columns(&kernel),
        columns => columns(&kernel),
        // Columns of a thread.
        passes => all_columns(&kernel).div_ceil(THREADS),
        slices => slices(&kernel),
        finders => finders(&kernel),
    }
}
