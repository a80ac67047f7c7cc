//! The wgpu backend against naive f64 attention, on the first device that it finds, with every kernel that the device
//! can run; on Mesa's software driver also with the other subgroup sizes.
//!
//! Without a driver the tests are reported as ignored; `KYKLOS_REQUIRE_GPU=1` makes that a failure.

#![expect(
    clippy::unwrap_used,
    reason = "a test: without the standard harness clippy does not see that it is one"
)]

mod cases;
mod decode;
mod naive;
mod ops;
mod tuning;

use std::process::Command;

use kyklos::backend::DeviceClass;
use kyklos::backend::wgpu::{KernelChoice, WgpuBackend, WgpuOptions};
use libtest_mimic::{Arguments, Failed, Trial};

type Test = fn(&WgpuBackend);

/// Mesa's software driver makes its subgroups as wide as this says, in bits.
const WIDTH: &str = "LP_NATIVE_VECTOR_WIDTH";

fn main() {
    let arguments = Arguments::from_args();
    let devices = WgpuBackend::enumerate();
    let Some(device) = devices.first() else {
        let required = std::env::var_os("KYKLOS_REQUIRE_GPU").is_some_and(|value| value == "1");
        let trial = Trial::test("no wgpu device: install a Vulkan, Metal or DX12 driver", move || {
            if required {
                Err(Failed::from("KYKLOS_REQUIRE_GPU=1, and there is no wgpu device"))
            } else {
                Ok(())
            }
        });
        libtest_mimic::run(&arguments, vec![trial.with_ignored_flag(!required)]).exit();
    };
    let mut choices = vec![("portable", KernelChoice::Portable)];
    if device.kernel.starts_with("subgroup") {
        choices.push(("subgroup", KernelChoice::SubgroupBroadcast));
    }
    if open(KernelChoice::Cooperative, None).is_ok() {
        choices.push(("cooperative", KernelChoice::Cooperative));
    }
    let tests: Vec<(&str, Test)> = [cases::ALL, decode::ALL, ops::ALL].concat();
    let mut trials = Vec::new();
    for (kernel, choice) in choices {
        for (name, test) in &tests {
            let test = *test;
            trials.push(Trial::test(format!("{kernel}::{name}"), move || {
                test(&open(choice, None)?);
                Ok(())
            }));
        }
        trials.push(Trial::test(format!("{kernel}::tensors_beyond_one_binding_equal_f64"), move || {
            let small = open(choice, Some(65536))?;
            cases::tensors_beyond_one_binding_equal_f64(&small);
            decode::keys_beyond_one_binding_decode_as_f64_does(&small);
            Ok(())
        }));
    }
    trials.extend(tuning::ALL.map(|(name, test)| Trial::test(format!("tuning::{name}"), test)));
    if device.class == DeviceClass::SoftwareGpu && std::env::var_os(WIDTH).is_none() {
        let others = [("128", 4), ("256", 8), ("512", 16)]
            .into_iter()
            .filter(|(_, size)| !device.kernel.ends_with(&format!("-{size}")));
        for (bits, _) in others {
            trials.push(Trial::test(format!("subgroups of {bits} bits"), move || passes_with_width(bits)));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn open(kernel: KernelChoice, max_binding_bytes: Option<u64>) -> Result<WgpuBackend, Failed> {
    let options = WgpuOptions { kernel, max_binding_bytes, ..WgpuOptions::default() };
    WgpuBackend::with_options(0, &options).map_err(|error| Failed::from(error.to_string()))
}

/// Runs the main subgroup tests in a process of their own: the driver reads the width once.
fn passes_with_width(bits: &str) -> Result<(), Failed> {
    let output = Command::new(std::env::current_exe()?)
        .args(["subgroup::every", "--test-threads=1"])
        .env(WIDTH, bits)
        .output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(Failed::from(format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )))
}
