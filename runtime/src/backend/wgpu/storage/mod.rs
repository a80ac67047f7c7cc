//! Memory of a device: buffers, textures, their pool and limit, and copies to the host.

pub(super) mod buffer;
pub(super) mod download;
pub(super) mod memory;
pub(super) mod pool;
pub(super) mod region;
pub(super) mod staging;
pub(super) mod texture;
