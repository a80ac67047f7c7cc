//! Strategies: pure functions from a problem, a mesh and placements to the plan of every rank.
//!
//! A plan has up to three phases: an all-to-all that exchanges tokens for heads inside the Ulysses
//! group ([`all_to_all`]), the round over the shards, and the all-to-all back. A mesh with U = 1
//! has only the round, one with R = 1 only the all-to-alls, and one rank has neither. In the round
//! keys go from neighbour to neighbour ([`streams`], and in pieces [`relay`](kinds::relay)) or
//! straight to every shard that sees them ([`gather`](kinds::gather)), or queries go to the keys,
//! straight ([`pass_q`](kinds::pass_q)) or along trees ([`tree`](kinds::tree)).
//!
//! Each strategy has a file in [`kinds`] with its steps and all other facts about it, its
//! [`facts`]. The closed list of strategies is `strategy_list.rs`, in a layer below the plans.

mod all_to_all;
mod attend;
mod backward;
mod balance;
mod build;
mod deals;
mod facts;
mod forward;
mod kinds;
mod order;
mod partials;
mod price;
mod registry;
mod results;
mod streams;

pub use backward::{plan_backward, plan_backward_placed};
pub use deals::deal;
pub(crate) use facts::EqualHops;
pub(crate) use forward::{bytes_sent, dealt};
pub use forward::{meshes_by_bytes, placed_meshes_by_bytes, plan, plan_placed, plan_rows};
