//! Gradients of one block of queries against one block of keys, added to f32 sums: numbers and
//! names of the kernels in `wgsl/backward/`. What they compute, their bindings and their lists are
//! described in `portable.wgsl` there.

use minijinja::context;
use minijinja::value::Value;

use self::variant::{BackwardKernel, BackwardVariant};
use crate::Tile;
use crate::kernel::EMPTY_M;

pub(crate) mod lanes;
pub(crate) mod matrix;
pub(crate) mod params;
pub(crate) mod portable;
pub(crate) mod variant;

impl BackwardVariant {
    /// The tiles in which work lists count.
    pub const fn list_tile(self, head_dim: u32) -> Tile {
        match self {
            Self::Portable(_) => Tile { q_rows: portable::COLS, kv_cols: portable::COLS },
            Self::Lanes { subgroup_size } => lanes::list_tile(subgroup_size, head_dim),
            Self::Cooperative(matrices) => matrix::list_tile(matrices),
        }
    }
}

impl BackwardKernel {
    /// Rows or keys of one workgroup; divides those of the list's tile.
    pub const fn tile_rows(&self) -> u32 {
        match self.variant {
            BackwardVariant::Portable(vendor) => {
                portable::SIDE * portable::rows_per_thread(vendor, self.sums, self.head_dim)
            }
            BackwardVariant::Lanes { subgroup_size } => {
                subgroup_size * lanes::rows_per_lane(self, subgroup_size)
            }
            BackwardVariant::Cooperative(matrices) => matrix::tile_rows(matrices),
        }
    }

    /// The sum of dS times a moving row: its binding, and the name of its registers.
    fn sum_of_scores(&self) -> &'static str {
        if self.sums.rows_are_fixed() { "dq" } else { "dk" }
    }

    /// Workgroups for one tile of the list.
    pub const fn tiles_of_list(&self) -> u32 {
        let tile = self.variant.list_tile(self.head_dim);
        let list = if self.sums.rows_are_fixed() { tile.q_rows } else { tile.kv_cols };
        list / self.tile_rows()
    }
}

/// What all variants of a kernel's text depend on.
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
