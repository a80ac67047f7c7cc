//! Congestion control: the number of bytes in flight.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use quinn::congestion::{Controller, ControllerFactory, CubicConfig};

/// Congestion control: the number of bytes in flight to a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// CUBIC (RFC 9438): adapts to the path and shares it with other flows.
    #[default]
    Cubic,
    /// Always this many bytes, whatever is lost: for links without other traffic.
    Fixed {
        /// Bytes; from ten packets up to 4 GiB.
        window_bytes: u64,
    },
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cubic => f.write_str("cubic"),
            Self::Fixed { window_bytes } => write!(f, "fixed:{window_bytes}"),
        }
    }
}

impl Congestion {
    /// The factory of the controller of each connection.
    pub(crate) fn factory(self) -> Arc<dyn ControllerFactory + Send + Sync> {
        match self {
            Self::Cubic => {
                let mut cubic = CubicConfig::default();
                cubic.initial_window(INITIAL_BYTES);
                Arc::new(cubic)
            }
            Self::Fixed { window_bytes } => Arc::new(FixedWindow(window_bytes)),
        }
    }
}

/// A constant number of bytes in flight.
#[derive(Clone, Copy, Debug)]
struct FixedWindow(u64);

impl ControllerFactory for FixedWindow {
    fn build(self: Arc<Self>, _: Instant, _: u16) -> Box<dyn Controller> {
        Box::new(*self)
    }
}

impl Controller for FixedWindow {
    fn on_congestion_event(&mut self, _: Instant, _: Instant, _: bool, _: u64) {}

    fn on_mtu_update(&mut self, _: u16) {}

    fn window(&self) -> u64 {
        self.0
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(*self)
    }

    fn initial_window(&self) -> u64 {
        self.0
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Bytes in flight before any packet has arrived from the peer: some milliseconds of a fast link.
const INITIAL_BYTES: u64 = 1 << 20;
