//! NCCL: its library, loaded at run time by its own loader, and a collective on it.
//!
//! cudarc's bindings of NCCL are not used: they panic if the library is missing, and they do not
//! look for `libnccl.so.2`, the only name in NVIDIA's wheels.

mod collective;
mod communicator;
mod error;
mod exchange;
mod form;
mod islands;
mod library;
mod observer;
mod thread;
mod words;
mod worker;

pub use collective::{NcclCollective, NcclOptions};
pub use error::NcclError;
pub use form::NcclDecision;
pub use islands::{NcclIsland, NcclRefusal};
pub use library::{Nccl, NcclVersion, UniqueId};
pub use observer::{NcclObserver, NcclState};
