//! The network below the ranks: sockets, packets, connections and the frames on them. It knows no
//! group and no certificate.

pub(crate) mod acknowledged;
pub(crate) mod batches;
pub(crate) mod binding;
pub(crate) mod congestion;
pub(crate) mod connection;
pub(crate) mod frames;
pub(crate) mod handshakes;
pub(crate) mod interface;
pub(crate) mod io_thread;
pub(crate) mod look_up;
pub(crate) mod path;
pub(crate) mod socket;
pub(crate) mod tcp;
pub(crate) mod timing;
pub(crate) mod windows;
