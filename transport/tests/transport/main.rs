//! The contract of every transport, over channels, QUIC and TCP: one program, so that it is linked
//! once. Tests that measure the memory of their process are in `tests/memory/`.
#![cfg_attr(feature = "quic", expect(clippy::unwrap_used, reason = "a test that cannot continue has failed"))]

#[cfg(feature = "quic")]
#[path = "../../../tests/amount.rs"]
mod amount;
#[macro_use]
mod conformance;
mod in_process;

/// Instantiates claims, which are functions of a carrier, for each carrier.
#[cfg(feature = "quic")]
macro_rules! over_every_carrier {
    ($($claim:ident)*) => {
        mod udp {
            use kyklos_transport::quic::Carrier;
            $(
                #[test]
                fn $claim() {
                    super::$claim(Carrier::Udp);
                }
            )*
        }

        #[cfg(unix)]
        mod tcp {
            use kyklos_transport::quic::Carrier;
            $(
                #[test]
                fn $claim() {
                    super::$claim(Carrier::Tcp);
                }
            )*
        }
    };
}

#[cfg(feature = "quic")]
mod addresses;
#[cfg(feature = "quic")]
mod common;
#[cfg(feature = "quic")]
mod decoders;
#[cfg(feature = "quic")]
mod forgery;
#[cfg(feature = "quic")]
mod lanes;
#[cfg(feature = "quic")]
mod links;
#[cfg(feature = "quic")]
mod loopback;
#[cfg(feature = "quic")]
mod processes;
#[cfg(all(feature = "quic", target_os = "linux", target_pointer_width = "64"))]
mod shared_memory;
#[cfg(feature = "quic")]
mod simulation;
#[cfg(all(feature = "quic", unix))]
mod slow_link;
#[cfg(feature = "quic")]
mod stalled;
#[cfg(feature = "quic")]
mod strangers;
#[cfg(all(feature = "quic", unix))]
mod tcp_loopback;
#[cfg(all(feature = "quic", unix))]
mod tcp_strangers;
