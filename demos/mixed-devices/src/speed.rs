//! How fast a device computes attention.

use std::sync::Arc;

use kyklos::simulate::Capacity;
use kyklos::{Dtype, Mask, SystemClock};

use crate::call::problem;
use crate::devices::OneDevice;
use crate::error::Result;

/// What `device` can do with calls like those of this demonstration.
pub(crate) fn measure(device: &OneDevice) -> Result<Capacity> {
    let like = problem(1, Dtype::F32, Mask::full())?;
    Ok(pollster::block_on(device.device.measure(&like, Arc::new(SystemClock::new())))?)
}
