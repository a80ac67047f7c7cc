//! Attention of one block of queries against one block of keys, into a running state: numbers of
//! the kernels in `wgsl/attend/`. What they compute, their bindings and their work list are
//! described in `portable.wgsl` there.

pub(crate) mod matrix;
pub(crate) mod portable;
pub(crate) mod subgroup;
