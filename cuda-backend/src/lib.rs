//! The CUDA backend of Kyklos: attention on NVIDIA GPUs through the driver API.
//!
//! It has run on a fake driver with emulated kernels, and **not yet on a GPU**.
//!
//! # Contract
//!
//! - [`CudaBackend`] is a [`kyklos::backend::Backend`]. The driver is loaded when it is first asked for: without one, or
//!   without a device that is new enough, [`availability`] says why, and nothing panics.
//! - Kernels are CUDA C++ in `kernels/`, one source for nvcc, NVRTC and the emulator in `emulator/`. Where the build found
//!   nvcc they are in this library as machine code; elsewhere NVRTC compiles them at run time. [`Way`] says which a call gets.
//! - Kernels, copies to the device and copies to the host have a stream each; events order them where buffers are shared.
//!   Short kernels are submitted together, and as CUDA graphs where the same ones come again.
//!   Copies go through pinned memory, and a download hands it out without another copy.
//! - `unsafe` is in `driver.rs`, the files below it, and `compiler.rs`.
#![deny(unsafe_code)]

mod arguments;
mod attend;
mod backend;
mod cache;
mod codes;
mod compiler;
mod convert;
mod decode;
mod device;
mod devices;
mod driver;
mod fault;
mod graphs;
mod health;
mod hopper;
mod kernels;
mod modules;
mod ops;
mod order;
mod pace;
mod pieces;
mod pool;
mod staging;
mod watch;
mod way;
mod work;

pub use arguments::{
    AttendArguments, CodesArguments, ConvertArguments, DecodeArguments, HeadPack, PartsArguments,
    RepackArguments, StateArguments, TensorArgument, logits,
};
pub use backend::{CudaBackend, CudaOptions, Download};
pub use codes::{CodesKernel, Direction};
pub use decode::{decode_parts, head_packs};
pub use devices::{CudaDevice, Unavailable, availability, devices};
pub use hopper::{HopperArguments, TensorMap};
pub use kernels::{
    AttendKernel, PACKED_ROWS, SMALL_THREADS, SOURCES, STATE_ROWS, convert_kernel, finalize_kernel,
};
pub use pool::CudaBuffer;
pub use way::{CallShape, Way};
pub use work::DeviceWork;
