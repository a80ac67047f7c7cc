//! An open device, and which attention kernel a call on it gets.

use kyklos_shaders::{AttendKernel, AttendVariant, BackwardVariant, BiasInput, Storage};

use super::device::Gpu;
use super::numbers::{checked_dim, storage};
#[cfg(not(target_arch = "wasm32"))]
use super::probe::{Candidates, Pass, Probe, Prober};
use super::tuning::{self, AdapterKey, ShapeBucket, Tuned, TuningKey};
use super::variant::{MOST_SLOTS, Variants};
use crate::backend::wgpu::running::pieces::Pace;
use crate::backend::wgpu::storage::download::Download;
use crate::backend::{DeviceInfo, StateShape};
use crate::error::{Error, Result};
use kyklos_plan::Dtype;

/// An open device.
#[derive(Debug)]
pub struct WgpuBackend {
    pub(super) info: DeviceInfo,
    pub(super) gpu: Gpu,
    pub(super) variants: Variants,
    pub(super) pace: Pace,
    pub(super) key: AdapterKey,
    pub(super) tuned: Tuned,
    /// `None` on a caller's device.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) prober: Option<Prober>,
}

impl WgpuBackend {
    /// Ends the device and frees its memory, even if buffers still refer to it: for a program that
    /// needs the memory for something else, and for tests of a lost device. Work in flight is
    /// done first. Every later call fails as after a reset by the driver, and every future that
    /// waits for the device ends.
    pub fn destroy(&self) {
        self.gpu.destroy();
    }

    /// Bytes that one buffer may have.
    pub fn largest_buffer_bytes(&self) -> u64 {
        self.gpu.limits.max_buffer_size
    }

    /// Buffers for results and intermediate results that this device has made so far. A call does
    /// not make one if an earlier call has left a buffer of the same size.
    pub fn buffers_made(&self) -> u64 {
        self.gpu.storage.made_so_far()
    }

    /// The attention variant for a state of this shape, and whether a tuning table chose it. Calls
    /// with few query rows use the decoding kernels instead.
    ///
    /// # Errors
    /// [`Error::Request`] for a head dim that no kernel has.
    pub fn attend_variant(&self, dtype: Dtype, shape: StateShape) -> Result<(AttendVariant, bool)> {
        Ok(self.chosen(dtype, checked_dim(shape.dim)?, shape))
    }

    /// Every variant that can be chosen on this device for such tensors; the first is the built-in
    /// choice.
    ///
    /// # Errors
    /// [`Error::Request`] for a head dim that no kernel has.
    pub fn attend_choices(&self, dtype: Dtype, head_dim: usize) -> Result<Vec<AttendVariant>> {
        Ok(self.variants.choices(storage(dtype), checked_dim(head_dim)?))
    }

    /// The key in a [`TuningTable`](super::TuningTable) of the choice for a state of this shape.
    ///
    /// # Errors
    /// [`Error::Request`] for a head dim that no kernel has, and for a number of rows so small that
    /// there is nothing to choose.
    pub fn tuning_key(&self, dtype: Dtype, shape: StateShape) -> Result<TuningKey> {
        let head_dim = checked_dim(shape.dim)?;
        let bucket = ShapeBucket::of(shape).ok_or_else(|| {
            Error::request(
                format!("{} query rows have no kernels to choose from", shape.rows),
                format!("use more than {}", MOST_SLOTS),
            )
        })?;
        Ok(TuningKey {
            adapter: self.key.clone(),
            kernel: self.variants.choice_name(),
            dtype: dtype.name().to_owned(),
            head_dim,
            bucket,
            sources: tuning::sources(self.variants, storage(dtype), head_dim),
        })
    }

    /// Seconds by the device's own clock from the start of the first compute pass since the last
    /// call of this method to the end of the last pass, with everything between them, such as
    /// copies. `None` where the device has no such clock, was opened without
    /// [`WgpuOptions::timestamps`](super::WgpuOptions::timestamps), or ran no pass or more than
    /// 2048.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub async fn device_seconds(&self) -> Result<Option<f64>> {
        self.gpu.check()?;
        let Some((stopwatch, passes)) =
            self.gpu.stopwatch.as_ref().and_then(|stopwatch| Some((stopwatch, stopwatch.take_passes()?)))
        else {
            return Ok(None);
        };
        let bytes = stopwatch.bytes(passes);
        let times = self.gpu.query_results("times", bytes)?;
        let mut encoder = self.gpu.encoder("read times");
        stopwatch.resolve(passes, &mut encoder, &times.raw);
        let _ = self.gpu.submit(Some(encoder.finish()));
        let ticks = Download::start(&self.gpu, &times, 0..bytes).await?;
        Ok(stopwatch.seconds(&bytemuck::pod_collect_to_vec::<u8, u64>(&ticks)))
    }

    fn chosen(&self, dtype: Dtype, head_dim: u32, shape: StateShape) -> (AttendVariant, bool) {
        match self.tuned.get(dtype, head_dim, shape) {
            Some(variant) => (variant, true),
            None => (self.faster(storage(dtype), head_dim, shape), false),
        }
    }

    /// The built-in choice, or what a comparison on the device says, where its kernels are compared
    /// and the call is not a small one.
    #[cfg(not(target_arch = "wasm32"))]
    fn faster(&self, storage: Storage, head_dim: u32, shape: StateShape) -> AttendVariant {
        let built_in = self.variants.built_in(storage, head_dim);
        match (&self.prober, self.variants.compared(storage, head_dim)) {
            (Some(prober), Some(matrices)) if ShapeBucket::of(shape) >= Some(LEAST_COMPARED) => {
                let candidates = Candidates { pass: Pass::Forward([built_in, matrices]), head_dim };
                if prober.takes_matrices(&self.key, candidates) { matrices } else { built_in }
            }
            _ => built_in,
        }
    }

    #[cfg(target_arch = "wasm32")]
    fn faster(&self, storage: Storage, head_dim: u32, _: StateShape) -> AttendVariant {
        self.variants.built_in(storage, head_dim)
    }

    /// Compares the kernel for matrix units with the portable one on this device, for heads of
    /// `head_dim` elements of f16, as [`KernelChoice::Auto`](super::KernelChoice::Auto) does when
    /// it first meets such heads. Keeps nothing. `None` where the device has no matrix units,
    /// or was opened without them, and where they do not fit such heads.
    ///
    /// # Errors
    /// [`Error::Request`] for a head dim that no kernel has, [`Error::Device`] and
    /// [`Error::OutOfMemory`] of a device on which the comparison runs.
    ///
    /// ```
    /// use kyklos::backend::wgpu::WgpuBackend;
    ///
    /// if !WgpuBackend::enumerate().is_empty() {
    ///     match WgpuBackend::new(0)?.probe(128)? {
    ///         Some(probe) => println!("{:.1} times as fast", probe.portable_s / probe.matrices_s),
    ///         None => println!("no matrix units"),
    ///     }
    /// }
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    #[cfg(not(target_arch = "wasm32"))]
    pub fn probe(&self, head_dim: usize) -> Result<Option<Probe>> {
        let head_dim = checked_dim(head_dim)?;
        let Some(matrices) = self.variants.matrices(Storage::F16, head_dim) else { return Ok(None) };
        self.measured(Pass::Forward([self.variants.portable(head_dim), matrices]), head_dim)
    }

    /// The same with the kernels for gradients.
    ///
    /// # Errors
    /// As [`Self::probe`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn probe_backward(&self, head_dim: usize) -> Result<Option<Probe>> {
        let head_dim = checked_dim(head_dim)?;
        let Some(matrices) = self.variants.backward_matrices(Storage::F16, head_dim) else { return Ok(None) };
        let portable = self.variants.backward_without_matrices(head_dim);
        self.measured(Pass::Gradients([portable, matrices]), head_dim)
    }

    #[cfg(not(target_arch = "wasm32"))]
    fn measured(&self, pass: Pass, head_dim: u32) -> Result<Option<Probe>> {
        self.prober.as_ref().map(|prober| prober.measure(Candidates { pass, head_dim })).transpose()
    }

    /// The kernel for a state of this shape; without a shape, one whose choice does not depend on
    /// it.
    pub(super) fn attend_kernel(
        &self,
        dtype: Dtype,
        head_dim: u32,
        shape: Option<StateShape>,
        softcap: bool,
        bias: BiasInput,
    ) -> AttendKernel {
        let built_in = || self.variants.built_in(storage(dtype), head_dim);
        let chosen = match shape {
            Some(shape) if bias.any() => self.tuned.get(dtype, head_dim, shape).unwrap_or_else(built_in),
            Some(shape) => self.chosen(dtype, head_dim, shape).0,
            None => built_in(),
        };
        let variant = match chosen {
            // The matrix variant reads no mask or bias tensor.
            AttendVariant::Cooperative(_) if bias.any() => self.variants.portable(head_dim),
            variant => variant,
        };
        AttendKernel { variant, storage: storage(dtype), head_dim, softcap, bias }
    }

    /// The kernels for gradients of rows of this shape.
    pub(super) fn backward_variant(
        &self,
        dtype: Dtype,
        head_dim: u32,
        shape: StateShape,
        bias: BiasInput,
    ) -> BackwardVariant {
        if bias.any() {
            // The matrix variant reads no mask or bias tensor.
            return self.variants.backward_without_matrices(head_dim);
        }
        self.faster_backward(storage(dtype), head_dim, shape)
    }

    /// As [`Self::faster`].
    #[cfg(not(target_arch = "wasm32"))]
    fn faster_backward(&self, storage: Storage, head_dim: u32, shape: StateShape) -> BackwardVariant {
        let built_in = self.variants.backward(storage, head_dim);
        match (&self.prober, self.variants.backward_compared(storage, head_dim)) {
            (Some(prober), Some(matrices)) if ShapeBucket::of(shape) >= Some(LEAST_COMPARED) => {
                let candidates = Candidates { pass: Pass::Gradients([built_in, matrices]), head_dim };
                if prober.takes_matrices(&self.key, candidates) { matrices } else { built_in }
            }
            _ => built_in,
        }
    }

    #[cfg(target_arch = "wasm32")]
    fn faster_backward(&self, storage: Storage, head_dim: u32, _: StateShape) -> BackwardVariant {
        self.variants.backward(storage, head_dim)
    }
}

/// Calls with fewer rows, counted over heads and batch, are not worth the wait for a comparison:
/// 1024.
#[cfg(not(target_arch = "wasm32"))]
const LEAST_COMPARED: ShapeBucket = ShapeBucket { row_heads_log4: 5 };
