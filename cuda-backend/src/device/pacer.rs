//! Piece sizes: each piece should take the device about [`PIECE_S`], by the measured speed of its
//! kernel.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures_channel::oneshot;

/// Seconds that one piece should take: short enough to cancel without a noticeable delay, long
/// compared with a submission.
pub(crate) const PIECE_S: f64 = 0.08;
/// Pieces that may always be submitted and not done: one runs, one waits.
const FEWEST_IN_FLIGHT: usize = 2;
/// Short pieces, of steps that are submitted one after the other, may be more: another one as long
/// as those in flight take less than [`PIECE_S`] together.
const MOST_IN_FLIGHT: usize = 32;

/// How much work a piece has: about so many floating-point operations, or so many tiles, if these
/// have more. A piece whose blocks do not fill the device takes as long as one that does, so with
/// fewer of them it would be slower and not shorter, and would measure the speed of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PieceSize {
    pub(crate) flops: f64,
    pub(crate) fewest_tiles: usize,
}

/// Measured speed of each kernel, and the pieces in flight.
#[derive(Debug, Default)]
pub(crate) struct Pacer(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    flops_per_s: HashMap<String, f64>,
    in_flight: VecDeque<InFlightPiece>,
    /// When the last measured piece was done.
    last_done: Option<Instant>,
}

/// A piece that was submitted. `done` receives the time of its completion.
#[derive(Debug)]
pub(crate) struct InFlightPiece {
    pub(crate) kernel: String,
    pub(crate) flops: f64,
    /// Speed of the kernel before the first measurement.
    pub(crate) first_flops_per_s: f64,
    pub(crate) submitted: Instant,
    pub(crate) done: oneshot::Receiver<Instant>,
}

impl Pacer {
    /// Floating-point operations of the next piece of a kernel, whose speed counts as
    /// `first_flops_per_s` before the first measurement.
    pub(crate) fn piece_flops(&self, kernel: &str, first_flops_per_s: f64) -> f64 {
        PIECE_S * self.lock().flops_per_s.get(kernel).unwrap_or(&first_flops_per_s)
    }

    pub(crate) fn record_submission(&self, piece: InFlightPiece) {
        self.lock().in_flight.push_back(piece);
    }

    /// Waits until another piece may be submitted: the device is busy for a while with those in
    /// flight, but not so long that a cancellation has to wait.
    pub(crate) async fn wait_for_slot(&self) {
        loop {
            // Taken out before it is awaited: no lock is held over an await.
            let piece = {
                let mut state = self.lock();
                if state.has_slot() {
                    return;
                }
                state.in_flight.pop_front()
            };
            if let Some(InFlightPiece { kernel, flops, submitted, done, .. }) = piece
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
    fn has_slot(&self) -> bool {
        let count = self.in_flight.len();
        let seconds = |piece: &InFlightPiece| {
            piece.flops / self.flops_per_s.get(&piece.kernel).unwrap_or(&piece.first_flops_per_s)
        };
        count < FEWEST_IN_FLIGHT
            || (count < MOST_IN_FLIGHT && self.in_flight.iter().map(seconds).sum::<f64>() < PIECE_S)
    }

    fn record_completion(&mut self, kernel: String, flops: f64, submitted: Instant, done: Instant) {
        let began = self.last_done.map_or(submitted, |last| last.max(submitted));
        self.last_done = Some(done);
        let took_s = done.saturating_duration_since(began).as_secs_f64();
        let before = self.flops_per_s.get(&kernel).copied();
        self.flops_per_s.insert(kernel, measured_speed(before, flops, took_s));
    }
}

/// The speed of a kernel, known or not, after a piece of `flops` that took `took_s`.
pub(crate) fn measured_speed(before: Option<f64>, flops: f64, took_s: f64) -> f64 {
    // A shorter time is mostly that of the submission.
    let measured = flops / took_s.max(1e-3);
    let before = before.unwrap_or(measured);
    // A lower speed is taken over at once, a higher one by half: too large a piece delays a
    // cancellation.
    if measured < before && took_s > 1e-3 { measured } else { before.max(0.5 * (before + measured)) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn short_pieces_may_be_many_and_long_ones_two() {
        let pacer = Pacer::default();
        let submit = |flops| {
            let kernel = "x".to_owned();
            let (_, done) = oneshot::channel();
            let (first_flops_per_s, submitted) = (10.0, Instant::now());
            pacer.record_submission(InFlightPiece { kernel, flops, first_flops_per_s, submitted, done });
        };
        let slots = |flops| {
            pacer.lock().in_flight.clear();
            (0..100).take_while(|_| pacer.lock().has_slot()).inspect(|_| submit(flops)).count()
        };
        assert_eq!(slots(10.0 * PIECE_S / 3.5), 4, "by the assumed speed");
        let start = Instant::now();
        pacer.lock().record_completion("x".to_owned(), 100.0, start, start + Duration::from_secs(1));
        assert_eq!(slots(100.0 * PIECE_S), 2);
        assert_eq!(slots(100.0 * PIECE_S / 3.5), 4);
        assert_eq!(slots(1e-9), MOST_IN_FLIGHT);
    }

    #[test]
    fn pieces_shrink_at_once_and_grow_slowly() {
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
        // Too short to be measured: the speed does not drop.
        assert!(complete(1e-9, 400, 400) >= 100.0);
    }
}
