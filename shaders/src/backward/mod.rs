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
//! `dv` alone is made without `v`. In `backward/lanes.wgsl` the moving tensors and their statistics are
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

use minijinja::context;
use minijinja::value::Value;

use self::variant::{BackwardKernel, BackwardVariant};
use crate::Tile;
use crate::kernel::EMPTY_M;

pub(crate) mod lanes;
pub(crate) mod params;
pub(crate) mod portable;
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

    /// The binding of the sum `a` (of dS) or `b` (of P).
    fn target(&self, sum: &str) -> &'static str {
        match sum {
            "a" if self.sums.rows_are_fixed() => "dq",
            "a" => "dk",
            _ => "dv",
        }
    }

    /// Workgroups for one tile of the list.
    pub const fn tiles_of_list(&self) -> u32 {
        let tile = self.variant.list_tile(self.head_dim);
        let list = if self.sums.rows_are_fixed() { tile.q_rows } else { tile.kv_cols };
        list / self.tile_rows()
    }
}

/// What both variants of a kernel's text depend on.
pub(crate) fn values(kernel: BackwardKernel) -> Value {
    let sums = kernel.sums;
    context! {
        by_rows => sums.rows_are_fixed(),
        of_bias => sums.of_bias(),
        of_one_query_head => sums.of_one_query_head(),
        tiles_of_list => kernel.tiles_of_list(),
        // The variable with the head of a fixed tensor.
        fixed_head => if sums.of_one_query_head() && !sums.rows_are_fixed() { "kv_head" } else { "own_head" },
        // Whether dS has the factor of the softcap. That of a bias has not: a bias is added behind the softcap.
        slopes => kernel.softcap && sums.needs_scores() && !sums.of_bias(),
        unseen_bits => format!("{:#x}", (-EMPTY_M).to_bits()),
    }
}
