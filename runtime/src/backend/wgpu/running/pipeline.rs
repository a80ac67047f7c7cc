//! Compiled kernels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use kyklos_shaders::{Access, ENTRY_POINT, Kernel};

use crate::backend::wgpu::variant::DIALECT;

/// Kernels compiled so far.
#[derive(Debug, Default)]
pub(in crate::backend::wgpu) struct Pipelines(
    pub(in crate::backend::wgpu) Mutex<HashMap<Kernel, Arc<Pipeline>>>,
);

/// A compiled kernel.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct Pipeline {
    pub(in crate::backend::wgpu) label: String,
    pub(in crate::backend::wgpu) raw: wgpu::ComputePipeline,
    pub(in crate::backend::wgpu) layout: wgpu::BindGroupLayout,
}

impl Pipeline {
    /// Compiles `kernel`. The driver reports a fault through the device's error callback.
    pub(in crate::backend::wgpu) fn compile(device: &wgpu::Device, kernel: Kernel) -> Self {
        let label = kernel.name();
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(&label),
            source: wgpu::ShaderSource::Wgsl(kernel.source(DIALECT).into()),
        });
        let entries: Vec<_> = (0..)
            .zip(kernel.bindings())
            .map(|(binding, bound)| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: binding_type(bound.access),
                count: None,
            })
            .collect();
        let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(&label),
            entries: &entries,
        });
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(&label),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(&label),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some(ENTRY_POINT),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Every kernel writes its workgroup memory before it reads it.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        Self { label, raw, layout }
    }
}

fn binding_type(access: Access) -> wgpu::BindingType {
    let buffer = |ty| wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None };
    match access {
        Access::Uniform => buffer(wgpu::BufferBindingType::Uniform),
        Access::Read => buffer(wgpu::BufferBindingType::Storage { read_only: true }),
        Access::ReadWrite => buffer(wgpu::BufferBindingType::Storage { read_only: false }),
        Access::Texture => wgpu::BindingType::StorageTexture {
            access: wgpu::StorageTextureAccess::ReadOnly,
            format: wgpu::TextureFormat::Rgba32Uint,
            view_dimension: wgpu::TextureViewDimension::D2,
        },
    }
}
