//! How much is submitted at a time: about [`PIECE_S`] of the device's time, found out by measuring.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures_channel::oneshot;

/// What one submission should take: below what a user notices, above what submitting costs.
const PIECE_S: f64 = 0.08;
/// Submissions between the host and the end of the queue: one runs, one waits.
const IN_FLIGHT: usize = 2;

/// Measured speed, and what is in copy.
#[derive(Debug, Default)]
pub(crate) struct Pacer(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    flops_per_s: HashMap<String, f64>,
    flights: VecDeque<InFlightPiece>,
    /// When the last measured submission was done.
    done: Option<Instant>,
}

/// A submission under way.
#[derive(Debug)]
pub(crate) struct InFlightPiece {
    pub(crate) kernel: String,
    pub(crate) flops: f64,
    pub(crate) submitted: Instant,
    pub(crate) done: oneshot::Receiver<Instant>,
}

impl Pacer {
    /// Operations of the next piece of a kernel whose speed is `first` where nothing was measured yet.
    pub(crate) fn piece_flops(&self, kernel: &str, first_flops_per_s: f64) -> f64 {
        PIECE_S * self.lock().flops_per_s.get(kernel).unwrap_or(&first_flops_per_s)
    }

    pub(crate) fn record_submission(&self, copy: InFlightPiece) {
        self.lock().flights.push_back(copy);
    }

    /// Waits until there is room for another submission.
    pub(crate) async fn wait_for_slot(&self) {
        loop {
            // Taken out before it is awaited: no lock is held over an await.
            let copy = {
                let mut state = self.lock();
                if state.flights.len() < IN_FLIGHT {
                    return;
                }
                state.flights.pop_front()
            };
            if let Some(InFlightPiece { kernel, flops, submitted, done }) = copy
                && let Ok(done) = done.await
            {
                self.lock().record_completion(kernel, flops, submitted, done);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn record_completion(&mut self, kernel: String, flops: f64, submitted: Instant, done: Instant) {
        let began = self.done.map_or(submitted, |last| last.max(submitted));
        self.done = Some(done);
        // Shorter ones measure the submission, not the device.
        let took_s = done.saturating_duration_since(began).as_secs_f64().max(1e-3);
        let measured = flops / took_s;
        let rate = self.flops_per_s.entry(kernel).or_insert(measured);
        // Slower at once, faster by and by.
        *rate = if measured < *rate && took_s > 1e-3 { measured } else { rate.max(0.5 * (*rate + measured)) };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn pieces_shrink_at_once_and_grow_by_and_by() {
        let pacer = Pacer::default();
        assert_eq!(pacer.piece_flops("x", 100.0), 8.0);
        let start = Instant::now();
        let complete = |flops, from: u64, to: u64| {
            let at = |ms| start + Duration::from_millis(ms);
            pacer.lock().record_completion("x".to_owned(), flops, at(from), at(to));
            pacer.piece_flops("x", 100.0) / PIECE_S
        };
        assert!((complete(10.0, 0, 100) - 100.0).abs() < 1e-6);
        // Submitted at 50, but the device was busy until 100.
        assert!((complete(10.0, 50, 300) - 50.0).abs() < 1e-6);
        assert!((complete(15.0, 300, 400) - 100.0).abs() < 1e-6);
        // Too short to be measured: never slower for it.
        assert!(complete(1e-9, 400, 400) >= 100.0);
    }
}
