//! Ranks in processes: how they start, find each other, and end.

mod certs;
pub(crate) mod clusters;
mod delivery;
mod forming;
mod helpers;
pub(crate) mod launch;
pub(crate) mod on_loss;
mod tab;
mod tokens;
