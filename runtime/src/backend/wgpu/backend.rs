//! An open device, and which attention kernel a call on it gets.

use kyklos_shaders::{AttendKernel, AttendVariant, Pairs};

use super::device::Gpu;
use super::download::Download;
use super::numbers::{checked_dim, storage};
use super::pieces::Pace;
use super::tuning::{self, AdapterKey, ShapeBucket, Tuned, TuningKey};
use super::variant::{MOST_SLOTS, Variants};
use crate::backend::{DeviceInfo, StateShape};
use crate::{Dtype, Error, Result};

/// One device behind wgpu.
#[derive(Debug)]
pub struct WgpuBackend {
    pub(super) info: DeviceInfo,
    pub(super) gpu: Gpu,
    pub(super) variants: Variants,
    pub(super) pace: Pace,
    pub(super) key: AdapterKey,
    pub(super) tuned: Tuned,
}

impl WgpuBackend {
    /// Ends the device and frees its memory, whatever still refers to it: for a program that lives on and wants the
    /// memory for something else, and to see what it makes of a device that is lost. Every later call fails as after a
    /// reset by the driver, and every future that waits for the device ends. What is in flight on it is done first.
    pub fn destroy(&self) {
        self.gpu.destroy();
    }

    /// The attention variant for a state of this shape, and whether it is a tuned choice. Few query rows go through
    /// other kernels, whatever this says.
    ///
    /// # Errors
    /// [`Error::Request`] for a head dim that no kernel has.
    pub fn attend_variant(&self, dtype: Dtype, shape: StateShape) -> Result<(AttendVariant, bool)> {
        Ok(self.chosen(dtype, checked_dim(shape.dim)?, shape))
    }

    /// Every variant that this device may be told to use for such tensors; the first is the built-in choice.
    ///
    /// # Errors
    /// [`Error::Request`] for a head dim that no kernel has.
    pub fn attend_choices(&self, dtype: Dtype, head_dim: usize) -> Result<Vec<AttendVariant>> {
        Ok(self.variants.choices(storage(dtype), checked_dim(head_dim)?))
    }

    /// Under which key a choice for a state of this shape is kept.
    ///
    /// # Errors
    /// [`Error::Request`] for a head dim that no kernel has, and for so few rows that there is nothing to choose.
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

    /// Seconds by the device's own clock from the start of the first compute pass since the last call to the end of
    /// the last one; what lies between them, such as copies, counts. `None` where the device has no such clock, was
    /// opened without [`WgpuOptions::timestamps`], or ran more passes than are kept.
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
            None => (self.variants.built_in(storage(dtype), head_dim), false),
        }
    }

    /// The kernel for a state of this shape, or one for states of every shape.
    pub(super) fn attend_kernel(
        &self,
        dtype: Dtype,
        head_dim: u32,
        shape: Option<StateShape>,
        softcap: bool,
        pairs: Pairs,
    ) -> AttendKernel {
        let chosen = match shape {
            Some(shape) => self.chosen(dtype, head_dim, shape).0,
            None => self.variants.built_in(storage(dtype), head_dim),
        };
        let variant = match chosen {
            // It reads none.
            AttendVariant::Cooperative { .. } if pairs.any() => AttendVariant::portable(head_dim),
            variant => variant,
        };
        AttendKernel { variant, storage: storage(dtype), head_dim, softcap, pairs }
    }
}
