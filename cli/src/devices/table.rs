//! The table of backends.

use std::fmt;

use kyklos::backend::wgpu::KernelChoice;
use kyklos::backend::{Device, DeviceClass, DeviceInfo};

use super::backend::BackendEntry;
use crate::failure::Result;

/// The facts of a backend that need no device.
struct Facts {
    name: &'static str,
    numbered: bool,
    has_kernels: bool,
    devices: fn() -> Vec<DeviceInfo>,
    left_out: fn() -> Option<String>,
    choose: fn(Option<usize>, usize) -> Result<usize>,
    for_auto: fn() -> Vec<(usize, DeviceClass)>,
}

impl Facts {
    const fn of<E: BackendEntry>() -> Self {
        Self {
            name: E::NAME,
            numbered: E::NUMBERED,
            has_kernels: E::HAS_KERNELS,
            devices: E::devices,
            left_out: E::left_out,
            choose: E::choose,
            for_auto: E::for_auto,
        }
    }
}

macro_rules! backends {
    ($($module:ident::$entry:ident),* $(,)?) => {
        /// A backend of this build.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub(crate) enum BackendKind {
            $($entry),*
        }

        impl BackendKind {
            /// All backends; the later ones are listed first.
            pub(crate) const ALL: &'static [Self] = &[$(Self::$entry),*];

            fn facts(self) -> &'static Facts {
                match self {
                    $(Self::$entry => const { &Facts::of::<super::$module::$entry>() }),*
                }
            }

            /// Opens the device number `index`, with `kernel` where the backend has several.
            pub(super) fn open(self, index: usize, kernel: KernelChoice) -> Result<Device> {
                match self {
                    $(Self::$entry => super::$module::$entry::open(index, kernel)),*
                }
            }
        }
    };
}

// A backend is one entry here. Lists of devices show the last backend first.
backends![tab::Tab, cpu::Cpu, wgpu::Wgpu, cuda::Cuda];

impl BackendKind {
    /// The backend of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    pub(crate) fn name(self) -> &'static str {
        self.facts().name
    }

    /// Whether its devices have numbers.
    pub(super) fn is_numbered(self) -> bool {
        self.facts().numbered
    }

    /// Whether there are several kernels to choose from.
    pub(crate) fn has_kernels(self) -> bool {
        self.facts().has_kernels
    }

    /// What the drivers of this machine offer.
    pub(crate) fn devices(self) -> Vec<DeviceInfo> {
        (self.facts().devices)()
    }

    /// What the list of them lacks, and why, where the driver tells.
    pub(crate) fn left_out(self) -> Option<String> {
        (self.facts().left_out)()
    }

    /// The device that is meant by `index`, for the rank number `local_rank` of this machine.
    pub(super) fn choose(self, index: Option<usize>, local_rank: usize) -> Result<usize> {
        (self.facts().choose)(index, local_rank)
    }

    /// The devices among which `--device auto` chooses.
    pub(super) fn for_auto(self) -> Vec<(usize, DeviceClass)> {
        (self.facts().for_auto)()
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
