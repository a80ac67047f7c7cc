//! The cores of this machine, as one device.

use kyklos::backend::wgpu::KernelChoice;
use kyklos::backend::{Device, DeviceInfo};

use super::backend::BackendEntry;
use crate::failure::Result;

#[derive(Debug)]
pub(crate) struct Cpu;

impl BackendEntry for Cpu {
    const NAME: &'static str = "cpu";
    const NUMBERED: bool = false;

    fn devices() -> Vec<DeviceInfo> {
        vec![Device::cpu().info().clone()]
    }

    fn choose(_: Option<usize>, _: usize) -> Result<usize> {
        Ok(0)
    }

    fn open(_: usize, _: KernelChoice) -> Result<Device> {
        Ok(Device::cpu())
    }
}
