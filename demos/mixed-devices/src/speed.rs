//! How fast a device computes attention.

use kyklos::{Dtype, Mask};

use crate::call::Call;
use crate::devices::OneDevice;
use crate::error::Result;

/// GFLOP/s that `device` reaches on attention: a growing number of tokens, until a run is long enough to time.
pub(crate) fn measure_gflops(device: &OneDevice) -> Result<f64> {
    let mut tokens = FIRST_TOKENS;
    loop {
        let call = Call::of_one(tokens, Dtype::F32, Mask::full())?;
        let wall_s = call.run_alone(device)?.wall_s;
        if wall_s >= LONG_ENOUGH_S || tokens >= LAST_TOKENS {
            return Ok(call.flops() / wall_s.max(1e-9) / 1e9);
        }
        tokens *= 2;
    }
}

const FIRST_TOKENS: u32 = 512;
const LAST_TOKENS: u32 = 8192;
const LONG_ENOUGH_S: f64 = 0.03;
