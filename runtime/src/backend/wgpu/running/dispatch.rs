//! Bindings and dispatches.

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use kyklos_shaders::Kernel;

use super::pipeline::Pipeline;
use super::stopwatch::Stopwatch;
use crate::backend::wgpu::device::Gpu;
use crate::backend::wgpu::numbers::narrow;
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::error::{Error, Result};

/// Part of a buffer as a kernel sees it.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) struct Window<'a> {
    buffer: &'a wgpu::Buffer,
    offset: u64,
    size: u64,
}

/// A resource that is bound to a kernel.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) enum Bound<'a> {
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
    pub(in crate::backend::wgpu) fn skipped_units(&self) -> Result<u32> {
        narrow("a buffer offset", usize::try_from(self.offset / 16).unwrap_or(usize::MAX))
    }
}

/// Workgroups of a dispatch.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu) struct Grid {
    /// In x; a parameter of the kernel.
    pub(in crate::backend::wgpu) width: u32,
    height: u32,
}

impl Gpu {
    /// The pipeline of `kernel`, compiled at its first use.
    pub(in crate::backend::wgpu) fn pipeline(&self, kernel: Kernel) -> Result<Arc<Pipeline>> {
        let mut pipelines = self.pipelines.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = pipelines.get(&kernel) {
            return Ok(pipeline.clone());
        }
        let pipeline = Arc::new(Pipeline::compile(&self.device, kernel));
        self.check()?;
        pipelines.insert(kernel, pipeline.clone());
        Ok(pipeline)
    }

    /// Compiles those of `kernels` that are not compiled, at the same time where there are threads.
    pub(in crate::backend::wgpu) fn compile(&self, kernels: impl Iterator<Item = Kernel>) -> Result<()> {
        let compiled = |kernel: &Kernel| {
            self.pipelines.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(kernel)
        };
        let missing: Vec<Kernel> = kernels.filter(|kernel| !compiled(kernel)).collect();
        #[cfg(not(target_arch = "wasm32"))]
        let new: Vec<Pipeline> = std::thread::scope(|scope| {
            let compile = |kernel: &Kernel| {
                let kernel = *kernel;
                scope.spawn(move || Pipeline::compile(&self.device, kernel))
            };
            let threads: Vec<_> = missing.iter().map(compile).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Pipeline>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        #[cfg(target_arch = "wasm32")]
        let new = missing.iter().map(|kernel| Pipeline::compile(&self.device, *kernel));
        let new: Vec<_> = new.into_iter().map(Arc::new).collect();
        self.check()?;
        let mut pipelines = self.pipelines.0.lock().unwrap_or_else(PoisonError::into_inner);
        pipelines.extend(missing.into_iter().zip(new));
        Ok(())
    }

    /// The bytes `range` of `buffer` as a binding; it may start a little earlier, where the device
    /// wants it aligned.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when they do not fit into one binding.
    pub(in crate::backend::wgpu) fn window<'a>(
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
    pub(in crate::backend::wgpu) fn whole<'a>(
        &self,
        what: &str,
        buffer: &'a WgpuBuffer,
    ) -> Result<Window<'a>> {
        self.window(what, buffer, 0..buffer.bytes as u64)
    }

    /// Bytes that fit a window at any start.
    pub(in crate::backend::wgpu) fn window_bytes(&self) -> u64 {
        self.limits.max_storage_buffer_binding_size
            - u64::from(self.limits.min_storage_buffer_offset_alignment).max(16)
    }

    /// The layout of `groups` workgroups: they are folded if they exceed the limit of one
    /// dimension.
    pub(in crate::backend::wgpu) fn grid(&self, groups: u64) -> Result<Grid> {
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
    pub(in crate::backend::wgpu) fn record(
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

    pub(in crate::backend::wgpu) fn encoder(&self, label: &str) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some(label) })
    }
}
