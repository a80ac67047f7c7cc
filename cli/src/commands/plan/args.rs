//! Options of `kyklos plan`.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Args;

use crate::devices::{self, DeviceRequest};
use crate::options::{List, ProblemArgs, TransportName, headings};

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    /// List every possible plan with its predicted time, bytes, memory and idle share, and explain
    /// the order
    #[arg(help_heading = headings::MEASUREMENT, long)]
    pub(crate) explain: bool,
    /// With --explain: measure the devices and the link of ranks in this process instead of reading
    /// a description
    #[arg(help_heading = headings::MEASUREMENT, long, requires = "explain", conflicts_with = "hardware")]
    pub(crate) probe: bool,
    /// With --probe: also run every plan this often, in turns with the probe, and compare
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "ROUNDS", requires = "probe")]
    pub(crate) measure: Option<NonZeroU32>,
    /// With --probe: write the measurements as a description for --hardware
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "F", requires = "probe")]
    pub(crate) save: Option<PathBuf>,
    #[arg(
        help_heading = headings::DEVICE,
        long,
        value_name = "D,D,…",
        default_value = "auto",
        requires = "probe",
        help = format!("With --probe, one device for each rank: {}", devices::names())
    )]
    pub(crate) device: List<DeviceRequest>,
    /// With --probe: how ranks send messages
    #[arg(help_heading = headings::NETWORK, long, value_enum, default_value_t = TransportName::InProcess, requires = "probe")]
    pub(crate) transport: TransportName,
    /// Show the steps of this rank only [default: of all ranks if there are at most 4, else of rank
    /// 0]
    #[arg(help_heading = headings::OUTPUT, long, value_name = "R")]
    pub(crate) rank: Option<u32>,
    /// Write the plans with pictures as one HTML file: the mask and its owners, bytes between
    /// ranks, memory, and with --hardware the predicted timelines of all ranks. With --explain:
    /// of the fastest plan, and a table of all plans
    #[arg(help_heading = headings::OUTPUT, long, value_name = "F")]
    pub(crate) report: Option<PathBuf>,
    /// Print one JSON object
    #[arg(help_heading = headings::OUTPUT, long)]
    pub(crate) json: bool,
}
