//! The QUIC transport over loopback sockets keeps the contract.
#![cfg(feature = "quic")]

#[expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod conformance;

use conformance::Group;

fn make(world: u32) -> Group {
    kyklos_transport::quic::quic_loopback_group(world).expect("a group over loopback")
}

conformance_tests!(make);
