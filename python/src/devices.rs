//! Devices by name, dealt to the ranks of a machine.

use std::sync::OnceLock;

use kyklos::backend::wgpu::WgpuBackend;
use kyklos::backend::{Device, DeviceClass};
use kyklos::{Error, Result};
use kyklos_cuda::{CudaBackend, CudaOptions};
use pyo3::types::{PyAnyMethods, PyDict};
use pyo3::{PyResult, pyfunction};

use crate::torch_device::TorchBackend;

/// Variables that hide some GPUs from a process.
const VISIBLE: [&str; 5] = [
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
];

/// The process that opened the first device.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// The device that a name means for a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    device: Kind,
    /// The GPUs that the ranks of the machine take in turn, where the name leaves that open.
    dealt: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Cpu,
    Wgpu(usize),
    Cuda(usize),
    /// By PyTorch's name.
    Torch(String),
}

impl Chosen {
    /// What `auto`, `cpu`, `wgpu`, `wgpu:N`, `cuda`, `cuda:N`, `torch`, or `torch:` with PyTorch's
    /// name of a device means for the rank number `local_rank` of its machine.
    pub(crate) fn of(name: &str, local_rank: usize) -> Result<Self> {
        let (backend, number) = match name.split_once(':') {
            Some((backend, number)) => (backend, Some(number)),
            None => (name, None),
        };
        let named = |device| Self { device, dealt: None };
        let index = number.map(str::parse::<usize>);
        match (backend, number, index) {
            ("auto", None, _) => Self::auto(local_rank),
            ("cpu", None, _) => Ok(named(Kind::Cpu)),
            ("wgpu", _, Some(Ok(index))) => Ok(named(Kind::Wgpu(index))),
            // Where there is none, opening it says why; so it is with CUDA.
            ("wgpu", None, _) => Ok(Self::dealt(&DeviceClass::best(gpus()), local_rank, Kind::Wgpu)
                .unwrap_or(named(Kind::Wgpu(0)))),
            ("cuda", _, Some(Ok(index))) => Ok(named(Kind::Cuda(index))),
            ("cuda", None, _) => {
                let found = kyklos_cuda::devices().unwrap_or_default();
                let usable: Vec<_> =
                    (0..found.len()).filter(|index| found[*index].refused.is_none()).collect();
                Ok(Self::dealt(&usable, local_rank, Kind::Cuda).unwrap_or(named(Kind::Cuda(0))))
            }
            ("torch", None, _) => {
                Ok(Self::of_torch(local_rank, false)?.unwrap_or(named(Kind::Torch("cpu".to_owned()))))
            }
            ("torch", Some(name), _) => Ok(named(Kind::Torch(name.to_owned()))),
            _ => Err(Error::request(
                format!("device {name:?} is not known"),
                "use \"auto\", \"cpu\", \"wgpu\", \"wgpu:N\", \"cuda\", \"cuda:N\", \"torch\" or \"torch:DEVICE\"",
            )),
        }
    }

    /// PyTorch's accelerator where the program uses PyTorch and a vendor's kernels are there, since
    /// the tensors are on it; else a GPU of the best class; else the cores.
    fn auto(local_rank: usize) -> Result<Self> {
        if let Some(chosen) = Self::of_torch(local_rank, true)? {
            return Ok(chosen);
        }
        let best = DeviceClass::best(gpus());
        let is_hardware = best.first().is_some_and(|index| gpus()[*index] < DeviceClass::Cpu);
        let dealt = Self::dealt(&best, local_rank, Kind::Wgpu).filter(|_| is_hardware);
        Ok(dealt.unwrap_or(Self { device: Kind::Cpu, dealt: None }))
    }

    /// PyTorch's accelerator, if there is one. `auto`: only if PyTorch is loaded, and one that
    /// `device="auto"` takes.
    fn of_torch(local_rank: usize, auto: bool) -> Result<Option<Self>> {
        let ask = |py: pyo3::Python<'_>| -> PyResult<Option<(String, usize)>> {
            let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
            if auto && !modules.contains("torch")? {
                return Ok(None);
            }
            py.import("kyklos._device")?.call_method1("accelerator", (local_rank, auto))?.extract()
        };
        let found = match pyo3::Python::attach(ask) {
            // An old PyTorch, or none that works: the program may use arrays of another library.
            Err(_) if auto => None,
            found => found.map_err(|error| {
                Error::request(
                    format!("PyTorch's devices: {error}"),
                    "install PyTorch, or use another device",
                )
            })?,
        };
        Ok(found.map(|(name, count)| Self { device: Kind::Torch(name), dealt: Some(count) }))
    }

    fn dealt(among: &[usize], local_rank: usize, kind: fn(usize) -> Kind) -> Option<Self> {
        let device = kind(*among.get(local_rank % among.len().max(1))?);
        Some(Self { device, dealt: Some(among.len()) })
    }

    /// What to tell the user of a machine on which `ranks` processes take GPUs in turn, if some
    /// share one.
    pub(crate) fn warning(&self, ranks: usize) -> Option<String> {
        // Each process may see GPUs of its own.
        if VISIBLE.iter().any(|name| std::env::var_os(name).is_some()) {
            return None;
        }
        let gpus = self.dealt.filter(|gpus| *gpus < ranks)?;
        Some(format!(
            "{ranks} ranks of this machine share {gpus} GPU{}, and take turns on it: start one rank for each GPU",
            if gpus == 1 { "" } else { "s" }
        ))
    }

    /// Opens the device.
    pub(crate) fn open(&self) -> Result<Device> {
        // The threads that compute are made once, with the first device, and a child after `fork` has none.
        if *PROCESS.get_or_init(std::process::id) != std::process::id() {
            return Err(Error::request(
                "a group in a process that was forked after its parent had used Kyklos",
                "start processes with the method \"spawn\", or fork before the first group",
            ));
        }
        match &self.device {
            Kind::Cpu => Ok(Device::cpu()),
            Kind::Wgpu(index) => Device::wgpu(*index),
            Kind::Cuda(index) => {
                Ok(CudaBackend::with_options(*index, &CudaOptions::from_environment()?)?.into())
            }
            Kind::Torch(name) => Ok(Device::new(TorchBackend::open(name)?)),
        }
    }
}

/// The names of all devices of this machine but PyTorch's, and why a device cannot be used; where
/// there is no GPU of a kind, its kind and the reason.
#[pyfunction]
pub(crate) fn devices() -> Vec<(String, Option<String>)> {
    let mut all = vec![("cpu".to_owned(), None)];
    all.extend((0..gpus().len()).map(|index| (format!("wgpu:{index}"), None)));
    if gpus().is_empty() {
        let reason = Device::wgpu(0).err().map(|error| error.to_string());
        all.push(("wgpu".to_owned(), reason));
    }
    match kyklos_cuda::devices() {
        Ok(found) => all.extend(found.iter().enumerate().map(|(index, device)| {
            (format!("cuda:{index}"), device.refused.as_ref().map(ToString::to_string))
        })),
        Err(reason) => all.push(("cuda".to_owned(), Some(reason.to_string()))),
    }
    all
}

/// The classes of what wgpu finds. Asked once: loading a driver is slow, and some drivers print.
fn gpus() -> &'static [DeviceClass] {
    static GPUS: OnceLock<Vec<DeviceClass>> = OnceLock::new();
    GPUS.get_or_init(|| WgpuBackend::enumerate().iter().map(|gpu| gpu.class).collect())
}
