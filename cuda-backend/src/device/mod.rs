//! An open device: its streams, memory, submissions and completions.

mod dependencies;
mod event_poller;
mod graph_cache;
mod loaded_kernels;
mod memory;
mod message_stream;
mod open_device;
mod options;
mod other_devices;
mod pacer;
mod status;
mod submitter;
mod unfinished_launches;

pub(crate) use loaded_kernels::LoadedKernels;
pub use memory::download::Download;
pub use memory::memory_pool::CudaBuffer;
pub(crate) use message_stream::MessageStream;
pub(crate) use open_device::OpenDevice;
pub use options::CudaOptions;
pub(crate) use pacer::{InFlightPiece, PieceSize};
#[cfg(test)]
pub(crate) use pacer::{PIECE_S, measured_speed};
pub(crate) use status::{AwaitsMessages, DeviceStatus};
pub(crate) use submitter::{Deferred, LaunchConfig};
