//! Devices: what was asked for, what there is, and the one enum over backends.

pub(crate) mod driver;
mod report;
pub(crate) mod tuned;

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::wgpu::{KernelChoice, WgpuBackend, WgpuOptions};
use kyklos::backend::{DeviceClass, DeviceInfo};
use kyklos::local::RankTask;
use kyklos::{Error, Finished, Lasting, RankOutput, Survivors};
use kyklos_cuda::{CudaBackend, CudaDevice, CudaOptions, Unavailable};

pub(crate) use self::report::Device;
use crate::failure::{Failure, Result};
use crate::switches;

/// One entry of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceRequest {
    Auto,
    Cpu,
    Wgpu(Option<usize>),
    Cuda(Option<usize>),
}

impl FromStr for DeviceRequest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (kind, index) = text.split_once(':').map_or((text, None), |(kind, index)| (kind, Some(index)));
        let number = |index: &str| {
            index.parse().map_err(|_| {
                Error::request(
                    format!("device `{text}` has no number after the colon"),
                    "write it like wgpu:0; kyklos devices lists the numbers",
                )
            })
        };
        match (kind, index) {
            ("auto", None) => Ok(Self::Auto),
            ("cpu", None) => Ok(Self::Cpu),
            ("wgpu", index) => index.map(number).transpose().map(Self::Wgpu),
            ("cuda", index) => index.map(number).transpose().map(Self::Cuda),
            _ => Err(Error::request(
                format!("device `{text}` is not known"),
                "use auto, cpu, wgpu, wgpu:0, cuda or cuda:0, joined by commas",
            )),
        }
    }
}

impl fmt::Display for DeviceRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Wgpu(None) => f.write_str("wgpu"),
            Self::Wgpu(Some(index)) => write!(f, "wgpu:{index}"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(index)) => write!(f, "cuda:{index}"),
        }
    }
}

/// A device of this machine that can be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum DeviceId {
    Cpu,
    Wgpu(usize),
    Cuda(usize),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Wgpu(index) => write!(f, "wgpu:{index}"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// Resolves `--device` for the rank with this place in its process or on its host. Asks drivers only where a GPU may be meant.
/// `auto` never means CUDA, which has not run on a GPU yet.
pub(crate) fn choose(requests: &[DeviceRequest], place: usize) -> Result<DeviceId> {
    let request = requests.get(place).or(requests.last()).copied().unwrap_or(DeviceRequest::Auto);
    match request {
        DeviceRequest::Cpu => Ok(DeviceId::Cpu),
        DeviceRequest::Auto => {
            let hardware = hardware_gpus();
            // Several GPUs of the best class share the ranks.
            let best = hardware.iter().map(|(_, class)| *class).min();
            let peers: Vec<usize> =
                hardware.iter().filter(|(_, class)| Some(*class) == best).map(|(index, _)| *index).collect();
            Ok(if peers.is_empty() { DeviceId::Cpu } else { DeviceId::Wgpu(peers[place % peers.len()]) })
        }
        DeviceRequest::Wgpu(None) => {
            let best =
                adapters().iter().enumerate().min_by_key(|(_, info)| info.class).ok_or_else(no_driver)?;
            Ok(DeviceId::Wgpu(best.0))
        }
        DeviceRequest::Wgpu(Some(index)) => {
            let found = adapters().len();
            if found == 0 {
                return Err(no_driver());
            }
            if index >= found {
                return Err(Failure::run(format!(
                    "device wgpu:{index} does not exist, this machine has {found}: use a number below {found}; \
                     kyklos devices lists them"
                )));
            }
            Ok(DeviceId::Wgpu(index))
        }
        DeviceRequest::Cuda(index) => {
            let devices = cuda_devices().map_err(|why| {
                Failure::run(format!("no device for cuda: {why}, or use --device wgpu or cpu"))
            })?;
            if let Some(index) = index {
                if index >= devices.len() {
                    return Err(Failure::run(format!(
                        "device cuda:{index} does not exist, this machine has {found}: use a number below {found}; \
                         kyklos devices lists them",
                        found = devices.len()
                    )));
                }
                return Ok(DeviceId::Cuda(index));
            }
            // Those that can be used share the ranks; where none can, opening one says why.
            let usable: Vec<usize> =
                (0..devices.len()).filter(|index| devices[*index].refused.is_none()).collect();
            Ok(DeviceId::Cuda(if usable.is_empty() { 0 } else { usable[place % usable.len()] }))
        }
    }
}

/// Indices and classes of the adapters that are not software.
pub(crate) fn hardware_gpus() -> Vec<(usize, DeviceClass)> {
    adapters()
        .iter()
        .enumerate()
        .filter(|(_, info)| info.class < DeviceClass::Cpu)
        .map(|(index, info)| (index, info.class))
        .collect()
}

/// Everything that can be opened here, GPUs first.
pub(crate) fn all() -> Vec<DeviceId> {
    let cuda = cuda_devices().map_or(0, <[CudaDevice]>::len);
    (0..cuda)
        .map(DeviceId::Cuda)
        .chain((0..adapters().len()).map(DeviceId::Wgpu))
        .chain([DeviceId::Cpu])
        .collect()
}

/// Whether there is a device that `wgpu` could mean.
pub(crate) fn has_wgpu() -> bool {
    !adapters().is_empty()
}

/// What the drivers of this machine offer. Asked once: loading a driver takes long, and some of them talk.
fn adapters() -> &'static [DeviceInfo] {
    static ADAPTERS: OnceLock<Vec<DeviceInfo>> = OnceLock::new();
    ADAPTERS.get_or_init(WgpuBackend::enumerate)
}

/// What CUDA's driver offers, or why it offers nothing. Asked once.
fn cuda_devices() -> Result<&'static [CudaDevice], &'static Unavailable> {
    static DEVICES: OnceLock<Result<Vec<CudaDevice>, Unavailable>> = OnceLock::new();
    DEVICES.get_or_init(kyklos_cuda::devices).as_deref()
}

fn no_driver() -> Failure {
    Failure::run(
        "no device for wgpu: no Vulkan, Metal or DX12 driver was found: install the GPU's driver, or use --device cpu",
    )
}

/// The one place where a backend is chosen at run time.
#[derive(Debug)]
pub(crate) enum AnyBackend {
    Cpu(CpuBackend),
    Wgpu(Box<WgpuBackend>),
    Cuda(Box<CudaBackend>),
}

impl AnyBackend {
    pub(crate) fn open(device: DeviceId) -> Result<Self> {
        Self::open_with(device, KernelChoice::Auto)
    }

    /// With this kernel, where it is a device that has several.
    pub(crate) fn open_with(device: DeviceId, kernel: KernelChoice) -> Result<Self> {
        Ok(match device {
            DeviceId::Cpu => Self::Cpu(CpuBackend::new()),
            DeviceId::Wgpu(index) => {
                // Who names one variant gets that one.
                let exactly = matches!(kernel, KernelChoice::Exactly(_));
                let tuned = if exactly { None } else { tuned::for_runs()? };
                let options = WgpuOptions { kernel, tuned, ..WgpuOptions::default() };
                Self::Wgpu(Box::new(WgpuBackend::with_options(index, &options)?))
            }
            DeviceId::Cuda(index) => {
                let graphs = !switches::CUDA_GRAPHS.is_off()?;
                let options = CudaOptions { cache: tuned::cache_folder(), graphs, ..CudaOptions::default() };
                Self::Cuda(Box::new(CudaBackend::with_options(index, &options)?))
            }
        })
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        use kyklos::backend::Backend;
        match self {
            Self::Cpu(backend) => backend.info(),
            Self::Wgpu(backend) => backend.info(),
            Self::Cuda(backend) => backend.info(),
        }
    }

    /// A rank's task on this device, which may outlive its group.
    pub(crate) fn resumable<'a>(&'a self, task: RankTask<'a>) -> AnyResumable<'a> {
        match self {
            Self::Cpu(backend) => AnyResumable::Cpu(Box::new(Lasting::new(backend, task))),
            Self::Wgpu(backend) => AnyResumable::Wgpu(Box::new(Lasting::new(&**backend, task))),
            Self::Cuda(backend) => AnyResumable::Cuda(Box::new(Lasting::new(&**backend, task))),
        }
    }

    /// Runs a rank's plan on this device, on this thread.
    pub(crate) fn run(&self, task: RankTask<'_>, each: impl FnMut(u64, RankOutput)) -> Result<(), Error> {
        match self {
            Self::Cpu(backend) => task.run_on(backend, each),
            Self::Wgpu(backend) => task.run_on(&**backend, each),
            Self::Cuda(backend) => task.run_on(&**backend, each),
        }
    }
}

/// A rank's task on one of them, with what it has there.
#[derive(Debug)]
pub(crate) enum AnyResumable<'a> {
    Cpu(Box<Lasting<'a, CpuBackend>>),
    Wgpu(Box<Lasting<'a, WgpuBackend>>),
    Cuda(Box<Lasting<'a, CudaBackend>>),
}

impl AnyResumable<'_> {
    /// Runs the rank's plan, on this thread; if it `keeps` what is done, [`Self::finish`] may go on from there.
    pub(crate) fn run(&mut self, keeps: bool, each: impl FnMut(u64, RankOutput)) -> Result<(), Error> {
        match self {
            Self::Cpu(rank) => pollster::block_on(rank.run(keeps, each)),
            Self::Wgpu(rank) => pollster::block_on(rank.run(keeps, each)),
            Self::Cuda(rank) => pollster::block_on(rank.run(keeps, each)),
        }
    }

    /// Finishes it with those who are left.
    pub(crate) fn finish(&mut self, survivors: &Survivors) -> Result<Finished, Error> {
        match self {
            Self::Cpu(rank) => pollster::block_on(rank.finish(survivors)),
            Self::Wgpu(rank) => pollster::block_on(rank.finish(survivors)),
            Self::Cuda(rank) => pollster::block_on(rank.finish(survivors)),
        }
    }
}

/// What is known of a device that could not be opened.
pub(crate) fn info_of(device: DeviceId) -> Device {
    match device {
        DeviceId::Cpu => Device::default(),
        DeviceId::Wgpu(index) => adapters().get(index).map(Device::new).unwrap_or_default(),
        DeviceId::Cuda(index) => {
            let device = cuda_devices().ok().and_then(|devices| devices.get(index));
            device.map(|device| Device::new(&device.info)).unwrap_or_default()
        }
    }
}
