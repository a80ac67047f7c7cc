//! The options that say what is computed and how it is shared.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Args;
use kyklos::{Dtype, Mask, Mesh, PlacementKind, Strategy, WireFormat};

use super::values::{List, MaskArg, OrAuto, Shape, SplitName, StrategyName, TokenRange};

/// What is computed, and how it is shared: common to `attend` and `plan`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ProblemArgs {
    /// safetensors file with q, k, v, each [batch, seq, heads, dim]
    #[arg(long, value_name = "F")]
    pub(crate) input: Option<PathBuf>,
    /// Made-up tensors: batch, tokens, query heads, kv heads, head dim
    #[arg(long, value_name = "B,S,HQ,HKV,D", conflicts_with = "input")]
    pub(crate) shape: Option<Shape>,
    /// Number of ranks in this process [default: the mesh's, else 1]
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<NonZeroU32>,
    /// Description of devices and links: `auto` is then what the simulator finds fastest, and the time is predicted
    #[arg(long, value_name = "F")]
    pub(crate) hardware: Option<PathBuf>,
    /// Ulysses x ring, or auto: without --hardware the mesh that sends fewest bytes
    #[arg(long, value_name = "UxR|auto", default_value = "auto")]
    pub(crate) mesh: OrAuto<Mesh>,
    #[arg(long, value_name = "NAME", default_value = "auto", help = strategy_help(), long_help = strategy_long_help())]
    pub(crate) strategy: OrAuto<StrategyName>,
    #[arg(long, value_name = "KIND", default_value = "auto", help = placement_help(), long_help = placement_long_help())]
    pub(crate) placement: OrAuto<PlacementKind>,
    /// Share the tokens by these weights, one for each rank; with work: before them, the visible (query, key) pairs
    #[arg(long, value_name = "[work:]W,W,…", conflicts_with = "tokens")]
    pub(crate) split: Option<SplitName>,
    /// Share the tokens exactly like this, one number for each rank
    #[arg(long, value_name = "N,N,…")]
    pub(crate) tokens: Option<List<u32>>,
    #[arg(long, value_name = "MASK", default_value = "full", help = Mask::notation())]
    pub(crate) mask: MaskArg,
    /// same, f16 (for f32 tensors) or int8 (with scales): keys and values on their way between shards, rounded once;
    /// `kyklos plan` says how wrong that makes the result
    #[arg(long, value_name = "NAME", default_value = "same")]
    pub(crate) wire: WireFormat,
    /// Sum over tiles of 256 keys in one order: on one type of device the same bytes on any mesh; costs time
    #[arg(long)]
    pub(crate) fixed_order: bool,
    /// Keys A to B that every rank holds from the start, such as a prompt beside an image: never sent, met once
    #[arg(long, value_name = "A..B", default_value = "0..0")]
    pub(crate) replicated: TokenRange,
    /// Global position of query 0; key 0 is at position 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) q_offset: u32,
    /// Factor on q·k [default: 1/√dim]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) scale: Option<f32>,
    /// Logits become X·tanh(logit/X)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) softcap: Option<f32>,
    /// With made-up tensors: make up a sink for each query head too (an input file brings its own as `sinks`)
    #[arg(long, conflicts_with = "input")]
    pub(crate) sinks: bool,
    /// f32, f16 or bf16 [default: the input's, else f32]
    #[arg(long, value_name = "NAME")]
    pub(crate) dtype: Option<Dtype>,
}

fn strategy_help() -> String {
    format!("{}, or auto: without --hardware the strategy of the mesh", Strategy::names())
}

/// One line for each strategy.
fn strategy_long_help() -> String {
    let lines = Strategy::ALL.map(|strategy| format!("- {strategy}: {}", strategy.summary()));
    format!(
        "How the work is shared; auto: without --hardware the strategy of the mesh.\n{}",
        lines.join("\n")
    )
}

fn placement_help() -> String {
    format!(
        "{} or auto: without --hardware zigzag where a ring's mask works like causal",
        PlacementKind::names()
    )
}

/// One line for each placement.
fn placement_long_help() -> String {
    let lines = PlacementKind::ALL.map(|kind| format!("- {kind}: {}", kind.summary()));
    format!(
        "Which rank holds which tokens; auto: without --hardware zigzag where a ring's mask works like causal.\n{}",
        lines.join("\n")
    )
}
