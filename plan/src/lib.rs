//! Which rank computes what, and when: problems, placements, strategies and plans. No device, no
//! network and no clock.
//!
//! A parallel strategy is a pure function from a problem, a mesh and a placement to a
//! [`plan::Plan`] for each rank: a list of steps over named buffers. The same plan is proved,
//! priced, explained and executed. The crate `kyklos` executes it, and re-exports what its users
//! need of this crate.
//!
//! ```
//! use kyklos_plan::plan::ProvedPlans;
//! use kyklos_plan::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_forward};
//!
//! let problem = AttentionProblem::new([1, 4096, 8, 2, 64], Dtype::F16, Mask::causal())?;
//! let set = plan_forward(&problem, Mesh::new(1, 4)?, PlacementKind::Zigzag, &Split::Even, Strategy::Ring)?;
//! let proved = ProvedPlans::new(set)?;
//! assert_eq!(proved.set().plans.len(), 4);
//! # Ok::<(), kyklos_plan::Error>(())
//! ```
//!
//! From the bottom up, `xtask layers` checks it:
//!
//! ```text
//! error remedy dtype named tokens spans parallel lists and words that all use; work on several threads
//! mask bias wire problem lower pieces           what is computed, and the arrays that kernels read
//! mesh placement strategy_list                  which rank holds which tokens; the closed list of strategies
//! plan                                          the steps of each rank, and their proof
//! strategy                                      the plans of each strategy, and its facts
//! simulate                                      what that takes on described devices and links, and which plan is fastest
//! ```

mod bias;
mod dtype;
mod error;
mod lower;
mod mask;
mod mesh;
mod named;
mod parallel;
mod pieces;
mod placement;
pub mod plan;
mod problem;
mod remedy;
pub mod simulate;
mod spans;
mod strategy;
mod strategy_list;
mod tokens;
mod wire;

pub use bias::{BiasKind, BiasTensor};
pub use dtype::Dtype;
pub use error::{Error, Remedy, Result};
pub use kyklos_rank::{MAX_RANKS, Rank};
pub use lower::{BlockWork, MaskClass, TileRun, TileShape};
pub use mask::{Mask, MaskSlice, SlicePart};
pub use mesh::Mesh;
pub use pieces::{Piece, PieceKind};
pub use placement::{Deal, Placement, PlacementKind, Split};
pub use problem::{AttentionProblem, Results, TILE_KEYS};
pub use spans::{RowSpan, Spans};
pub use strategy::{
    deal as deal_tokens, meshes_by_bytes, placed_meshes_by_bytes, plan as plan_forward, plan_backward,
    plan_backward_placed, plan_placed, plan_rows,
};
pub use strategy_list::Strategy;
pub use tokens::{Run, TokenRuns};
pub use wire::{TOKENS_PER_SCALE, WireFormat};
