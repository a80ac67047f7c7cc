//! Plans: what a rank does, as data.
//!
//! A [`Plan`] is a list of [`Step`]s over declared buffers. Each buffer is written once and freed when its last
//! reader is done; what a buffer holds (which tokens, which heads, of what) is part of its declaration, so a plan
//! can be proved without running it ([`check`]) and printed without knowing where it came from ([`explain`]).

mod check;
mod explain;
mod hash;
mod step;
mod step_progress;

pub use check::{Left, RankCheck, check, check_repair, left};
pub(crate) use explain::describe;
pub use explain::{Explained, bytes, expected_of_wire, explain, table};
pub use hash::plan_hash;
pub use step::{Buffer, BufferId, Content, Kept, Lost, Plan, Recv, Send, Slice, Step, World};
pub use step_progress::StepProgress;
