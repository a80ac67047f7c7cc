//! The size of submissions: about [`PIECE_S`] seconds of device time each, by measured speed.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kyklos_shaders::{AttendKernel, BackwardKernel, Kernel};

use super::completion::Done;
use crate::backend::DeviceClass;

/// Seconds of one submission: short enough for a watchdog and for a user, and long compared with
/// the cost of submitting.
const PIECE_S: f64 = 0.08;
/// Most submissions in flight: one runs, one waits.
const IN_FLIGHT: usize = 2;

/// Fewest keys of a piece: with fewer, loading and storing the state would take a noticeable share
/// of the time.
const FEWEST_KEYS: usize = 2048;

/// Measured speed, and the submissions in flight.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct Pace {
    /// Assumed speed before the first measurement.
    first_flops_per_s: f64,
    /// Workgroups that keep the device busy.
    busy_groups: u64,
    /// The same for the smaller workgroups of the decoding kernels.
    decode_groups: usize,
    /// Most operations of `busy_groups` workgroups in one piece; beyond it their keys are cut.
    most_flops: f64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    flops_per_s: HashMap<Kernel, f64>,
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

impl Pace {
    pub(in crate::backend::wgpu) fn new(class: DeviceClass) -> Self {
        // Too low a speed only makes the first piece short; too high a speed could exceed a watchdog's 2 s.
        let (first_flops_per_s, busy_groups, decode_groups, most_flops) = match class {
            DeviceClass::SoftwareGpu | DeviceClass::Cpu => (4e9, 32, 16, 3e9),
            DeviceClass::IntegratedGpu => (1e11, 512, 96, 3e11),
            _ => (1e11, 512, 256, 3e11),
        };
        Self { first_flops_per_s, busy_groups, decode_groups, most_flops, state: Mutex::default() }
    }

    /// Operations of the next piece.
    pub(in crate::backend::wgpu) fn piece_flops(&self, kernel: &Kernel) -> f64 {
        let state = self.lock();
        PIECE_S * state.flops_per_s.get(kernel).unwrap_or(&self.first_flops_per_s)
    }

    /// Operations of one workgroup for one key.
    pub(in crate::backend::wgpu) fn flops_per_key(kernel: &AttendKernel) -> f64 {
        4.0 * f64::from(kernel.tile().q_rows) * f64::from(kernel.head_dim)
    }

    /// Most keys of `items` workgroups in one piece, each with `flops_per_key`. Does not depend on
    /// measurements.
    pub(in crate::backend::wgpu) fn keys_at_once(&self, flops_per_key: f64, items: u64) -> usize {
        let groups = u32::try_from(items.clamp(1, self.busy_groups)).expect("busy_groups is small");
        let keys = self.most_flops / (f64::from(groups) * flops_per_key);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive, and far below 2^52"
        )]
        let keys = keys as usize;
        keys.max(FEWEST_KEYS)
    }

    /// The same of a backward kernel for one moving row or key. `heads` is the number of query
    /// heads that it loops over.
    pub(in crate::backend::wgpu) fn backward_flops(kernel: &BackwardKernel, heads: u32) -> f64 {
        2.0 * f64::from(kernel.sums.products() * heads)
            * f64::from(kernel.tile_rows())
            * f64::from(kernel.head_dim)
    }

    /// Target number of workgroups for the splits of the keys. Does not depend on measurements.
    pub(in crate::backend::wgpu) fn decode_groups(&self) -> usize {
        self.decode_groups
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
                if state.flights.len() < IN_FLIGHT {
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
        // A shorter time measures the submission, not the device.
        if took_s > 1e-3 {
            let measured = flight.flops / took_s;
            let rate = state.flops_per_s.entry(flight.kernel).or_insert(measured);
            // Adapts at once to a lower speed, and gradually to a higher one.
            *rate = if measured < *rate { measured } else { 0.5 * (*rate + measured) };
        } else if took_s > 0.0 {
            let rate = state.flops_per_s.entry(flight.kernel).or_insert(self.first_flops_per_s);
            *rate = rate.max(flight.flops / 1e-3);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
