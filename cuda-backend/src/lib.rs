//! The CUDA backend of Kyklos: attention on NVIDIA GPUs through the driver API.
//!
//! It has run on a fake driver with emulated kernels, and **not yet on a GPU**.
//!
//! # Contract
//!
//! - [`CudaBackend`] is a [`kyklos::backend::Backend`]. The first use loads the driver. If there is
//!   no driver, or no device that is new enough, [`availability`] gives the reason; nothing panics.
//! - Kernels are CUDA C++ in `kernels/`: one source for nvcc, NVRTC and the emulator in
//!   `emulator/`. If the build found nvcc, this library contains them as machine code; otherwise
//!   NVRTC compiles them at run time. [`KernelChoice`] says which kernel a call gets.
//! - Kernels, copies to the device and copies to the host have a stream each. Events order
//!   operations that access the same buffer. Short kernels are submitted together, and as CUDA
//!   graphs if the same sequence repeats. Copies go through pinned memory, and a download returns
//!   that memory without another copy.
//! - The context is the primary one of the device. It is current on a caller's thread during calls
//!   of the driver only. [`CudaTensor`] makes tensors of a caller's device memory and orders
//!   streams of a caller.
//! - [`NcclCollective`] moves messages between CUDA devices of a group's ranks by NCCL, which is
//!   loaded at run time. Messages from and to other ranks are staged in host memory.
//! - [`CudaPeers`] copies messages between CUDA devices of one process, without NCCL.
//! - [`FormedCollective`] is the one of these that the ranks of a group agree on.
//! - Unsafe code is in `driver/`, in `images/nvrtc.rs`, in `nccl/library.rs` and
//!   `nccl/communicator.rs`, and `caller.rs` has an unsafe function.
//!
//! # Modules, from the bottom up
//!
//! - `kernels`: the kernels, their arguments, which one a call gets. Data only.
//! - `driver`: the driver API as types that free what they own.
//! - `images`: machine code of the kernels, from this library, a cache, NVRTC or a file.
//! - `device`: an open device with its memory, streams and completions.
//! - `ops`: the operations as launches of kernels.
//! - `devices`, `backend`: the list of devices, and the `Backend`.
//! - `caller`: tensors in memory of a caller.
//! - `staged`: messages through host memory, beside those from device to device.
//! - `nccl`: the library NCCL, communicators, and the collective.
//! - `peers`: the collective of one process.
//! - `collective`: which of them a group uses.
#![deny(unsafe_code)]

mod backend;
mod caller;
mod collective;
mod device;
mod devices;
mod driver;
mod images;
mod kernels;
mod nccl;
mod ops;
mod peers;
mod staged;

pub use backend::CudaBackend;
pub use caller::{CallerMemory, CudaTensor, Written};
pub use collective::{CollectiveChoice, FormedCollective};
pub use device::{CudaBuffer, CudaOptions, Download};
pub use devices::{CudaDevice, availability, devices};
pub use driver::{CallerStream, Unavailable};
pub use kernels::{
    AttendArguments, AttendKernel, BACKWARD_TILE, BackwardArguments, BackwardKernel, BackwardList,
    BackwardShape, BackwardSums, CallShape, ClearArguments, CodesArguments, CodesKernel, ConvertArguments,
    DecodeArguments, DeviceWork, Direction, HeadPack, HopperArguments, HopperBackwardArguments, KernelChoice,
    PACKED_ROWS, PartsArguments, RepackArguments, RowStatsArguments, SMALL_THREADS, SOURCES, STATE_ROWS,
    StateArguments, TensorArgument, TensorMap, convert_kernel, decode_parts, finalize_kernel, head_packs,
    head_readers, item_of_round, logits, row_stats_kernel,
};
pub use nccl::{
    Nccl, NcclCollective, NcclDecision, NcclError, NcclIsland, NcclObserver, NcclOptions, NcclRefusal,
    NcclState, NcclVersion, UniqueId,
};
pub use peers::CudaPeers;
