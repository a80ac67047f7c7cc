//! Names of devices on the command line.

use std::fmt;
use std::str::FromStr;

use kyklos::Error;
use kyklos::backend::wgpu::KernelChoice;
use kyklos::backend::{Device, DeviceClass};

use super::report::DeviceReport;
use super::table::BackendKind;
use crate::failure::Result;

/// One entry of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceRequest {
    /// The best GPU, or the CPU.
    Auto,
    /// A device of this backend, maybe by its number.
    Of(BackendKind, Option<usize>),
}

/// A device of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DeviceId {
    pub(crate) kind: BackendKind,
    pub(crate) index: usize,
}

impl FromStr for DeviceRequest {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (name, index) = text.split_once(':').map_or((text, None), |(name, index)| (name, Some(index)));
        let number = |index: &str| {
            index.parse().map_err(|_| {
                Error::request(
                    format!("device `{text}` has no number after the colon"),
                    "write it like wgpu:0; kyklos devices lists the numbers",
                )
            })
        };
        match (BackendKind::named(name), index) {
            (None, None) if name == "auto" => Ok(Self::Auto),
            (Some(kind), None) => Ok(Self::Of(kind, None)),
            (Some(kind), Some(index)) if kind.is_numbered() => Ok(Self::Of(kind, Some(number(index)?))),
            _ => Err(Error::request(
                format!("device `{text}` is not known"),
                format!("use {}, joined by commas", names()),
            )),
        }
    }
}

impl fmt::Display for DeviceRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Of(kind, None) => kind.fmt(f),
            Self::Of(kind, Some(index)) => write!(f, "{kind}:{index}"),
        }
    }
}

/// All names: `auto, cpu, wgpu, wgpu:0, cuda or cuda:0`.
pub(crate) fn names() -> String {
    let mut names = vec!["auto".to_owned()];
    for kind in BackendKind::ALL {
        names.push(kind.to_string());
        if kind.is_numbered() {
            names.push(format!("{kind}:0"));
        }
    }
    let last = names.pop().unwrap_or_default();
    format!("{} or {last}", names.join(", "))
}

impl DeviceId {
    /// The cores of this machine.
    pub(crate) const CPU: Self = Self { kind: BackendKind::Cpu, index: 0 };

    /// Opens the device with its usual kernel.
    pub(crate) fn open(self) -> Result<Device> {
        self.open_with(KernelChoice::Auto)
    }

    /// Opens the device, with `kernel` where its backend has several.
    pub(crate) fn open_with(self, kernel: KernelChoice) -> Result<Device> {
        self.kind.open(self.index, kernel)
    }

    /// What the driver says of the device, which is not opened.
    pub(crate) fn describe(self) -> DeviceReport {
        self.kind.devices().get(self.index).map(DeviceReport::new).unwrap_or_default()
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind.is_numbered() {
            false => self.kind.fmt(f),
            true => write!(f, "{}:{}", self.kind, self.index),
        }
    }
}

/// The device for the rank number `local_rank` of this process or machine: the entry of that
/// number, else the last one. Asks drivers only where a GPU may be meant.
pub(crate) fn choose(requests: &[DeviceRequest], local_rank: usize) -> Result<DeviceId> {
    let request = requests.get(local_rank).or(requests.last()).copied().unwrap_or(DeviceRequest::Auto);
    match request {
        DeviceRequest::Of(kind, index) => Ok(DeviceId { kind, index: kind.choose(index, local_rank)? }),
        DeviceRequest::Auto => {
            let (hardware, classes): (Vec<_>, Vec<_>) = for_auto().into_iter().unzip();
            let best = DeviceClass::best(&classes);
            Ok(if best.is_empty() { DeviceId::CPU } else { hardware[best[local_rank % best.len()]] })
        }
    }
}

/// Every device of this machine, GPUs first.
pub(crate) fn all() -> Vec<DeviceId> {
    let of = |kind: BackendKind| (0..kind.devices().len()).map(move |index| DeviceId { kind, index });
    BackendKind::ALL.iter().rev().copied().flat_map(of).collect()
}

/// What the list of [`all`] lacks, and why, where drivers tell.
pub(crate) fn left_out() -> Vec<String> {
    BackendKind::ALL.iter().filter_map(|kind| kind.left_out()).collect()
}

fn for_auto() -> Vec<(DeviceId, DeviceClass)> {
    let of = |&kind: &BackendKind| {
        kind.for_auto().into_iter().map(move |(index, class)| (DeviceId { kind, index }, class))
    };
    BackendKind::ALL.iter().flat_map(of).collect()
}
