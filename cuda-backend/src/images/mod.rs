//! Where the machine code of the kernels comes from: this library, a cache on disk, or NVRTC.

mod cache;
mod image;
mod nvrtc;

pub(crate) use image::{Image, check, image};
