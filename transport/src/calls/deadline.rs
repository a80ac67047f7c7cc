//! When a call must end. Targets without a clock (wasm) keep only how long the caller asked to
//! wait.

use std::fmt;
use std::time::Duration;
#[cfg(not(target_family = "wasm"))]
use std::time::Instant;

/// The clock by which the deadlines of a transport pass.
pub(crate) trait Clock: fmt::Debug {
    /// A point in time.
    type Instant: Copy + Ord + fmt::Debug;

    /// The time now.
    fn now() -> Self::Instant;

    /// `time` and `by` later, if the clock can express that.
    fn later(time: Self::Instant, by: Duration) -> Option<Self::Instant>;

    /// The time until `time`. It is zero if `time` has passed, and infinite if there is no clock.
    fn until(time: Self::Instant) -> Duration;
}

/// The clock of the system; where there is none, no time passes.
#[derive(Debug)]
pub(crate) struct SystemClock;

#[cfg(not(target_family = "wasm"))]
impl Clock for SystemClock {
    type Instant = Instant;

    fn now() -> Instant {
        Instant::now()
    }

    fn later(time: Instant, by: Duration) -> Option<Instant> {
        time.checked_add(by)
    }

    fn until(time: Instant) -> Duration {
        time.saturating_duration_since(Instant::now())
    }
}

#[cfg(target_family = "wasm")]
impl Clock for SystemClock {
    type Instant = ();

    fn now() {}

    fn later((): (), _: Duration) -> Option<()> {
        Some(())
    }

    fn until((): ()) -> Duration {
        Duration::MAX
    }
}

/// When a call must end, and how long its caller asked to wait.
#[derive(Debug)]
pub(crate) struct Deadline<C: Clock> {
    at: C::Instant,
    asked: Duration,
}

// Not derived: a clock need not be `Copy` for its points in time to be.
impl<C: Clock> Clone for Deadline<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C: Clock> Copy for Deadline<C> {}

impl<C: Clock> Deadline<C> {
    /// The deadline that is `asked` from now.
    pub(crate) fn after(asked: Duration) -> Self {
        let now = C::now();
        let at = C::later(now, asked).or_else(|| C::later(now, LONGEST)).unwrap_or(now);
        Self { at, asked }
    }

    /// The wait that the caller asked for.
    pub(crate) fn asked(self) -> Duration {
        self.asked
    }

    /// How long the caller has waited; zero where there is no clock.
    pub(crate) fn waited(self) -> Duration {
        self.asked.saturating_sub(C::until(self.at))
    }

    /// The end.
    pub(crate) fn at(self) -> C::Instant {
        self.at
    }
}

/// Stands for a wait that the clock cannot express.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
