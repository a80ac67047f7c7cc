//! The options that say what is computed and how it is shared.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Args;
use kyklos::{Dtype, Mask, Mesh, PlacementKind, Strategy, WireFormat};

use super::headings;
use super::values::{List, OrAuto, Shape, SplitName, StrategyName, TokenRange};

/// The problem and how ranks share it: the options that `attend` and `plan` have in common.
#[derive(Clone, Debug, Args)]
pub(crate) struct ProblemArgs {
    /// safetensors file with the tensors q, k and v, each [batch, seq, heads, dim]
    #[arg(help_heading = headings::INPUT, long, value_name = "F")]
    pub(crate) input: Option<PathBuf>,
    /// Generate random tensors: batch, tokens, query heads, KV heads, head dim
    #[arg(help_heading = headings::INPUT, long, value_name = "B,S,HQ,HKV,D", conflicts_with = "input")]
    pub(crate) shape: Option<Shape>,
    /// Run this many ranks in one process [default: as many as the mesh has, else 1]
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "N")]
    pub(crate) ranks: Option<NonZeroU32>,
    /// TOML file that describes devices and links. Then `auto` takes the plan with the shortest
    /// predicted time
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "F")]
    pub(crate) hardware: Option<PathBuf>,
    /// Ulysses x ring, such as 2x4. auto: the mesh that sends the fewest bytes, or with --hardware
    /// the fastest one
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "UxR|auto", default_value = "auto")]
    pub(crate) mesh: OrAuto<Mesh>,
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "NAME", default_value = "auto", help = strategy_help(), long_help = strategy_long_help())]
    pub(crate) strategy: OrAuto<StrategyName>,
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "KIND", default_value = "auto", help = placement_help(), long_help = placement_long_help())]
    pub(crate) placement: OrAuto<PlacementKind>,
    /// Share the tokens by weight, one weight for each rank. With `work:` the weights share the
    /// visible (query, key) pairs. auto: by the speed of the devices, measured or from
    /// --hardware [default: auto where devices differ, else even]
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "auto|even|[work:]W,W,…", conflicts_with_all = ["tokens", "q_tokens"])]
    pub(crate) split: Option<SplitName>,
    /// Give each rank this exact number of tokens, where there are as many queries as keys
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "N,N,…", conflicts_with = "q_tokens")]
    pub(crate) tokens: Option<List<u32>>,
    /// Give each rank this exact number of queries, and with --kv-tokens its number of keys
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "N,N,…", requires = "kv_tokens")]
    pub(crate) q_tokens: Option<List<u32>>,
    /// Give each rank this exact number of keys and values; replicated ones are not counted
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "N,N,…", requires = "q_tokens")]
    pub(crate) kv_tokens: Option<List<u32>>,
    #[arg(help_heading = headings::MASK, long, value_name = "MASK", default_value = "full", help = Mask::notation())]
    pub(crate) mask: Mask,
    /// Number format of keys and values between ranks: same, f16 (for f32 tensors) or int8 (with
    /// scales). Each value is rounded once; `kyklos plan` prints the expected error
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "NAME", default_value = "same")]
    pub(crate) wire: WireFormat,
    /// Add up tiles of 256 keys in a fixed order. One type of device then gives the same bytes on
    /// every mesh; slower
    #[arg(help_heading = headings::PARALLELISM, long)]
    pub(crate) fixed_order: bool,
    /// Keys A to B (exclusive) are on every rank from the start, such as a prompt beside an image,
    /// and are never sent
    #[arg(help_heading = headings::PARALLELISM, long, value_name = "A..B", default_value = "0..0")]
    pub(crate) replicated: TokenRange,
    /// Global position of query 0; key 0 is at position 0
    #[arg(help_heading = headings::MASK, long, value_name = "N", default_value_t = 0)]
    pub(crate) q_offset: u32,
    /// Scale of the logits q·k [default: 1/√dim]
    #[arg(help_heading = headings::MASK, long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) scale: Option<f32>,
    /// Limit the logits: X·tanh(logit/X)
    #[arg(help_heading = headings::MASK, long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) softcap: Option<f32>,
    /// Generate a random sink for each query head (an input file has them as the tensor `sinks`)
    #[arg(help_heading = headings::INPUT, long, conflicts_with = "input")]
    pub(crate) sinks: bool,
    /// Also the backward pass: the gradients of q, k, v and of the sinks, for the gradients `do`
    /// and `dlse` of the output in the input file (`dlse` may be missing). With --shape a
    /// random `do`
    #[arg(help_heading = headings::INPUT, long)]
    pub(crate) grad: bool,
    /// Also the gradient of the numbers in the input's `bias`, as `dbias`
    #[arg(help_heading = headings::INPUT, long, requires = "grad")]
    pub(crate) grad_bias: bool,
    /// f32, f16 or bf16 [default: that of the input file, else f32]
    #[arg(help_heading = headings::INPUT, long, value_name = "NAME")]
    pub(crate) dtype: Option<Dtype>,
}

fn strategy_help() -> String {
    format!(
        "{}; auto: dense, ring, ulysses or unified, by the mesh, or with --hardware the fastest one",
        Strategy::names()
    )
}

/// One line for each strategy.
fn strategy_long_help() -> String {
    let lines = Strategy::ALL.map(|strategy| format!("  - {strategy}: {}", strategy.summary()));
    format!(
        "How ranks share the work.\n{}\n  - auto: dense, ring, ulysses or unified, by the mesh, or with --hardware the fastest one",
        lines.join("\n")
    )
}

fn placement_help() -> String {
    format!(
        "How tokens are dealt to ranks: {}; auto: zigzag for causal and similar masks on a ring, else contiguous, or with \
         --hardware the fastest one",
        PlacementKind::names()
    )
}

/// One line for each placement.
fn placement_long_help() -> String {
    let lines = PlacementKind::ALL.map(|kind| format!("  - {kind}: {}", kind.summary()));
    format!(
        "How tokens are dealt to ranks.\n{}\n  - auto: zigzag for causal and similar masks on a ring, else contiguous, or with \
         --hardware the fastest one",
        lines.join("\n")
    )
}
