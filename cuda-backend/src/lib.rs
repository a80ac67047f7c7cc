//! The CUDA backend of Kyklos: attention on NVIDIA GPUs through the driver API.
//!
//! It has run on a fake driver with emulated kernels, and **not yet on a GPU**.
//!
//! # Contract
//!
//! - [`CudaBackend`] is a [`kyklos::backend::Backend`]. The driver is loaded when it is first asked for: without one, or
//!   without a device that is new enough, [`availability`] says why, and nothing panics.
//! - Kernels are CUDA C++ in `kernels/`, one source for nvcc, NVRTC and the emulator in `emulator/`. Where the build found
//!   nvcc they are in this library as machine code; elsewhere NVRTC compiles them at run time. [`KernelChoice`] says which a call gets.
//! - Kernels, copies to the device and copies to the host have a stream each; events order them where buffers are shared.
//!   Short kernels are submitted together, and as CUDA graphs where the same ones come again.
//!   Copies go through pinned memory, and a download hands it out without another copy.
//! - `unsafe` is in `driver/` and `images/nvrtc.rs`.
#![deny(unsafe_code)]

mod backend;
mod device;
mod devices;
mod driver;
mod images;
mod kernels;
mod ops;

pub use backend::CudaBackend;
pub use device::{CudaBuffer, CudaOptions, Download};
pub use devices::{CudaDevice, availability, devices};
pub use driver::Unavailable;
pub use kernels::{
    AttendArguments, AttendKernel, CallShape, CodesArguments, CodesKernel, ConvertArguments, DecodeArguments,
    DeviceWork, Direction, HeadPack, HopperArguments, KernelChoice, PACKED_ROWS, PartsArguments,
    RepackArguments, SMALL_THREADS, SOURCES, STATE_ROWS, StateArguments, TensorArgument, TensorMap,
    convert_kernel, decode_parts, finalize_kernel, head_packs, logits,
};
