//! Runs of a plan on the ranks of this process.

pub(crate) mod alone;
pub(crate) mod call;
pub(crate) mod gather;
pub(crate) mod resident;
pub(crate) mod threads;
pub(crate) mod timed;

use std::sync::Arc;

use kyklos::{NoObserver, RunOptions, SystemClock};
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Group, in_process_group};

use crate::failure::Result;
use crate::options::TransportName;

/// Options of runs without observers.
pub(crate) fn quiet() -> RunOptions {
    RunOptions {
        clock: Arc::new(SystemClock::new()),
        observer: Arc::new(NoObserver),
        trace: false,
        poison: false,
    }
}

/// A group of `ranks` ranks in this process.
pub(crate) fn group(transport: TransportName, ranks: u32) -> Result<Vec<Group>> {
    Ok(match transport {
        TransportName::InProcess => in_process_group(ranks),
        TransportName::Quic => quic_loopback_group(ranks)?,
    })
}
