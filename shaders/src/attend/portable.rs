//! Numbers of `attend/portable.wgsl`.

use minijinja::context;
use minijinja::value::Value;

use crate::variant::AttendKernel;

pub(crate) const THREADS: u32 = 64;
/// Keys of a tile.
pub(crate) const KV_COLS: u32 = 32;
/// Threads in a row of the grid, rows of threads, and chunks of q, k or v in workgroup memory.
const SIDE: u32 = 8;

/// Query rows of a tile.
pub(crate) const fn q_rows(rows_per_thread: u32) -> u32 {
    rows_per_thread * SIDE
}

pub(crate) const fn workgroup_bytes(head_dim: u32, rows_per_thread: u32) -> u32 {
    bytes_with(q_chunks(head_dim, rows_per_thread), rows_per_thread)
}

/// Bytes of workgroup memory with this number of chunks of each Q row.
const fn bytes_with(q_chunks: u32, rows_per_thread: u32) -> u32 {
    16 * (q_chunks * q_rows(rows_per_thread) + SIDE * KV_COLS + SIDE * q_rows(rows_per_thread))
}

const fn passes(head_dim: u32) -> u32 {
    (head_dim / 4).div_ceil(SIDE)
}

/// Whether a tile's Q rows fit into 16 KiB of workgroup memory. If not, they are loaded in passes.
const fn q_stays(head_dim: u32, rows_per_thread: u32) -> bool {
    bytes_with(passes(head_dim) * SIDE, rows_per_thread) <= 16384
}

/// Chunks of each Q row in workgroup memory.
const fn q_chunks(head_dim: u32, rows_per_thread: u32) -> u32 {
    if q_stays(head_dim, rows_per_thread) { passes(head_dim) * SIDE } else { SIDE }
}

pub(crate) fn values(kernel: AttendKernel, rows_per_thread: u32) -> Value {
    context! {
        Br => q_rows(rows_per_thread),
        Bc => KV_COLS,
        rows => rows_per_thread,
        passes => passes(kernel.head_dim),
        q_stays => q_stays(kernel.head_dim, rows_per_thread),
        q_chunks => q_chunks(kernel.head_dim, rows_per_thread),
    }
}
