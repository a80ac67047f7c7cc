//! Ranks in different processes, over QUIC with certificates on both sides.
//!
//! Rank 0 listens on the coordinator's address and is the coordinator of the group. Every two ranks
//! have a data connection; every rank has a control connection to rank 0, so that heartbeats and
//! aborts never queue behind payload. All I/O of a rank runs on one thread of its own
//! ([`QuicTransport::connect`]), or in the caller's tokio context ([`QuicTransport::form`]).
//!
//! The coordinator's [`Transport::close`](crate::Transport::close) ends when all other ranks have
//! left, because they need it until then. The last 0.6 s of a close's deadline (half of it, if it
//! is short) are for the last packets rather than for peers. After an abort, close the transport
//! before the process ends. Only then it is certain that the other ranks know of the abort.
//!
//! # Folders
//!
//! From the bottom up; a folder uses only the folders before it:
//!
//! - `network`: sockets, QUIC inside TCP, the I/O thread, packet sizes and windows, frames on a
//!   stream, how a connection ends.
//! - `trust`: certificates, their names and validity, files of keys, revoked keys, TLS on both
//!   sides.
//! - `join`: how a rank that has a token gets its certificate from rank 0.
//! - `payload`: the bytes of a message in chunks, and how they are put together again.
//! - `shared_memory`: memory that ranks on one host share, and how they get it.
//! - `forming`: configuration, the endpoint of a rank, who is admitted, forming the first group and
//!   the next ones.
//! - `control`: what the tasks of a rank share, the control connection, votes, heartbeats, ranks
//!   that make no progress.
//! - `messages`: sending and receiving.
//!
//! Above them are `lifecycle` (start and end of a rank in a group), `transport` (the contract) and
//! `loopback`.

mod control;
#[doc(hidden)]
pub mod decoders;
mod forming;
mod join;
mod lifecycle;
mod loopback;
mod messages;
mod network;
mod payload;
mod shared_memory;
#[cfg(test)]
mod tests;
mod transport;
mod trust;

pub use self::forming::config::{Awaited, QuicConfig};
pub use self::join::{EnrolConfig, Enrolled, Invitation, InvitationTerms, Token, enrol};
pub use self::loopback::{quic_loopback_group, quic_loopback_group_over};
pub use self::network::congestion::Congestion;
pub use self::network::look_up::look_up;
pub use self::network::path::{Carrier, LinkSettings};
pub use self::network::timing::LinkProfile;
pub use self::transport::QuicTransport;
pub use self::trust::authority::{ClusterAuthority, VALID_DAYS};
pub use self::trust::identity::Identity;
pub use self::trust::job::JobId;
pub use self::trust::key_hash::KeyHash;
pub use self::trust::names::{Claims, HostNames, Subject};
pub use self::trust::revoked::Revoked;
pub use self::trust::validity::{Date, Validity};
