//! The kind of device of an adapter, and its vendor.

use kyklos_shaders::Vendor;

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

/// The vendor by its PCI identifier. Metal and browsers give none.
pub(in crate::backend::wgpu) fn vendor(info: &wgpu::AdapterInfo) -> Vendor {
    match info.vendor {
        _ if class(info) == DeviceClass::SoftwareGpu => Vendor::Software,
        0x1002 => Vendor::Amd,
        0x8086 => Vendor::Intel,
        0x10de => Vendor::Nvidia,
        _ => Vendor::Other,
    }
}
