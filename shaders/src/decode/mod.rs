//! Attention of few query rows against many keys. One workgroup takes one KV head, the rows of all
//! query heads that share it, and one split of the keys. It writes a part: the state of those rows
//! over this split alone. `decode/merge_parts.wgsl` then merges all parts of a row into its running state.
//!
//! A slot is one (query row, query head) pair of a workgroup: slot `row · group_heads + head −
//! first head`. All slots read the same keys, so each key is fetched once for all of them.
//!
//! # Bindings
//!
//! As those of [`attend`](crate::attend), the bias included, but the state is not among them: 4 is
//! `part_a`, f32 `[item, slot, dim]`, and 5 `part_ml`, f32 `[item, slot, 2]`, both dense, m in
//! base-2 units. Where l is −1 the slot saw no key of the split, and its m and a mean
//! nothing; no sum of weights is negative.
//!
//! # Masks
//!
//! The runs of the work list only tell which keys to skip; the kernel does not use whether they are
//! full. Every element is tested against its row's span, which costs little with one key for each
//! thread. All rows are in Q tile 0.

use minijinja::context;
use minijinja::value::Value;

use crate::variant::DecodeKernel;

/// Threads of the portable kernel, and keys that it takes at a time.
pub(crate) const THREADS: u32 = 64;

/// Most slots of any kernel.
const MAX_SLOTS: u32 = 16;

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

/// Threads side by side that take columns of v.
const fn columns(kernel: &DecodeKernel) -> u32 {
    at_most(kernel.storage.units(kernel.head_dim), THREADS)
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
        columns => columns(&kernel),
        // Columns of a thread.
        passes => kernel.storage.units(kernel.head_dim).div_ceil(THREADS),
        slices => slices(&kernel),
        finders => finders(&kernel),
    }
}
