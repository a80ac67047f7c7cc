//! Ranks that are killed or stand still, over TCP streams: the same tests as over UDP, which go by the name of this file.
#![cfg(unix)]

#[path = "quic_processes.rs"]
mod processes;
#[path = "quic_stalled.rs"]
mod stalled;
