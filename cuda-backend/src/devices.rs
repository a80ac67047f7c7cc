//! The CUDA devices of this machine.

use kyklos::backend::{DeviceClass, DeviceInfo};

use crate::driver::{self, DeviceProperties, Unavailable, version_text};
use crate::images;

/// CUDA 12.0, which drivers from 525 on support, as 1000 · major + 10 · minor. Older drivers are
/// refused.
const OLDEST_DRIVER: u32 = 12_000;
/// Compute capability 8.0, 10 · major + minor: the first with `mma.sync` for bf16 and `cp.async`.
const OLDEST_CAPABILITY: u32 = 80;

/// A CUDA device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// Name, class and driver version. `kernel` is empty: it is known when the device is open.
    pub info: DeviceInfo,
    /// Compute capability, as (major, minor).
    pub capability: (u32, u32),
    /// Memory of the device, in bytes.
    pub memory_bytes: u64,
    /// Why the device cannot be used, if it cannot.
    pub refused: Option<Unavailable>,
}

/// Whether the CUDA backend can run on this machine: it needs a driver and a device that are new
/// enough, for kernels in this library or by NVRTC.
///
/// # Errors
/// Why it cannot run. Does not panic.
pub fn availability() -> Result<(), Unavailable> {
    let devices = devices()?;
    if devices.iter().any(|device| device.refused.is_none()) {
        return Ok(());
    }
    Err(devices.into_iter().find_map(|device| device.refused).unwrap_or_else(no_device))
}

/// All CUDA devices of this machine in the driver's order, including those that cannot be used.
///
/// # Errors
/// The driver is missing, too old or failing, or it has no device. Does not panic.
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

/// Loads the driver and returns its CUDA version, which is new enough.
pub(crate) fn supported_driver_version() -> Result<u32, Unavailable> {
    driver::load()?;
    let version = driver::version().map_err(Unavailable::from)?;
    if version < OLDEST_DRIVER {
        return Err(Unavailable {
            why: format!(
                "the driver supports CUDA {}, the kernels need {}",
                version_text(version),
                version_text(OLDEST_DRIVER)
            ),
            remedy: "install NVIDIA's driver 525 or later".into(),
        });
    }
    Ok(version)
}

fn no_device() -> Unavailable {
    Unavailable {
        why: "CUDA cannot be used: the driver has no device".to_owned(),
        remedy: "look at nvidia-smi and CUDA_VISIBLE_DEVICES".into(),
    }
}

pub(crate) fn describe(properties: &DeviceProperties, version: u32) -> CudaDevice {
    let (major, minor) = (properties.capability / 10, properties.capability % 10);
    let name = &properties.name;
    let refused = if properties.capability < OLDEST_CAPABILITY {
        Some(Unavailable {
            why: format!("{name} has compute capability {major}.{minor}, the kernels need 8.0 (Ampere)"),
            remedy: "use wgpu, which reaches it through Vulkan".into(),
        })
    } else {
        let missing = images::check(properties.capability, version).err();
        missing.map(|Unavailable { why, remedy }| Unavailable {
            why: format!("no kernels for {name}: {why}"),
            remedy,
        })
    };
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
