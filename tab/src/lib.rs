//! A browser tab as the device of a rank.
//!
//! The rank itself, with its identity and its part in votes, runs in the process that let the tab
//! in. The tab gets commands of a [`Backend`](kyklos::backend::Backend) over one WebTransport
//! stream, carries them out on its GPU, and sends results back (ADR 0030). So a tab sees the
//! tensors of its rank and nothing else, and a tab that is lost is a device that is lost.
//!
//! - On the host: [`TabServer`] lets tabs in, and gives a [`TabBackend`] for each. Feature
//!   `server`.
//! - In the tab: [`execute`] carries out commands on any backend. It needs no socket, so it builds
//!   for wasm.
#![forbid(unsafe_code)]

#[cfg(any(feature = "server", feature = "loopback"))]
mod backend;
#[cfg(any(feature = "server", feature = "loopback"))]
mod encode;
mod executor;
mod frame;
#[cfg(any(feature = "server", feature = "loopback"))]
mod link;
#[cfg(feature = "loopback")]
mod loopback;
#[cfg(feature = "native")]
#[doc(hidden)]
#[allow(clippy::missing_panics_doc, clippy::unwrap_used, reason = "for tests")]
pub mod native;
mod protocol;
#[cfg(feature = "server")]
mod server;

#[cfg(any(feature = "server", feature = "loopback"))]
pub use backend::{TabBackend, TabBuffer};
pub use executor::{Inbox, ToHost, execute};
#[cfg(feature = "loopback")]
pub use loopback::loopback;
pub use protocol::{Limits, VERSION};
#[cfg(feature = "server")]
pub use server::{Invitation, TabServer, TabServerOptions};
