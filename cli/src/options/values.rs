//! Values of options: parsing, and refusals of wrong values.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use kyklos::backend::wgpu::KernelChoice;
use kyklos::{Error, Strategy};
use kyklos_transport::Regroup;

use crate::devices::DeviceRequest;

/// The value of `--split`: shares of tokens, or of work.
#[derive(Clone, Debug)]
pub(crate) enum SplitName {
    /// By the speed of the devices, where they differ.
    Auto,
    /// Also where the devices differ.
    Even,
    Tokens(List<f64>),
    Work(List<f64>),
}

impl FromStr for SplitName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.strip_prefix("work:") {
            Some(weights) => weights.parse().map(Self::Work),
            None if text == "auto" => Ok(Self::Auto),
            None if text == "even" => Ok(Self::Even),
            None => text.parse().map(Self::Tokens),
        }
    }
}

/// A range of tokens, such as `0..512`; the end is exclusive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TokenRange(pub(crate) Range<u32>);

impl FromStr for TokenRange {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let range = text.split_once("..").and_then(|(a, b)| Some(a.parse().ok()?..b.parse().ok()?));
        range.filter(|range: &Range<u32>| range.start <= range.end).map(Self).ok_or_else(|| {
            Error::request(
                format!("`{text}` is not a range of tokens"),
                "write it like 0..512: from 0 up to 511",
            )
        })
    }
}

impl fmt::Display for TokenRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.0.start, self.0.end)
    }
}

/// An entry of `--kernel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelName(pub(crate) KernelChoice);

impl ListItem for KernelName {
    fn item(text: &str) -> Result<Self, Error> {
        Ok(Self(match text {
            "auto" => KernelChoice::Auto,
            "portable" => KernelChoice::Portable,
            "subgroup" => KernelChoice::SubgroupBroadcast,
            "cooperative" => KernelChoice::Cooperative,
            _ => KernelChoice::Exactly(text.parse().map_err(|_| {
                Error::request(
                    format!("kernel `{text}` is not known"),
                    "use auto, portable, subgroup or cooperative, or one that kyklos tune lists, joined by commas",
                )
            })?),
        }))
    }
}

impl fmt::Display for KernelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            KernelChoice::Auto => "auto",
            KernelChoice::Portable => "portable",
            KernelChoice::SubgroupBroadcast => "subgroup",
            KernelChoice::Cooperative => "cooperative",
            KernelChoice::Exactly(variant) => return f.write_str(&variant.name()),
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum TransportName {
    /// Channels inside this process
    InProcess,
    /// QUIC with mutual authentication; between ranks of one process over loopback sockets
    Quic,
}

impl TransportName {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::InProcess => "in-process",
            Self::Quic => "quic",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CollectiveName {
    /// Through host memory and the transport, from and to any device
    Host,
    /// By NCCL, from device memory to device memory; every rank needs a CUDA device of its own.
    /// Never tried on a GPU
    Nccl,
    /// By NCCL between the ranks that can use it; where no rank can, by copies between the CUDA
    /// devices of one process; otherwise through host memory. Rank 0 says which, and why
    Auto,
}

impl CollectiveName {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Nccl => "nccl",
            Self::Auto => "auto",
        }
    }
}

/// A number of bytes: 4096, 512KiB, 64MiB, 2GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ByteSize(pub(crate) u64);

impl FromStr for ByteSize {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let units = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
        let unit = units.iter().find_map(|&(name, bytes)| Some((text.strip_suffix(name)?, bytes)));
        let (number, bytes) = unit.unwrap_or((text, 1));
        number.parse().ok().and_then(|number: u64| number.checked_mul(bytes)).map(Self).ok_or_else(|| {
            Error::request(
                format!("`{text}` is not a number of bytes"),
                "write a whole number, alone or before KiB, MiB or GiB, such as 64MiB",
            )
        })
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProgressKind {
    Auto,
    Json,
    None,
}

/// The value of `--on-loss`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLoss {
    /// Every rank ends with an error that names the failed rank
    Stop,
    /// The survivors make a new plan for their number and start the call again
    Shrink,
    /// As shrink, but a replacement that `kyklos launch` starts (attend --rejoin) joins first, if
    /// it comes within half of --join-deadline
    Rejoin,
}

impl OnLoss {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Shrink => "shrink",
            Self::Rejoin => "rejoin",
        }
    }

    /// The group that begins the call after a loss, within `patience`; `None` if no call begins
    /// then.
    pub(crate) fn next_group(self, patience: Duration) -> Option<Regroup> {
        match self {
            Self::Stop => None,
            Self::Rejoin => Some(Regroup::Everyone { within: patience / 2 }),
            Self::Shrink => Some(Regroup::Survivors),
        }
    }
}

/// A value, or `auto`: the program chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OrAuto<T> {
    Auto,
    Is(T),
}

impl<T: FromStr> FromStr for OrAuto<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        text.parse().map(Self::Is)
    }
}

impl<T> OrAuto<T> {
    pub(crate) fn chosen(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Is(value) => Some(value),
        }
    }
}

/// A strategy of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StrategyName(pub(crate) Strategy);

impl FromStr for StrategyName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        text.parse().map(Self).map_err(|_| {
            let names = Strategy::names();
            Error::request(format!("strategy `{text}` is not known"), format!("use one of {names} or auto"))
        })
    }
}

/// `B,S,HQ,HKV,D`: batch, tokens, query heads, KV heads, head dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape(pub(crate) [u32; 5]);

impl FromStr for Shape {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let List(numbers) = text.parse::<List<u32>>()?;
        let count = numbers.len();
        numbers.try_into().map(Self).map_err(|_| {
            Error::request(
                format!("shape `{text}` has {count} numbers"),
                "give five: batch, tokens, query heads, kv heads, head dim, such as 1,4096,8,2,64",
            )
        })
    }
}

/// Values joined by commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

impl<T: ListItem> FromStr for List<T> {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        text.split(',').map(T::item).collect::<Result<_, _>>().map(Self)
    }
}

/// An item of a [`List`].
pub(crate) trait ListItem: Sized {
    fn item(text: &str) -> Result<Self, Error>;
}

impl ListItem for u32 {
    fn item(text: &str) -> Result<Self, Error> {
        text.parse().map_err(|_| {
            Error::request(
                format!("`{text}` is not a whole number"),
                format!("use numbers from 0 to {} joined by commas", Self::MAX),
            )
        })
    }
}

impl ListItem for f64 {
    fn item(text: &str) -> Result<Self, Error> {
        text.parse().map_err(|_| {
            Error::request(format!("`{text}` is not a number"), "use numbers joined by commas, such as 3,1")
        })
    }
}

impl ListItem for DeviceRequest {
    fn item(text: &str) -> Result<Self, Error> {
        text.parse()
    }
}

impl<T: fmt::Display> fmt::Display for List<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, item) in self.0.iter().enumerate() {
            write!(f, "{}{item}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// Placeholder of the rank in file names.
pub(crate) const RANK: &str = "{rank}";
