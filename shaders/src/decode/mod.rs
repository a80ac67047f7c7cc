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

/// Threads side by side that take columns of v, each one unit wide.
const fn columns(kernel: &DecodeKernel) -> u32 {
    at_most(kernel.storage.units(kernel.head_dim), THREADS)
}

/// Threads of the same column: they share the keys, or many slots.
const fn slices(kernel: &DecodeKernel) -> u32 {
    THREADS / columns(kernel)
}

/// Threads that look for the maximum of a slot.
const fn finders(kernel: &DecodeKernel) -> u32 {
    at_most(THREADS / kernel.slots, 8)
}

/// Bytes of workgroup memory of the portable kernel.
pub(crate) const fn portable_bytes(kernel: &DecodeKernel) -> u32 {
    let of_few = if slices(kernel) > 1 { 4 * slices(kernel) * kernel.head_dim } else { 0 };
    let extra = if kernel.slots > MANY_SLOTS { 4 * THREADS } else { of_few };
    kernel.slots * (4 * kernel.head_dim + 4 * THREADS + 4 * finders(kernel) + 8) + extra
}

/// The numbers of `decode/portable.wgsl`.
pub(crate) fn portable_values(kernel: DecodeKernel) -> Value {
    context! {
        slots => kernel.slots,
        many => kernel.slots > MANY_SLOTS,
        // Slots of which a thread has O.
        own_slots => if kernel.slots > MANY_SLOTS { kernel.slots.div_ceil(slices(&kernel)) } else { kernel.slots },
        columns => columns(&kernel),
        // Columns of a thread.
        passes => kernel.storage.units(kernel.head_dim).div_ceil(THREADS),
        slices => slices(&kernel),
        finders => finders(&kernel),
    }
}
