//! Where the machine code of the kernels comes from: this library, a cache on disk, or NVRTC.

pub(crate) mod cache;
mod image;
pub(crate) mod nvrtc;

pub(crate) use image::image;
