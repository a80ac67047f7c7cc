//! Plans: the steps of a rank, as data.
//!
//! A [`Plan`] is a list of [`Step`]s over declared buffers. Each buffer is written once and freed when its last
//! reader is done. Its declaration says which tokens and heads of which tensor it holds, so a plan can be proved without
//! running it ([`check`]), and printed whatever strategy made it ([`explain`]).

mod check;
mod explain;
mod hash;
mod reached;
mod step;

pub use check::{RankCheck, RemainingBuffers, check, check_repair, remaining_buffers};
pub(crate) use explain::describe;
pub use explain::{Explained, bytes, expected_of_wire, explain, table};
pub use hash::plan_hash;
pub use reached::Reached;
pub use step::{Buffer, BufferId, Content, Kept, LostTokens, Plan, Recv, Send, Slice, Step, World};
