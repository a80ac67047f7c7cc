//! Waiting for copies to other devices.

use std::time::{Duration, Instant};

use kyklos::Result;

use crate::device::memory::memory_pool::CudaBuffer;

const SHORTEST_SLEEP: Duration = Duration::from_micros(10);
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// Waits on the host until no other device reads what is to be written. A stream must not wait for
/// another device: if that one hangs, its own device would count as stuck, and an event of a lost
/// device takes the one that waits for it along.
///
/// # Errors
/// That of the other device, if it does not end within `at_most`.
pub(super) fn await_other_devices(writes: &[&CudaBuffer], at_most: Duration) -> Result<()> {
    let start = Instant::now();
    for buffer in writes {
        loop {
            let Some(other) = buffer.allocation().accesses().reader_elsewhere() else { break };
            let waited = start.elapsed();
            if waited > at_most {
                let native = format!("it has not ended after {:.1} s", waited.as_secs_f32());
                return Err(other.device_error("copy from another device", &native));
            }
            std::thread::sleep((waited / 16).clamp(SHORTEST_SLEEP, LONGEST_SLEEP));
        }
    }
    Ok(())
}
