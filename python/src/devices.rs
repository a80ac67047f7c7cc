//! Devices by name.

use kyklos::backend::Device;
use kyklos::{Error, Result};
use kyklos_cuda::CudaBackend;

/// Opens `auto`, `cpu`, `wgpu`, `wgpu:N`, `cuda` or `cuda:N`.
pub(crate) fn open(name: &str) -> Result<Device> {
    let (backend, number) = match name.split_once(':') {
        Some((backend, number)) => (backend, Some(number)),
        None => (name, None),
    };
    let index = number.map_or(Some(0), |number| number.parse::<usize>().ok());
    match (backend, number, index) {
        ("auto", None, _) => Device::best(),
        ("cpu", None, _) => Ok(Device::cpu()),
        ("wgpu", _, Some(index)) => Device::wgpu(index),
        ("cuda", _, Some(index)) => Ok(Device::new(CudaBackend::with_options(index, &Default::default())?)),
        _ => Err(Error::request(
            format!("device {name:?} is not known"),
            "use \"auto\", \"cpu\", \"wgpu\", \"wgpu:N\", \"cuda\" or \"cuda:N\"",
        )),
    }
}
