//! When a call must end. Targets without a clock (wasm) keep only how long the caller was ready to wait.

use std::time::Duration;
#[cfg(not(target_family = "wasm"))]
use std::time::Instant;

/// The end of a call's patience.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    #[cfg(not(target_family = "wasm"))]
    at: Instant,
    patience: Duration,
}

impl Deadline {
    /// `patience` from now.
    pub(crate) fn after(patience: Duration) -> Self {
        Self {
            #[cfg(not(target_family = "wasm"))]
            at: {
                let now = Instant::now();
                now.checked_add(patience).unwrap_or_else(|| now + LONGEST)
            },
            patience,
        }
    }

    /// What the caller asked for.
    pub(crate) fn patience(self) -> Duration {
        self.patience
    }

    /// How long the caller has waited; unknown, and zero, where there is no clock.
    pub(crate) fn waited(self) -> Duration {
        #[cfg(not(target_family = "wasm"))]
        return self.patience.saturating_sub(self.at.saturating_duration_since(Instant::now()));
        #[cfg(target_family = "wasm")]
        return Duration::ZERO;
    }

    #[cfg(not(target_family = "wasm"))]
    pub(crate) fn at(self) -> Instant {
        self.at
    }
}

/// Stands for patience that the clock cannot express.
#[cfg(not(target_family = "wasm"))]
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
