//! Time. The caller injects a clock; the library never asks the system for the time of a run.

use std::fmt;

/// A monotonic clock, for reports and traces. Tests inject their own.
pub trait Clock: fmt::Debug + Send + Sync {
    /// Nanoseconds since a fixed moment. Never decreases.
    fn now_ns(&self) -> u64;
}

/// The system's monotonic clock; in a browser, that of the page or worker.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    start: Moment,
}

impl SystemClock {
    /// A clock that is at 0 ns now.
    pub fn new() -> Self {
        Self { start: Moment::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

#[cfg(not(target_arch = "wasm32"))]
use std::time::Instant as Moment;
#[cfg(target_arch = "wasm32")]
use web::Moment;

#[cfg(target_arch = "wasm32")]
mod web {
    use std::time::Duration;

    use wasm_bindgen::prelude::wasm_bindgen;

    #[wasm_bindgen]
    extern "C" {
        /// Milliseconds since the page was opened or the worker started; never decreases.
        #[wasm_bindgen(js_namespace = performance)]
        fn now() -> f64;
    }

    /// In place of `std::time::Instant`, which panics in a browser.
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Moment(f64);

    impl Moment {
        pub(super) fn now() -> Self {
            Self(now())
        }

        pub(super) fn elapsed(self) -> Duration {
            Duration::try_from_secs_f64((now() - self.0) / 1e3).unwrap_or_default()
        }
    }
}
