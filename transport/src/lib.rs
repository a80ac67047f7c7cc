//! Bytes between the ranks of one group.
//!
//! # Contract
//!
//! - A [`Transport`] belongs to one rank. It knows ranks, tags and bytes; it knows no tensors.
//! - `post_*` never blocks and starts the work at once. What it returns is a [`Posted`] completion, a future that
//!   is `Send` and needs no particular runtime to poll it.
//! - A message is a list of parts. Both sides know the number and the length of the parts beforehand, from their
//!   plan; a length that comes from the wire only confirms them and never sizes an allocation.
//! - A message is matched by (source, [`Tag`]). A send completes when the payload is no longer needed by the
//!   transport, which is at the earliest when the receiver has posted the matching receive.
//! - Every completion ends by the deadline of its call: with its value or with a [`TransportError`] that names the
//!   peer, the message and the bytes done.
//! - Failure is collective. The first failure that the coordinator (rank 0) sees becomes everyone's: all
//!   completions that are outstanding and all later calls end with [`TransportError::Aborted`], and the flag of
//!   [`Transport::stop_flag`] rises so that long computations can give up between two pieces.
#![forbid(unsafe_code)]

mod ballot;
#[cfg_attr(
    target_family = "wasm",
    expect(dead_code, reason = "deadlines are not watched where there are no threads")
)]
mod deadline;
mod error;
mod in_process;
mod misuse;
#[cfg(feature = "quic")]
pub mod quic;
mod transport;
pub mod wire;

pub use error::{Abort, AbortCause, Pending, TransportError};
pub use in_process::in_process_group;
pub use transport::{Posted, Progress, Rank, Tag, Transport, Vote};
