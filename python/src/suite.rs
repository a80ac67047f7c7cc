//! The suite that holds backends to their contract, on a device of PyTorch.

use kyklos::backend::Device;
use kyklos_backend_suite::conformance::checks;
use kyklos_backend_suite::resident::{caches_stay_on_the_device, layers_stay_on_the_device};
use pyo3::prelude::*;

use crate::torch_device::TorchBackend;

const CACHED: &str = "keeps a cache on the device";
const RESIDENT: &str = "keeps layers on the device";

/// The claims.
#[pyfunction]
pub(crate) fn claims() -> Vec<&'static str> {
    checks::<Device>().into_iter().map(|(claim, _)| claim).chain([CACHED, RESIDENT]).collect()
}

/// Checks a claim on a device of PyTorch. A claim that does not hold is a panic, which Python sees
/// as an exception.
#[pyfunction]
pub(crate) fn check(py: Python<'_>, device: &str, claim: &str) {
    py.detach(|| {
        let open = || TorchBackend::open(device).unwrap_or_else(|error| panic!("{error}"));
        match claim {
            CACHED => caches_stay_on_the_device(open()),
            RESIDENT => layers_stay_on_the_device(open(), 6),
            _ => {
                let found = checks::<Device>().into_iter().find(|(name, _)| *name == claim);
                let (_, check) = found.unwrap_or_else(|| panic!("no claim {claim:?}"));
                pollster::block_on(check(&Device::new(open()), "torch"));
            }
        }
    });
}
