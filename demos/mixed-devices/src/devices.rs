//! The devices of this machine.

use std::fmt;
use std::sync::Arc;

use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::wgpu::WgpuBackend;
use kyklos::backend::{Device, DeviceClass};

use crate::error::Result;

/// One device, which becomes one rank.
pub(crate) struct OneDevice {
    pub(crate) device: Device,
    /// Cores of the CPU, or nothing for a GPU.
    cores: Option<usize>,
}

impl OneDevice {
    fn on_cores(cores: usize) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(cores).build()?;
        Ok(Self { device: Device::from(CpuBackend::with_pool(Arc::new(pool))), cores: Some(cores) })
    }
}

impl fmt::Display for OneDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |length| self.device.info().name.chars().take(length).collect::<String>();
        match self.cores {
            Some(cores) => {
                write!(f, "{cores} CPU core{} ({})", if cores == 1 { "" } else { "s" }, name(24).trim())
            }
            None => f.write_str(name(36).trim()),
        }
    }
}

/// Which devices take part.
pub(crate) struct Choice {
    pub(crate) devices: Vec<OneDevice>,
    /// Sentences for the user.
    pub(crate) notes: Vec<String>,
}

/// Every hardware GPU and the CPU. Without a GPU: the CPU's cores, divided into two devices.
pub(crate) fn choose() -> Choice {
    let mut notes = Vec::new();
    let mut devices = Vec::new();
    for (index, info) in WgpuBackend::enumerate().into_iter().enumerate() {
        // Software drivers compute on the same cores as the CPU backend.
        if info.class >= DeviceClass::Cpu {
            continue;
        }
        match Device::wgpu(index) {
            Ok(device) => devices.push(OneDevice { device, cores: None }),
            Err(error) => notes.push(format!("{} is left out: {error}", info.name)),
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let shares = if devices.is_empty() {
        notes.push(format!("No GPU was found. The {cores} cores of the CPU act as two devices."));
        divide(cores)
    } else {
        vec![cores]
    };
    for cores in shares {
        match OneDevice::on_cores(cores) {
            Ok(device) => devices.push(device),
            Err(error) => notes.push(format!("{cores} cores are left out: {error}")),
        }
    }
    Choice { devices, notes }
}

/// Two unlike shares where there are enough cores, so that the shares of tokens differ too.
fn divide(cores: usize) -> Vec<usize> {
    let small = (cores / 3).max(1);
    vec![cores.saturating_sub(small).max(1), small]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_divided_without_a_rest() {
        for (cores, shares) in [(1, [1, 1]), (2, [1, 1]), (3, [2, 1]), (8, [6, 2]), (16, [11, 5])] {
            assert_eq!(divide(cores), shares, "{cores} cores");
        }
    }
}
