//! What becomes of faults of the driver and the device.

use crate::scenario::Scenario;

pub fn scenarios() -> Vec<Scenario> {
    Vec::new()
}
