//! The CUDA backend of Kyklos.
//!
//! It is not written yet. [`availability`] says so, so that a program that asks for CUDA can refuse with a reason
//! instead of quietly running on something else.
#![forbid(unsafe_code)]

/// Whether the CUDA backend can run here.
///
/// # Errors
/// The reason why it cannot, for people. Never panics.
pub fn availability() -> Result<(), &'static str> {
    Err(
        "this version of Kyklos has no CUDA backend: use a wgpu device (Vulkan reaches NVIDIA GPUs) or the CPU",
    )
}
