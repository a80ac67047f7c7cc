//! Devices of this machine: names, the table of backends, and devices that are open.

mod backend;
mod cpu;
mod cuda;
pub(crate) mod driver;
mod name;
mod report;
mod tab;
mod table;
pub(crate) mod tuned;
mod wgpu;

pub(crate) use self::name::{DeviceId, DeviceRequest, all, choose, left_out, names};
pub(crate) use self::report::DeviceReport;
pub(crate) use self::tab::{let_in, let_in_nowhere, say_goodbye};
pub(crate) use self::table::BackendKind;
