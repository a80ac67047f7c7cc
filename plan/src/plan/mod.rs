//! Plans: the steps of a rank, as data.
//!
//! A [`Plan`] is a list of [`Step`]s over declared buffers. Each buffer is written once and freed
//! after its last reader. Its declaration names the tokens and heads of its tensor. So a plan of
//! any strategy can be proved without running it ([`check`]), and printed ([`explain`]).

mod check;
mod content;
mod explain;
mod hash;
mod name;
mod proved;
mod step;

pub use check::{RankCheck, check, check_in_order};
pub use content::{Content, TensorRows};
pub use explain::{Explained, bias_in_words, bytes, describe, expected_of_wire, explain, table};
pub use hash::{PLAN_FORMAT, plan_hash};
pub use name::BufferName;
pub use proved::ProvedPlans;
pub use step::{
    Buffer, BufferId, Direction, GradientBuffers, GradientStep, Plan, PlanSet, Recv, Send, Slice, Step,
};
