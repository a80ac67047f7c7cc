//! Which devices there are, and why not.

use kyklos::backend::{DeviceClass, DeviceInfo};

use crate::driver::{self, DeviceProperties, Unavailable};

/// CUDA 12.0, of drivers from 525 on: older ones are not tried.
const OLDEST_DRIVER: u32 = 12_000;
/// `mma.sync` for bf16, and `cp.async`.
const OLDEST_CAPABILITY: u32 = 80;

/// A device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// What it is.
    pub info: DeviceInfo,
    /// Compute capability, as (major, minor).
    pub capability: (u32, u32),
    /// DeviceMemory, in bytes.
    pub memory_bytes: u64,
    /// Why it cannot be used, if it cannot.
    pub refused: Option<Unavailable>,
}

/// Whether the CUDA backend can run here: a driver that is new enough, and a device that is.
///
/// # Errors
/// The reason why it cannot. Never panics.
pub fn availability() -> Result<(), Unavailable> {
    let devices = devices()?;
    if devices.iter().any(|device| device.refused.is_none()) {
        return Ok(());
    }
    Err(devices.into_iter().find_map(|device| device.refused).unwrap_or_else(no_device))
}

/// All devices of this machine, those that cannot be used too, in the driver's order.
///
/// # Errors
/// Why the driver cannot be asked, or that it has none. Never panics.
pub fn devices() -> Result<Vec<CudaDevice>, Unavailable> {
    let version = supported_driver_version()?;
    let count = driver::device_count().map_err(Unavailable::from)?;
    if count == 0 {
        return Err(no_device());
    }
    let each = (0..count)
        .map(|ordinal| Ok(describe(&driver::properties(ordinal).map_err(Unavailable::from)?, version)));
    each.collect()
}

/// Loads the driver and asks for its version.
pub(crate) fn supported_driver_version() -> Result<u32, Unavailable> {
    driver::load()?;
    let version = driver::version().map_err(Unavailable::from)?;
    if version < OLDEST_DRIVER {
        return Err(Unavailable {
            why: format!(
                "the driver speaks CUDA {}, kernels need {}",
                version_text(version),
                version_text(OLDEST_DRIVER)
            ),
            remedy: "install NVIDIA's driver 525 or later",
        });
    }
    Ok(version)
}

fn no_device() -> Unavailable {
    Unavailable {
        why: "CUDA cannot be used: the driver has no device".to_owned(),
        remedy: "look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    }
}

pub(crate) fn describe(properties: &DeviceProperties, version: u32) -> CudaDevice {
    let (major, minor) = (properties.capability / 10, properties.capability % 10);
    let refused = (properties.capability < OLDEST_CAPABILITY).then(|| Unavailable {
        why: format!("{} has compute capability {major}.{minor}, kernels need 8.0 (Ampere)", properties.name),
        remedy: "use wgpu, which reaches it through Vulkan",
    });
    CudaDevice {
        info: DeviceInfo {
            backend: "cuda",
            name: properties.name.clone(),
            driver: format!("CUDA {}", version_text(version)),
            class: if properties.integrated { DeviceClass::IntegratedGpu } else { DeviceClass::DiscreteGpu },
            kernel: String::new(),
        },
        capability: (major, minor),
        memory_bytes: properties.memory_bytes as u64,
        refused,
    }
}

fn version_text(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
