//! The instance of wgpu: which drivers are asked, and with which settings.

use wgpu::InstanceDescriptor;

/// The settings of an instance: those of wgpu, and what wgpu's own variables change in its flags
/// and in the options of its APIs. Which APIs are used, [`apis`] says.
pub(super) fn descriptor() -> InstanceDescriptor {
    let plain = InstanceDescriptor::new_without_display_handle();
    InstanceDescriptor {
        flags: plain.flags.with_env(),
        backend_options: plain.backend_options.clone().with_env(),
        ..plain
    }
}

/// The only instance of the process that computes. It is never dropped: the Vulkan loader unloads
/// the drivers with the last instance, and a process that exits while another thread does that
/// jumps into unmapped code.
fn instance() -> &'static wgpu::Instance {
    static INSTANCE: std::sync::OnceLock<wgpu::Instance> = std::sync::OnceLock::new();
    INSTANCE.get_or_init(|| wgpu::Instance::new(descriptor()))
}

/// The APIs that are used: those of `WGPU_BACKEND`, or all that Kyklos knows.
pub(super) fn apis() -> wgpu::Backends {
    wgpu::Backends::PRIMARY.with_env() & wgpu::Backends::PRIMARY
}

/// What the drivers offer to `instance`.
pub(super) fn on(instance: &wgpu::Instance) -> Vec<wgpu::Adapter> {
    pollster::block_on(instance.enumerate_adapters(apis()))
}

/// What the drivers offer, a GPU once for each driver.
pub(super) fn every_adapter() -> Vec<wgpu::Adapter> {
    on(instance())
}
