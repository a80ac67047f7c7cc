//! Gradients of one block of queries against one block of keys, added to f32 sums.
//!
//! For a query row with log-sum-exp `lse` and `δ = Σ d_o·o − d_lse`, and for each key that it sees:
//!
//! ```text
//! x  = scale · q·k           (softcap c: c · tanh(x / c)), plus the bias
//! P  = exp(x − lse)          dS = P · (d_o·v − δ)    (softcap c: · (1 − tanh²))
//! dQ += scale · dS · k       dK += scale · dS · q    dV += P · d_o
//! ```
//!
//! (Dao 2023, arXiv 2307.08691, §3.1.2.) WGSL has no atomic addition of f32, and an order of
//! additions that depends on timing would change bytes. So a sum belongs to one workgroup: one
//! kernel has a tile of query rows and loops over keys, the other has a tile of keys and loops over
//! the query heads that read it and over their rows. Both compute x; two products of seven are the
//! price.
//!
//! The gradient of an additive bias is dS before the factor of the softcap, and has a kernel of its
//! own, because the other ones have no binding left. An element belongs to one workgroup of a
//! dispatch: to the one with its row, or with its key where all queries share a row. Where query
//! heads or batch entries share elements, each has a dispatch, one after the other: so the order of
//! additions is theirs. The kernel has two products for each pair, and reads and writes 8 bytes of
//! the gradient for each pair, or for each key where queries share a row.
//!
//! x has the factor on q of the forward kernels: so it has the rounding that is in the log-sum-exp.
//!
//! # Bindings
//!
//! | name | holds |
//! |---|---|
//! | params | [`BackwardParams`](crate::BackwardParams) |
//! | q, d_o | `[batch, rows, heads, dim]`, strided, in 16-byte units |
//! | k, v | `[batch, keys, KV heads, dim]`, the same |
//! | stats | f32 `[batch, rows, heads, 4]`, strided, in 16-byte units: log-sum-exp, factor on weights, δ, and the logarithm of that factor, negated |
//! | dq, or dk and dv | f32, strided, in 16-byte units: the sums |
//! | or d_bias | f32 `[batch, rows, heads, columns]`, strided, in elements: the sum; columns are positions |
//! | lists | u32, see below |
//! | bias | where the kernel reads [`BiasInput`](crate::BiasInput): as in the forward kernels |
//!
//! `dv` alone is made without `v`. In [`lanes`] the moving tensors and their statistics are
//! textures of 16-byte texels: x = head · units of a head + unit, or head / 2; y = (batch entry −
//! `batch_first`) · `moving_texels` + row − `moving_begin`.
//!
//! # Lists
//!
//! One array holds, at the places that the parameters name: the KV head of each query head, or,
//! where a workgroup is of a KV head, for each of them the first query head that reads it (and the
//! end); the position of each key; the visible positions lo..hi of each class and row; and the work
//! list of the kernel: for each class `2·tiles + 1` starts, where tiles of
//! [`BackwardVariant::list_tile`] count, then runs `first..end` of what the kernel loops over. As
//! in the forward kernels the first runs of a tile are full, the others are tested.
//!
//! # NaN and infinity
//!
//! Of pairs that are tested and hidden, P and dS are replaced by selection, and so is their product
//! with the row or key. A row whose log-sum-exp is −∞ has `lse = −EMPTY_M`: the kernel of its own
//! tile does not write it, and the other kernel reads zeros instead of its q and d_o, because 0 ·
//! NaN is NaN.

use self::variant::{BackwardKernel, BackwardVariant};
use crate::kernel::{EMPTY_M, Kernel};
use crate::text::Text;
use crate::{BiasInput, Tile, attend};

pub(crate) mod lanes;
pub(crate) mod params;
pub(crate) mod portable;
pub(crate) mod stats;
pub(crate) mod variant;

impl BackwardVariant {
    /// The tiles in which work lists count.
    pub const fn list_tile(self, head_dim: u32) -> Tile {
        match self {
            Self::Portable => Tile { q_rows: portable::COLS, kv_cols: portable::COLS },
            Self::Lanes { subgroup_size } => lanes::list_tile(subgroup_size, head_dim),
        }
    }
}

impl BackwardKernel {
    /// Rows or keys of one workgroup; divides those of the list's tile.
    pub const fn tile_rows(&self) -> u32 {
        match self.variant {
            BackwardVariant::Portable => portable::SIDE * portable::rows_per_thread(self.sums, self.head_dim),
            BackwardVariant::Lanes { subgroup_size } => {
                subgroup_size * lanes::rows_per_lane(self, subgroup_size)
            }
        }
    }

    /// The variable with the head of a fixed tensor or of the sums.
    fn fixed_head(&self, tensor: &str) -> &'static str {
        if self.sums.of_one_query_head() && matches!(tensor, "k" | "v") { "kv_head" } else { "own_head" }
    }

    /// Whether dS has the factor of the softcap. That of a bias has not: a bias is added behind the
    /// softcap.
    const fn needs_slope(&self) -> bool {
        self.sums.needs_scores() && !self.sums.of_bias()
    }

    /// Workgroups for one tile of the list.
    pub const fn tiles_of_list(&self) -> u32 {
        let tile = self.variant.list_tile(self.head_dim);
        let list = if self.sums.rows_are_fixed() { tile.q_rows } else { tile.kv_cols };
        list / self.tile_rows()
    }
}

/// Declarations and functions of a backward kernel.
fn prelude(kernel: BackwardKernel) -> String {
    let mut text =
        attend::prelude(Kernel::AttendBackward(kernel), kernel.storage, kernel.softcap, kernel.bias);
    text.push_str(&shares());
    text.push('\n');
    if kernel.softcap && kernel.needs_slope() {
        text.push_str(SLOPE);
        text.push('\n');
    }
    text
}

/// Functions that make P of a logit.
fn shares() -> String {
    let unseen = (-EMPTY_M).to_bits();
    format!(
        "// By bits, so that a row of NaN counts: SPIR-V from naga has `!=` false for NaN.
fn saw_keys(lse: f32) -> bool {{ return bitcast<u32>(lse) != {unseen:#x}u; }}
// P. Rounded, a logit may be above the log-sum-exp.
fn share_of(logit: f32, lse: f32, factor: f32) -> f32 {{
    let below = logit - lse;
    return weight_of(select(below, 0.0f, below > 0.0f)) * factor;
}}
"
    )
}

/// 1 − tanh²(t), from the exponential: near ±1 the difference would have lost most of its digits.
const SLOPE: &str = "fn slope_of(t: f32) -> f32 {
    let u = exp2(min(abs(t), 80.0f) * -2.8853900f);
    let below = 1.0f + u;
    return 4.0f * u / (below * below);
}
";

/// The first statements of every workgroup: its tile, batch entry, heads and runs. Returns if there
/// is nothing to do.
fn item(t: &mut Text, kernel: BackwardKernel) {
    let last_first = if kernel.sums.rows_are_fixed() {
        "params.tile_count - 1u - item % params.tile_count"
    } else {
        "item % params.tile_count"
    };
    t.lines(&format!(
        "
let group = group_id.x + group_id.y * params.grid_width;
if (group >= params.items) {{ return; }}
let item = params.first_item + group;
let tile = params.tile_first + {last_first};
let batch_head = item / params.tile_count;
let batch = params.batch_first + batch_head / params.heads;
let own_head = params.head_first + batch_head % params.heads;
let class_index = min(batch, params.last_class);
let starts = params.starts_at + class_index * params.starts_class + 2u * (tile / {}u);
let full_runs = lists[starts];
let tested_runs = lists[starts + 1u];
let runs_end = lists[starts + 2u];
if (full_runs == runs_end) {{ return; }}
let spans = params.spans_at + 2u * class_index * params.rows;",
        kernel.tiles_of_list(),
    ));
    if kernel.sums.of_one_query_head() {
        t.line("let head = own_head;");
        t.line("let kv_head = lists[params.heads_at + own_head];");
    }
}

/// All runs, with `first` and `end` in scope: the full ones, then those whose pairs are tested. If
/// the kernel reads a bias, all are tested. The argument of `body` says whether it has to test.
fn all_runs(t: &mut Text, bias: BiasInput, body: impl Fn(&mut Text, bool)) {
    let mut runs = |from: &str, to: &str, tested| {
        t.block(format!("for (var run = {from}; run < {to}; run++)"), |t| {
            t.line("let first = max(lists[params.runs_at + 2u * run], params.moving_begin);");
            t.line("let end = min(lists[params.runs_at + 2u * run + 1u], params.moving_end);");
            body(t, tested);
        });
    };
    if bias.any() {
        runs("full_runs", "runs_end", true);
    } else {
        runs("full_runs", "tested_runs", false);
        runs("tested_runs", "runs_end", true);
    }
}
