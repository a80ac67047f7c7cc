//! The kind of device of an adapter.

use crate::backend::DeviceClass;

/// The kind of a device, from the information of its driver.
pub(in crate::backend::wgpu) fn class(info: &wgpu::AdapterInfo) -> DeviceClass {
    match info.device_type {
        wgpu::DeviceType::Cpu => DeviceClass::SoftwareGpu,
        wgpu::DeviceType::DiscreteGpu => DeviceClass::DiscreteGpu,
        wgpu::DeviceType::IntegratedGpu => DeviceClass::IntegratedGpu,
        wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => DeviceClass::OtherGpu,
    }
}
