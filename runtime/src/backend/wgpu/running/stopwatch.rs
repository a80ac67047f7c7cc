//! Times of compute passes by the device's own clock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Most passes between two readings.
const PASSES: u32 = 2048;

/// Records the begin and the end of each compute pass since the last reading.
#[derive(Debug)]
pub(in crate::backend::wgpu) struct Stopwatch {
    set: wgpu::QuerySet,
    /// Nanoseconds of a tick.
    period_ns: f32,
    /// Passes started since the last reading; more than [`PASSES`] if the times of some passes were
    /// not kept.
    passes: Mutex<u32>,
}

impl Stopwatch {
    /// `None` for a device that was opened without timestamp queries.
    pub(in crate::backend::wgpu) fn new(device: &wgpu::Device, queue: &wgpu::Queue) -> Option<Self> {
        if !device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        let set = device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("stopwatch"),
            ty: wgpu::QueryType::Timestamp,
            count: 2 * PASSES,
        });
        Some(Self { set, period_ns: queue.get_timestamp_period(), passes: Mutex::new(0) })
    }

    /// The queries of the next pass; `None` after [`PASSES`] passes.
    pub(in crate::backend::wgpu) fn next(&self) -> Option<wgpu::ComputePassTimestampWrites<'_>> {
        let mut passes = self.lock();
        let pass = *passes;
        *passes = pass.saturating_add(1);
        (pass < PASSES).then(|| wgpu::ComputePassTimestampWrites {
            query_set: &self.set,
            beginning_of_pass_write_index: Some(2 * pass),
            end_of_pass_write_index: Some(2 * pass + 1),
        })
    }

    /// The number of passes since the last reading, which is reset. `None` where there was no pass,
    /// or more than [`PASSES`].
    pub(in crate::backend::wgpu) fn take_passes(&self) -> Option<u32> {
        let passes = std::mem::take(&mut *self.lock());
        (1..=PASSES).contains(&passes).then_some(passes)
    }

    /// Bytes of the times of `passes` passes: a begin and an end of 8 bytes each.
    pub(in crate::backend::wgpu) fn bytes(&self, passes: u32) -> usize {
        16 * passes as usize
    }

    /// Records that the times of the first `passes` passes are written to `into`.
    pub(in crate::backend::wgpu) fn resolve(
        &self,
        passes: u32,
        encoder: &mut wgpu::CommandEncoder,
        into: &wgpu::Buffer,
    ) {
        encoder.resolve_query_set(&self.set, 0..2 * passes, into, 0);
    }

    /// Seconds from the first begin to the last end. `ticks` is the output of [`Self::resolve`].
    pub(in crate::backend::wgpu) fn seconds(&self, ticks: &[u64]) -> Option<f64> {
        span_ticks(ticks).map(|ticks| {
            #[expect(clippy::cast_precision_loss, reason = "a span of ticks, far below 2^52")]
            let ticks = ticks as f64;
            ticks * f64::from(self.period_ns) * 1e-9
        })
    }

    fn lock(&self) -> MutexGuard<'_, u32> {
        self.passes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ticks from the first begin to the last end; `None` for a clock that did not run, or that ran
/// backwards.
fn span_ticks(begins_and_ends: &[u64]) -> Option<u64> {
    let pairs = || begins_and_ends.chunks_exact(2);
    let begin = pairs().map(|pair| pair[0]).min()?;
    let end = pairs().map(|pair| pair[1]).max()?;
    end.checked_sub(begin).filter(|ticks| *ticks > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_reaches_from_the_first_begin_to_the_last_end() {
        assert_eq!(span_ticks(&[10, 20, 25, 40]), Some(30));
        assert_eq!(span_ticks(&[]), None);
        assert_eq!(span_ticks(&[0, 0, 0, 0]), None);
        assert_eq!(span_ticks(&[9, 3]), None);
    }
}
