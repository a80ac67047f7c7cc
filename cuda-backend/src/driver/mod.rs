//! The driver API as values that clean up after themselves. Here, in `driver/` and in `compiler.rs` is all that is unsafe.
//!
//! Bindings are cudarc's, loaded at run time; it panics where a library or a symbol is missing, so [`load`] looks for
//! all of them first, and nothing else is called before it. Every call makes its context current: which thread calls
//! does not matter.
#![expect(unsafe_code, reason = "the driver is a C library")]

#[macro_use]
mod call;
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

pub(crate) use context::Context;
pub(crate) use error::DriverError;
pub use error::Unavailable;
pub(crate) use event::Event;
pub(crate) use graph::Graph;
pub(crate) use library::{load, version};
pub(crate) use memory::{DeviceMemory, PinnedMemory};
pub(crate) use module::{Function, Launch, Module, encode_tensor_map};
pub(crate) use properties::{DeviceProperties, device_count, properties};
pub(crate) use stream::Stream;
