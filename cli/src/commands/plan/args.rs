//! Options of `kyklos plan`.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Args;

use crate::devices::DeviceRequest;
use crate::options::{List, ProblemArgs, TransportName};

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    /// List every plan that could run, with predicted time, bytes, memory and idle share, and say why the first is first
    #[arg(long)]
    pub(crate) explain: bool,
    /// With --explain: measure the devices and the link of ranks in this process instead of reading a description
    #[arg(long, requires = "explain", conflicts_with = "hardware")]
    pub(crate) probe: bool,
    /// With --probe: run every plan so often too, in turns with the probe, and compare
    #[arg(long, value_name = "ROUNDS", requires = "probe")]
    pub(crate) measure: Option<NonZeroU32>,
    /// With --probe: write what was measured as a description for --hardware
    #[arg(long, value_name = "F", requires = "probe")]
    pub(crate) save: Option<PathBuf>,
    /// With --probe: auto, cpu or wgpu, as for `attend`
    #[arg(long, value_name = "D,D,…", default_value = "auto", requires = "probe")]
    pub(crate) device: List<DeviceRequest>,
    /// With --probe: how ranks talk
    #[arg(long, value_enum, default_value_t = TransportName::InProcess, requires = "probe")]
    pub(crate) transport: TransportName,
    /// Show the steps of this rank only [default: of all up to 4 ranks, else of rank 0]
    #[arg(long, value_name = "R")]
    pub(crate) rank: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
