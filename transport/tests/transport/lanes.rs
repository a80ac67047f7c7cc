//! The QUIC transport with several connections between two ranks keeps the contract.

use crate::common::over_quic;
use crate::conformance::Ranks;
use kyklos_transport::quic::{LinkSettings, quic_loopback_group_over};

fn make(size: u32) -> Ranks {
    let link = LinkSettings { lanes: 3, ..over_quic() };
    quic_loopback_group_over(size, link).expect("a group over loopback")
}

conformance_tests!(make);
