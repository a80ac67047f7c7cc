//! The CUDA driver API as types that free what they own. Together with `images/nvrtc.rs` and
//! `nccl/` this is all the unsafe code of the crate, apart from the declaration of
//! `CudaTensor::from_cuda`.
//!
//! The bindings are cudarc's. They load the library at run time and panic where the library or a
//! symbol is missing. Therefore [`load`] looks for all symbols first, and nothing else in this
//! folder is called before it succeeded. Every call that needs a context pushes it and pops it
//! again, so any thread may call and its own context stays current.
#![expect(unsafe_code, reason = "the driver is a C library")]

mod bindings;
mod call;
mod caller;
mod context;
mod copy;
mod error;
mod event;
mod graph;
mod library;
mod memory;
mod module;
mod properties;
mod stream;

pub use caller::CallerStream;
pub(crate) use caller::{PointsTo, StreamState};
pub(crate) use context::Context;
pub(crate) use error::DriverError;
pub use error::Unavailable;
pub(crate) use event::Event;
pub(crate) use graph::Graph;
pub(crate) use library::{load, version, version_text};
pub(crate) use memory::{DeviceMemory, PinnedMemory};
pub(crate) use module::{Function, Launch, Module, encode_tensor_map};
pub(crate) use properties::{DeviceProperties, device_count, properties};
pub(crate) use stream::Stream;
