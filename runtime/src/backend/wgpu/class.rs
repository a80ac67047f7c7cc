//! Which kind of device an adapter is.

use crate::backend::DeviceClass;

/// The kind of a device, from what its driver says.
pub(super) fn class(info: &wgpu::AdapterInfo) -> DeviceClass {
    match info.device_type {
        wgpu::DeviceType::Cpu => DeviceClass::SoftwareGpu,
        wgpu::DeviceType::DiscreteGpu => DeviceClass::DiscreteGpu,
        wgpu::DeviceType::IntegratedGpu => DeviceClass::IntegratedGpu,
        wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => DeviceClass::OtherGpu,
    }
}
