//! An open device: its streams, memory, submissions and completions.

pub(crate) mod dependencies;
pub(crate) mod event_poller;
pub(crate) mod gpu;
pub(crate) mod graph_cache;
pub(crate) mod memory_pool;
pub(crate) mod pacer;
pub(crate) mod staging;
pub(crate) mod status;

pub use memory_pool::CudaBuffer;
