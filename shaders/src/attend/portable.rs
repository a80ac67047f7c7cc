//! Numbers of `attend/portable.wgsl`.

use minijinja::context;
use minijinja::value::Value;

use crate::Storage;
use crate::variant::AttendKernel;

/// Threads in a row of the grid, and rows of threads.
pub(crate) const SIDE: u32 = 8;
/// Elements of the head in a pass of S = q k^T, and in a pass of P V.
const QK_ELEMENTS: u32 = 32;
const PV_ELEMENTS: u32 = 64;
/// Keys in a pass of P V: one vector for each thread of a row.
const PV_KEYS: u32 = 4 * SIDE;

pub(crate) const fn workgroup_bytes(storage: Storage, rows_per_thread: u32) -> u32 {
    16 * (q_vectors(rows_per_thread) + kv_units(storage) + SIDE * SIDE * rows_per_thread)
}

const fn q_vectors(rows_per_thread: u32) -> u32 {
    QK_ELEMENTS / 4 * SIDE * rows_per_thread
}

/// A pass of V, or as much: one of K with 8 keys in a thread.
const fn kv_units(storage: Storage) -> u32 {
    PV_KEYS * PV_ELEMENTS / storage.unit_elements()
}

pub(crate) fn values(kernel: AttendKernel, rows_per_thread: u32, keys_per_thread: u32) -> Value {
    let unit = kernel.storage.unit_elements();
    // Chunks of O that a thread holds for each row: 2 of each pass, 1 if a last pass has at most half
    // of the elements.
    let held = kernel.head_dim.div_ceil(PV_ELEMENTS / 2);
    context! {
        Br => SIDE * rows_per_thread,
        Bc => SIDE * keys_per_thread,
        rows => rows_per_thread,
        // Vectors of 4 keys.
        halves => keys_per_thread / 4,
        q_vectors => q_vectors(rows_per_thread),
        kv_units => kv_units(kernel.storage),
        unit_type => kernel.storage.unit_type(),
        qk_passes => kernel.head_dim.div_ceil(QK_ELEMENTS),
        pv_passes => held.div_ceil(2),
        held,
        k_units => QK_ELEMENTS / unit,
        v_units => PV_ELEMENTS / unit,
    }
}
