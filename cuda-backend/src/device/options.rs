//! What a backend can be told.

use std::path::PathBuf;
use std::time::Duration;

/// What a backend can be told.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Bytes that all buffers together may have; without it, all that the device has.
    pub max_memory_bytes: Option<u64>,
    /// Folder in which compiled kernels are kept, where they are compiled at run time; without it they are not kept.
    pub cache: Option<PathBuf>,
    /// A device that does nothing for this long is given up. It must be longer than the longest kernel, and than what
    /// others do on the same device.
    pub stuck_after: Duration,
    /// Whether launches that come together again and again are submitted as one, as CUDA graphs. Without, profilers and
    /// debuggers see each by itself.
    pub graphs: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { max_memory_bytes: None, cache: None, stuck_after: Duration::from_secs(120), graphs: true }
    }
}
