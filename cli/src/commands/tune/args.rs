//! Options of `kyklos tune`.

use std::num::NonZeroU32;

use clap::Args;
use kyklos::Dtype;

use crate::devices::DeviceRequest;
use crate::options::{KernelName, ListItem, Shape, headings};

/// What `kyklos tune` measures.
#[derive(Clone, Debug, Args)]
pub(crate) struct TuneArgs {
    /// wgpu, the best one of this machine, or one by its number (wgpu:1)
    #[arg(help_heading = headings::DEVICE, long, value_name = "D", default_value = "wgpu")]
    pub(super) device: DeviceRequest,
    /// Kernels to try: auto, portable, subgroup or cooperative. Only `--kernel` with the same name
    /// uses a choice that was made under a name other than auto
    #[arg(help_heading = headings::DEVICE, long, value_name = "K", default_value = "auto", value_parser = KernelName::item)]
    pub(super) kernel: KernelName,
    /// f32, f16 or bf16
    #[arg(help_heading = headings::INPUT, long, value_name = "NAME,…", value_delimiter = ',', default_values = ["f32", "f16"])]
    pub(super) dtype: Vec<Dtype>,
    /// Elements of a head [default: 64,128]
    #[arg(help_heading = headings::INPUT, long, value_name = "D,D,…", value_delimiter = ',', conflicts_with = "shape")]
    pub(super) head_dim: Vec<u32>,
    /// Batch, tokens, query heads, KV heads, head dim; repeatable [default: 1,1024,8,8,D for each
    /// head dim, and on hardware also 128 and 8192 tokens]
    #[arg(help_heading = headings::INPUT, long, value_name = "B,S,HQ,HKV,D")]
    pub(super) shape: Vec<Shape>,
    /// Time limit in seconds. Shapes that are not reached keep their earlier choice
    #[arg(help_heading = headings::MEASUREMENT, long, value_name = "N", default_value = "60")]
    pub(super) budget_s: NonZeroU32,
    /// Print one JSON object
    #[arg(help_heading = headings::OUTPUT, long)]
    pub(super) json: bool,
    /// Measure and print, but keep no choice
    #[arg(help_heading = headings::OUTPUT, long)]
    pub(super) dry_run: bool,
}
