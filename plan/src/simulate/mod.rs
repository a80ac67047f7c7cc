//! The cost of a plan set on described devices and links, without running it.
//!
//! [`simulate`] walks the same plans that the executor runs, step by step, as events in time. An
//! exchange is posted and continues while attention is computed. A wait step waits. A message moves
//! when both ends have posted it. Ranks and messages get equal shares of a device or a link that
//! they share. [`candidates`] lists the ways to run a problem and [`choose`] prices them.
//! [`predict_placed`] prices token lists that no dealer made. Without a description,
//! [`fewest_bytes`] chooses. [`Shares`] divides the tokens among devices of unlike speed. No
//! device, no clock: a [`Cluster`] gives the speeds of devices and links, from a file or
//! from a probe.

mod capacity;
mod choice;
mod cluster;
mod describe;
mod engine;
mod events;
mod large;
mod network;
mod prediction;
mod program;
mod share;
mod shares;
mod walk;
mod work;

pub use capacity::Capacity;
pub use choice::by_bytes::fewest_bytes;
pub use choice::candidate::Candidate;
pub use choice::candidates::{EstimatedPlan, Feasibility, Passes, PlanQuery, candidates, choose};
pub use choice::explain::{Bound, bound, explain_choice, why_first};
pub use cluster::Cluster;
pub use describe::{
    AttentionRate, Between, Description, DeviceCount, DeviceDescription, Duplex, HostDescription,
    LinkDescription, MemoryKind,
};
pub use events::{Activity, PredictedEvents, PredictedMessage, PredictedWork, pairs_of_rank, pairs_of_ranks};
pub use large::{predict, predict_backward, predict_placed};
pub use prediction::{LinkPrediction, Prediction, RankPrediction};
pub use shares::{Shares, visible_pairs, work_of};

pub use walk::{simulate, simulate_events};
