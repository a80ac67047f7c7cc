//! One suite for the `Backend` seam, run over every backend that this machine has.
//!
//! A backend that cannot run here is reported as ignored with its reason, and fails under `KYKLOS_REQUIRE_GPU=1`.

#![expect(unreachable_pub, reason = "`common` is shared by several suites")]

mod common;

use kyklos::backend::Backend;
use kyklos::backend::cpu::CpuBackend;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let arguments = Arguments::from_args();
    let trials = suite("cpu", || Ok(CpuBackend::new()));
    libtest_mimic::run(&arguments, trials).exit();
}

/// The suite for one backend; `make` says why when the backend cannot be made.
fn suite<B: Backend + 'static>(
    who: &'static str,
    make: impl Fn() -> Result<B, String> + Clone + Send + 'static,
) -> Vec<Trial> {
    let checks = common::conformance::checks::<B>();
    let trials = checks.into_iter().map(|(claim, check)| {
        let make = make.clone();
        Trial::test(format!("{who}: {claim}"), move || {
            let backend = make().map_err(Failed::from)?;
            check(&backend, who);
            Ok(())
        })
    });
    trials.collect()
}
