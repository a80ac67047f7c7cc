//! NVIDIA GPUs through CUDA. `--device auto` does not choose them: the backend has not run on a GPU
//! yet.

use std::sync::OnceLock;

use kyklos::backend::wgpu::KernelChoice;
use kyklos::backend::{Device, DeviceInfo};
use kyklos_cuda::{CudaBackend, CudaDevice, CudaOptions, Unavailable};

use super::backend::{BackendEntry, existing};
use crate::failure::{Failure, Result};

#[derive(Debug)]
pub(crate) struct Cuda;

impl BackendEntry for Cuda {
    const NAME: &'static str = "cuda";

    fn devices() -> Vec<DeviceInfo> {
        let devices = found().unwrap_or_default();
        devices.iter().map(|device| device.info.clone()).collect()
    }

    fn left_out() -> Option<String> {
        found().err().map(|why| format!("no device of cuda: {why}"))
    }

    /// Without a number: the usable devices share the ranks.
    fn choose(index: Option<usize>, local_rank: usize) -> Result<usize> {
        let devices = found().map_err(|why| {
            Failure::refused_here(format!("no device for cuda: {why}, or use --device wgpu or cpu"))
        })?;
        if let Some(index) = index {
            return existing(Self::NAME, index, devices.len());
        }
        // Where no device is usable, opening one says why.
        let usable: Vec<usize> =
            (0..devices.len()).filter(|index| devices[*index].refused.is_none()).collect();
        Ok(if usable.is_empty() { 0 } else { usable[local_rank % usable.len()] })
    }

    fn open(index: usize, _: KernelChoice) -> Result<Device> {
        Ok(CudaBackend::with_options(index, &CudaOptions::from_environment()?)?.into())
    }
}

/// What CUDA's driver offers, or why it offers nothing. Asked once.
fn found() -> Result<&'static [CudaDevice], &'static Unavailable> {
    static DEVICES: OnceLock<Result<Vec<CudaDevice>, Unavailable>> = OnceLock::new();
    DEVICES.get_or_init(kyklos_cuda::devices).as_deref()
}
