//! Helpers without weights: other devices compute a share of somebody else's attention.
//!
//! An *owner* has the tokens, and calls. A *helper* has a device and nothing else: no model, no
//! tokens. For a call the owner sends a helper the queries, keys and values of some heads, or of
//! some rows where heads are few, and gets their output. Owner and helper are a group of two; each
//! helper has its own, so that helpers come and go without a word to the others (ADR 0045).
//!
//! - [`Owner`] knows its helpers and how fast they are. It shares a call where that pays, and
//!   computes itself what a helper does not return in time: the result is exact in any case.
//! - [`help`] is the helper's side.
//! - [`Cuts`] forecasts what helpers are worth, without any.
//! - [`Door`] lets helpers in that have its token; [`Knock`] is the helper's side of it.
//! - [`OwnerSearch`] finds owners on the local network.

mod call;
mod check;
mod door;
mod encoding;
mod forecast;
mod helper;
mod invitations;
mod link;
mod local_network;
mod message;
mod owner;
mod speeds;
mod wait;

pub use call::{Call, Part, Shape};
pub use door::{Door, Knock};
pub use forecast::{Cuts, DeviceSpeed, Forecast, HelperSpeed, LinkSpeed, OwnerSpeed, Share};
pub use helper::{HelperEvent, HelperOptions, help};
pub use invitations::Invitations;
pub use link::Gone;
pub use local_network::{FoundOwner, OwnerSearch, local_address};
pub use owner::{
    Flight, Gradients, HelperState, HelperStatus, Inputs, Joining, Landed, Owner, OwnerOptions, Results,
};
