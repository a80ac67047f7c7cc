//! Compiled kernels, bindings and dispatches.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use kyklos_shaders::{Access, Dialect, ENTRY_POINT, Kernel};

use super::device::Gpu;
use super::stopwatch::Stopwatch;
use super::{WgpuBuffer, narrow};
use crate::{Error, Result};

/// Kernels compiled so far.
#[derive(Debug, Default)]
pub(super) struct Pipelines(Mutex<HashMap<Kernel, Arc<Pipeline>>>);

/// A compiled kernel.
#[derive(Debug)]
pub(super) struct Pipeline {
    label: String,
    raw: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
}

/// Part of a buffer as a kernel sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window<'a> {
    buffer: &'a wgpu::Buffer,
    offset: u64,
    size: u64,
}

/// What a kernel is given.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bound<'a> {
    Buffer(Window<'a>),
    Texture(&'a wgpu::TextureView),
}

impl<'a> From<Window<'a>> for Bound<'a> {
    fn from(window: Window<'a>) -> Self {
        Self::Buffer(window)
    }
}

impl Window<'_> {
    /// 16-byte units of the buffer that lie before the window. Kernels subtract them, wrapping.
    pub(super) fn skipped_units(&self) -> Result<u32> {
        narrow("a buffer offset", usize::try_from(self.offset / 16).unwrap_or(usize::MAX))
    }
}

/// Workgroups of a dispatch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// In x; the kernel is told.
    pub(super) width: u32,
    height: u32,
}

impl Gpu {
    /// The pipeline of `kernel`, compiled when it is first asked for.
    pub(super) fn pipeline(&self, kernel: Kernel) -> Result<Arc<Pipeline>> {
        let mut pipelines = self.pipelines.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = pipelines.get(&kernel) {
            return Ok(pipeline.clone());
        }
        let pipeline = Arc::new(self.compile(kernel));
        self.check()?;
        pipelines.insert(kernel, pipeline.clone());
        Ok(pipeline)
    }

    fn compile(&self, kernel: Kernel) -> Pipeline {
        let label = kernel.name();
        let module = self.device.create_shader_module(wgpu::ShaderModuleDescriptor {
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
        let layout = self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(&label),
            entries: &entries,
        });
        let pipeline_layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(&label),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let raw = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
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
        Pipeline { label, raw, layout }
    }

    /// The bytes `range` of `buffer` as a binding; it may start a little earlier, where the device wants it aligned.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when they do not fit into one binding.
    pub(super) fn window<'a>(
        &self,
        what: &str,
        buffer: &'a WgpuBuffer,
        range: Range<u64>,
    ) -> Result<Window<'a>> {
        let alignment = u64::from(self.limits.min_storage_buffer_offset_alignment).max(16);
        let offset = range.start / alignment * alignment;
        let size = (range.end - offset).max(1).next_multiple_of(16);
        let allowed = self.limits.max_storage_buffer_binding_size;
        if size > allowed {
            return Err(self.out_of_memory(&format!("binding {what}"), size, allowed));
        }
        if offset + size > buffer.raw.size() {
            return Err(Error::request(
                format!("{what} reaches to byte {} of a buffer of {}", range.end, buffer.bytes),
                "use a layout that stays inside its buffer",
            ));
        }
        Ok(Window { buffer: &buffer.raw, offset, size })
    }

    /// The whole buffer as a binding.
    ///
    /// # Errors
    /// As [`Self::window`].
    pub(super) fn whole<'a>(&self, what: &str, buffer: &'a WgpuBuffer) -> Result<Window<'a>> {
        self.window(what, buffer, 0..buffer.bytes as u64)
    }

    /// Bytes that a window is sure to hold, wherever it starts.
    pub(super) fn window_bytes(&self) -> u64 {
        self.limits.max_storage_buffer_binding_size
            - u64::from(self.limits.min_storage_buffer_offset_alignment).max(16)
    }

    /// How `groups` workgroups are laid out: folded where they exceed what one dimension may have.
    pub(super) fn grid(&self, groups: u64) -> Result<Grid> {
        let most = u64::from(self.limits.max_compute_workgroups_per_dimension);
        let width = groups.clamp(1, most);
        let height = groups.div_ceil(width);
        if height > most {
            return Err(Error::request(
                format!("{groups} workgroups"),
                format!("at most {} fit one dispatch: use smaller pieces", most * most),
            ));
        }
        let narrow = |n| u32::try_from(n).expect("at most a u32 limit");
        Ok(Grid { width: narrow(width), height: narrow(height) })
    }

    /// Records one dispatch of `kernel`.
    pub(super) fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        kernel: Kernel,
        params: &[u8],
        bound: &[Bound<'_>],
        grid: Grid,
    ) -> Result<()> {
        let pipeline = self.pipeline(kernel)?;
        let label = Some(pipeline.label.as_str());
        let uniform = self.uniform(&pipeline.label, params)?;
        let uniform = Bound::Buffer(Window { buffer: &uniform, offset: 0, size: uniform.size() });
        let entries: Vec<_> = (0..)
            .zip(std::iter::once(&uniform).chain(bound))
            .map(|(binding, bound)| wgpu::BindGroupEntry {
                binding,
                resource: match *bound {
                    Bound::Buffer(window) => wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                        buffer: window.buffer,
                        offset: window.offset,
                        size: std::num::NonZeroU64::new(window.size),
                    }),
                    Bound::Texture(view) => wgpu::BindingResource::TextureView(view),
                },
            })
            .collect();
        let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label,
            layout: &pipeline.layout,
            entries: &entries,
        });
        let timestamp_writes = self.stopwatch.as_ref().and_then(Stopwatch::next);
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label, timestamp_writes });
        pass.set_pipeline(&pipeline.raw);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(grid.width, grid.height, 1);
        Ok(())
    }

    pub(super) fn encoder(&self, label: &str) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some(label) })
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

/// wgpu hands WGSL to naga natively and to the browser on the web.
pub(super) const DIALECT: Dialect = if cfg!(target_arch = "wasm32") { Dialect::Tint } else { Dialect::Naga };
