//! What the program asks of one backend.

use kyklos::backend::wgpu::KernelChoice;
use kyklos::backend::{Device, DeviceClass, DeviceInfo};

use crate::failure::{Failure, Result};

/// A backend of this build: how its devices are named, found and opened. One implementation and one
/// line of the table in `table.rs` add a backend to all commands.
pub(crate) trait BackendEntry {
    /// On the command line: `cpu`, or `wgpu` and `wgpu:1`.
    const NAME: &'static str;
    /// Whether devices have numbers.
    const NUMBERED: bool = true;
    /// Whether `--kernel` and `kyklos tune` have several kernels to choose from.
    const HAS_KERNELS: bool = false;

    /// What the drivers of this machine offer. Empty where there is no driver.
    fn devices() -> Vec<DeviceInfo>;

    /// What the list lacks, why, and what to do about it, where the driver tells.
    fn left_out() -> Option<String> {
        None
    }

    /// The device that `--device` means: `index` as it was given, for the rank number `local_rank`
    /// of this machine.
    fn choose(index: Option<usize>, local_rank: usize) -> Result<usize>;

    /// The devices among which `--device auto` chooses, with their classes.
    fn for_auto() -> Vec<(usize, DeviceClass)> {
        Vec::new()
    }

    fn open(index: usize, kernel: KernelChoice) -> Result<Device>;
}

/// `index` if there is such a device among `found`.
pub(super) fn existing(name: &str, index: usize, found: usize) -> Result<usize> {
    if index < found {
        return Ok(index);
    }
    Err(Failure::refused_here(format!(
        "device {name}:{index} does not exist, this machine has {found}: use a number below {found}; \
         kyklos devices lists them"
    )))
}
