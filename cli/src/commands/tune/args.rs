//! Options of `kyklos tune`.

use std::num::NonZeroU32;

use clap::Args;
use kyklos::Dtype;

use crate::devices::DeviceRequest;
use crate::options::{KernelName, ListItem, Shape};

/// What is tuned.
#[derive(Clone, Debug, Args)]
pub(crate) struct TuneArgs {
    /// wgpu, the best there is, or one by number (wgpu:1)
    #[arg(long, value_name = "D", default_value = "wgpu")]
    pub(super) device: DeviceRequest,
    /// Among which kernels: auto, portable, subgroup, cooperative. A choice made under a name other than auto is used only where
    /// that name is given
    #[arg(long, value_name = "K", default_value = "auto", value_parser = KernelName::item)]
    pub(super) kernel: KernelName,
    /// f32, f16, bf16; may be given again
    #[arg(long, value_name = "NAME", default_values = ["f32", "f16"])]
    pub(super) dtype: Vec<Dtype>,
    /// Elements of a head; may be given again [default: 64 and 128]
    #[arg(long, value_name = "D", conflicts_with = "shape")]
    pub(super) head_dim: Vec<u32>,
    /// Batch, tokens, query heads, kv heads, head dim; may be given again [default: 1,1024,8,8,D for each head dim, and on
    /// hardware also 128 and 8192 tokens]
    #[arg(long, value_name = "B,S,HQ,HKV,D")]
    pub(super) shape: Vec<Shape>,
    /// Seconds that it may take; shapes for which there is no time keep the choice that they have
    #[arg(long, value_name = "N", default_value = "60")]
    pub(super) budget_s: NonZeroU32,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
    /// Keep nothing
    #[arg(long)]
    pub(super) dry_run: bool,
}
