//! The QUIC transport over loopback sockets keeps the contract.

use crate::conformance::Ranks;

fn make(size: u32) -> Ranks {
    kyklos_transport::quic::quic_loopback_group(size).expect("a group over loopback")
}

conformance_tests!(make);
