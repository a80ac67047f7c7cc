//! Devices of this machine: names, the table of backends, and devices that are open.

mod backend;
mod cpu;
mod cuda;
pub(crate) mod driver;
mod name;
mod report;
mod table;
pub(crate) mod tuned;
mod wgpu;

pub(crate) use self::backend::OnBackend;
pub(crate) use self::name::{DeviceId, DeviceRequest, all, choose, names};
pub(crate) use self::report::Device;
pub(crate) use self::table::{AnyBackend, AnyResumable, BackendKind};
