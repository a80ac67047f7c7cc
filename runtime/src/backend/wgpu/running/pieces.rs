//! The pieces under way, and the measured speed of each kernel, which says how large the next one
//! is.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kyklos_shaders::{AttendKernel, BackwardKernel, Kernel};

use super::completion::Done;
use super::pacing::{Grain, PIECE_S, Size, Speed};
use crate::backend::DeviceClass;

/// Submissions that may always be in flight: one runs, one waits.
const FEWEST_IN_FLIGHT: usize = 2;
/// Short ones may be more: another one as long as those in flight take less than a piece together.
const MOST_IN_FLIGHT: usize = 16;

/// Measured speed, and the submissions in flight.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct Pace {
    /// Where keys are cut.
    pub(in crate::backend::wgpu) grain: Grain,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    speeds: HashMap<Kernel, Speed>,
    flights: VecDeque<Flight>,
    /// When the last measured submission was done.
    done_s: f64,
}

/// A submission under way.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct Flight {
    pub(in crate::backend::wgpu) kernel: Kernel,
    pub(in crate::backend::wgpu) flops: f64,
    pub(in crate::backend::wgpu) submitted_s: f64,
    pub(in crate::backend::wgpu) done: Done,
}

impl State {
    fn speed(&self, kernel: &Kernel, grain: &Grain) -> Speed {
        self.speeds.get(kernel).copied().unwrap_or(grain.first_speed())
    }

    fn has_room(&self, grain: &Grain) -> bool {
        let seconds = |flight: &Flight| self.speed(&flight.kernel, grain).seconds(flight.flops);
        let count = self.flights.len();
        count < FEWEST_IN_FLIGHT
            || (count < MOST_IN_FLIGHT && self.flights.iter().map(seconds).sum::<f64>() < PIECE_S)
    }
}

impl Pace {
    pub(in crate::backend::wgpu) fn new(class: DeviceClass) -> Self {
        Self { grain: Grain::new(class), state: Mutex::default() }
    }

    /// The size of the next piece.
    pub(in crate::backend::wgpu) fn size(&self, kernel: &Kernel) -> Size {
        self.grain.size(self.lock().speed(kernel, &self.grain))
    }

    /// Operations of one workgroup for one key.
    pub(in crate::backend::wgpu) fn flops_per_key(kernel: &AttendKernel) -> f64 {
        4.0 * f64::from(kernel.tile().q_rows) * f64::from(kernel.head_dim)
    }

    /// The same of a backward kernel for one moving row or key. `heads` is the number of query
    /// heads that it loops over.
    pub(in crate::backend::wgpu) fn backward_flops(kernel: &BackwardKernel, heads: u32) -> f64 {
        2.0 * f64::from(kernel.sums.products() * heads)
            * f64::from(kernel.tile_rows())
            * f64::from(kernel.head_dim)
    }

    pub(in crate::backend::wgpu) fn submitted(&self, flight: Flight) {
        self.lock().flights.push_back(flight);
    }

    /// Waits until another submission may be made.
    pub(in crate::backend::wgpu) async fn room(&self) {
        loop {
            // Taken out of the queue first: no lock is held over an await.
            let flight = {
                let mut state = self.lock();
                if state.has_room(&self.grain) {
                    return;
                }
                state.flights.pop_front()
            };
            if let Some(flight) = flight {
                self.landed(flight).await;
            }
        }
    }

    async fn landed(&self, flight: Flight) {
        let Some(done_s) = flight.done.finished().await else {
            return; // the device is lost; the next check says so
        };
        let mut state = self.lock();
        let took_s = done_s - flight.submitted_s.max(state.done_s);
        state.done_s = state.done_s.max(done_s);
        // Not after it began, as far as the clock can tell.
        if took_s > 0.0 {
            let first = self.grain.first_speed();
            state.speeds.entry(flight.kernel).or_insert(first).measured(flight.flops, took_s);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
