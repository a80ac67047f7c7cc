//! Devices by name.

use std::sync::OnceLock;

use kyklos::backend::Device;
use kyklos::{Error, Result};
use kyklos_cuda::{CudaBackend, CudaOptions};

use crate::torch_device::TorchBackend;

/// The process that opened the first device.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Opens `auto`, `cpu`, `wgpu`, `wgpu:N`, `cuda`, `cuda:N`, `torch`, or `torch:` with PyTorch's
/// name of a device.
pub(crate) fn open(name: &str) -> Result<Device> {
    // The threads that compute are made once, with the first device, and a child after `fork` has none.
    if *PROCESS.get_or_init(std::process::id) != std::process::id() {
        return Err(Error::request(
            "a group in a process that was forked after its parent had used Kyklos",
            "start processes with the method \"spawn\", or fork before the first group",
        ));
    }
    let (backend, number) = match name.split_once(':') {
        Some((backend, number)) => (backend, Some(number)),
        None => (name, None),
    };
    let index = number.map_or(Some(0), |number| number.parse::<usize>().ok());
    match (backend, number, index) {
        ("auto", None, _) => Device::best(),
        ("cpu", None, _) => Ok(Device::cpu()),
        ("wgpu", _, Some(index)) => Device::wgpu(index),
        ("torch", name, _) => Ok(Device::new(TorchBackend::open(name.unwrap_or_default())?)),
        ("cuda", _, Some(index)) => {
            Ok(CudaBackend::with_options(index, &CudaOptions::from_environment()?)?.into())
        }
        _ => Err(Error::request(
            format!("device {name:?} is not known"),
            "use \"auto\", \"cpu\", \"wgpu\", \"wgpu:N\", \"cuda\", \"cuda:N\", \"torch\" or \"torch:DEVICE\"",
        )),
    }
}
