//! GPUs through Vulkan, Metal and DX12, and software drivers of these.

use std::sync::OnceLock;

use kyklos::backend::wgpu::{KernelChoice, WgpuBackend, WgpuOptions};
use kyklos::backend::{Device, DeviceClass, DeviceInfo};
use kyklos::machine::can_load_drivers;

use super::backend::{BackendEntry, existing};
use super::tuned;
use crate::failure::{Failure, Result};
use crate::switches;

#[derive(Debug)]
pub(crate) struct Wgpu;

impl BackendEntry for Wgpu {
    const NAME: &'static str = "wgpu";
    const HAS_KERNELS: bool = true;

    fn devices() -> Vec<DeviceInfo> {
        adapters().to_vec()
    }

    fn left_out() -> Option<String> {
        WgpuBackend::left_out()
    }

    /// Without a number: the devices of the best class share the ranks.
    fn choose(index: Option<usize>, local_rank: usize) -> Result<usize> {
        let adapters = adapters();
        if adapters.is_empty() {
            return Err(Failure::refused_here(match WgpuBackend::left_out() {
                Some(left_out) => format!("no device for wgpu: {left_out}"),
                None if can_load_drivers() => "no device for wgpu: no Vulkan, Metal or DX12 driver was found: \
                                               install the GPU's driver, or use --device cpu"
                    .to_owned(),
                None => "no device for wgpu: this program is static (musl), and a static program loads no driver: \
                         use a build for glibc, or --device cpu"
                    .to_owned(),
            }));
        }
        let best = DeviceClass::best(&adapters.iter().map(|info| info.class).collect::<Vec<_>>());
        let dealt = best[local_rank % best.len()];
        index.map_or(Ok(dealt), |index| existing(Self::NAME, index, adapters.len()))
    }

    fn for_auto() -> Vec<(usize, DeviceClass)> {
        let classes = adapters().iter().map(|info| info.class).enumerate();
        classes.filter(|(_, class)| *class < DeviceClass::Cpu).collect()
    }

    fn open(index: usize, kernel: KernelChoice) -> Result<Device> {
        // A variant that is named is used as it is.
        let exactly = matches!(kernel, KernelChoice::Exactly(_));
        let tuned = if exactly { None } else { tuned::for_runs()? };
        let mut options = WgpuOptions { kernel, tuned, ..WgpuOptions::default() };
        options.compare = !switches::TUNE.is_off()?;
        Ok(WgpuBackend::with_options(index, &options)?.into())
    }
}

/// What the drivers of this machine offer. Asked once: loading a driver is slow, and some drivers
/// print.
fn adapters() -> &'static [DeviceInfo] {
    static ADAPTERS: OnceLock<Vec<DeviceInfo>> = OnceLock::new();
    ADAPTERS.get_or_init(WgpuBackend::enumerate)
}
