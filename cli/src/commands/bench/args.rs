//! Options of `kyklos bench`.

use std::num::NonZeroU32;

use clap::Args;
use kyklos::Dtype;

use super::against::Peer;
use crate::devices::DeviceRequest;
use crate::options::{KernelName, List, MaskArg, Shape};

/// What is timed: every combination.
#[derive(Clone, Debug, Args)]
pub(crate) struct BenchArgs {
    /// auto, cpu, wgpu or cuda, the last two also by number
    #[arg(long, value_name = "D,D,…", default_value = "auto")]
    pub(crate) device: List<DeviceRequest>,
    /// auto, portable, subgroup, cooperative, or one that `tune` lists; all but auto are kernels of wgpu devices
    #[arg(long, value_name = "K,K,…", default_value = "auto")]
    pub(crate) kernel: List<KernelName>,
    /// Batch, tokens, query heads, kv heads, head dim; may be given again
    #[arg(long, value_name = "B,S,HQ,HKV,D", default_values = ["1,1024,8,8,64", "1,1024,8,2,128"])]
    pub(crate) shape: Vec<Shape>,
    /// As for `attend`; may be given again
    #[arg(long, value_name = "MASK", default_values = ["full", "causal"])]
    pub(crate) mask: Vec<MaskArg>,
    /// f32, f16, bf16; may be given again
    #[arg(long, value_name = "NAME", default_values = ["f32", "f16"])]
    pub(crate) dtype: Vec<Dtype>,
    /// Only the last N tokens are queries: 1 is the shape of decoding
    #[arg(long, value_name = "N")]
    pub(crate) queries: Option<NonZeroU32>,
    /// Timed runs of each combination, after the first one
    #[arg(long, value_name = "N", default_value = "9")]
    pub(crate) repeat: NonZeroU32,
    /// Hold every row of f16 and bf16 to what the same device makes of it in f32, which is held to the oracle on the rows that
    /// are sampled anyway
    #[arg(long)]
    pub(crate) verify: bool,
    /// Another program to take turns with on one device; may be given again. COMMAND is called with a case, such as
    /// 1,1024,8,8,64,causal,f32, and a number of calls, and prints {"first_ms":…,"times_ms":[…],"max_abs_error":…}
    #[arg(long, value_name = "NAME=COMMAND")]
    pub(crate) against: Vec<Peer>,
    /// With --against: how often everybody has a turn
    #[arg(long, value_name = "N", default_value = "3", requires = "against")]
    pub(crate) rounds: NonZeroU32,
    /// Print one JSON array
    #[arg(long)]
    pub(crate) json: bool,
}
