//! Options of a backend.

use std::path::PathBuf;
use std::time::Duration;

/// Options of a [`CudaBackend`](crate::CudaBackend).
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Limit for all buffers together, in bytes. `None`: the memory of the device. What only a message to a rank of another device still
    /// has, or the copy of one, does not count.
    pub max_memory_bytes: Option<u64>,
    /// Folder for kernels that are compiled at run time, by default [`kyklos::machine::cache_folder`]. `None`: they are compiled again
    /// at each start.
    pub cache: Option<PathBuf>,
    /// If the device completes nothing for this long, it counts as lost. Must be longer than the longest kernel, and longer
    /// than other processes keep the device busy.
    pub stuck_after: Duration,
    /// Whether sequences of launches that repeat are submitted as CUDA graphs. If not, profilers and debuggers see each
    /// launch by itself.
    pub graphs: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            max_memory_bytes: None,
            cache: kyklos::machine::cache_folder(),
            stuck_after: Duration::from_secs(120),
            graphs: true,
        }
    }
}
