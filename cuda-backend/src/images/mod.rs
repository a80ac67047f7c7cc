//! Where the machine code of the kernels comes from: this library, a cache on disk, NVRTC, or a
//! file that replaces some.

mod cache;
mod image;
mod nvrtc;
mod replacement;

pub(crate) use image::{Image, check, image};
pub(crate) use replacement::Replacement;
