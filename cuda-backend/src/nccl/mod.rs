//! NCCL: its library, loaded at run time by its own loader. No collective uses it yet.
//!
//! cudarc's bindings of NCCL are not used: they panic if the library is missing, and they do not look for `libnccl.so.2`,
//! the only name in NVIDIA's wheels.

mod error;
mod library;

pub use error::NcclError;
pub use library::{Nccl, NcclVersion, UniqueId};
