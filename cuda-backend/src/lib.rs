//! The CUDA backend of Kyklos, as far as it goes: the kernels, what they are given, and how they are tested without a
//! GPU. Nothing launches them on one yet, so [`availability`] says no, and a program that asks for CUDA can refuse with a
//! reason instead of quietly running on something else.
//!
//! # Contract
//!
//! Kernels are CUDA C++ in `kernels/`, one source for nvcc, NVRTC and the emulator in `emulator/`, and mean what
//! [`kyklos::backend`] says of `attend`, `merge`, `finalize`, `reset_state` and `repack`. This crate lists them
//! ([`AttendKernel`]), says which a call gets ([`Way`]), lays out their arguments ([`AttendArguments`]) and their work
//! ([`DeviceWork`]). Data only: nothing here touches a device, and nothing fails or panics for want of one.
#![forbid(unsafe_code)]

mod arguments;
mod decode;
mod hopper;
mod kernels;
mod way;
mod work;

pub use arguments::{
    AttendArguments, DecodeArguments, HeadPack, PartsArguments, RepackArguments, StateArguments,
    TensorArgument, logits,
};
pub use decode::{decode_parts, head_packs};
pub use hopper::{HopperArguments, TensorMap};
pub use kernels::{AttendKernel, PACKED_ROWS, SMALL_THREADS, SOURCES, STATE_ROWS, finalize_kernel};
pub use way::{CallShape, Gpu, Way};
pub use work::DeviceWork;

/// Whether the CUDA backend can run here.
///
/// # Errors
/// The reason why it cannot, for people. Never panics.
pub fn availability() -> Result<(), &'static str> {
    Err(
        "this version of Kyklos has no CUDA backend: use a wgpu device (Vulkan reaches NVIDIA GPUs) or the CPU",
    )
}
