//! The wgpu backend against naive f64 attention, on the first device that it finds, with every
//! kernel that the device can run; on Mesa's software driver also with the other subgroup sizes.
//!
//! Without a driver the tests are reported as ignored; `KYKLOS_REQUIRE_GPU=1` makes that a failure.

#![expect(
    clippy::unwrap_used,
    reason = "a test: without the standard harness clippy does not see that it is one"
)]

#[path = "../../../tests/amount.rs"]
mod amount;
mod backward;
mod case;
mod cases;
mod decode;
mod device;
#[cfg(target_os = "linux")]
mod driver;
mod naive;
mod ops;
mod own_device;
mod pool;
mod tuning;

use std::ffi::OsString;
use std::process::{Command, ExitCode, Output};

use kyklos::backend::wgpu::{AttendVariant, KernelChoice, Probe, WgpuBackend, WgpuOptions};
use kyklos::backend::{Backend, DeviceClass};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

type Test = fn(&WgpuBackend);

/// The width in bits of the subgroups of Mesa's software driver.
const WIDTH: &str = "LP_NATIVE_VECTOR_WIDTH";
/// Required kernels: prefixes of their names, separated by commas. If one is missing, or if no
/// kernel ran, this program fails.
const REQUIRED: &str = "KYKLOS_REQUIRE_KERNELS";
/// Set in the child processes of this program. The value is the purpose of the child.
const CHILD: &str = "KYKLOS_TEST_CHILD";

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let devices = WgpuBackend::enumerate();
    let Some(first) = devices.first() else {
        let required = std::env::var_os("KYKLOS_REQUIRE_GPU").is_some_and(|value| value == "1");
        let trial = Trial::test("no wgpu device: install a Vulkan, Metal or DX12 driver", move || {
            if required {
                Err(Failed::from("KYKLOS_REQUIRE_GPU=1, and there is no wgpu device"))
            } else {
                Ok(())
            }
        });
        return libtest_mimic::run(&arguments, vec![trial.with_ignored_flag(!required)]).exit_code();
    };
    let (kernels, missing) = kernels();
    for kernel in &missing {
        eprintln!("{REQUIRED}: {} ({}) has no kernel {kernel}", first.name, first.driver);
    }
    if !missing.is_empty() {
        return ExitCode::FAILURE;
    }
    let tests: Vec<(&str, Test)> = [cases::ALL, decode::ALL, backward::ALL, ops::ALL, device::ALL].concat();
    let mut trials = Vec::new();
    for (kernel, choice) in kernels {
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
            ops::row_statistics_beyond_one_binding_equal_f64(&small);
            Ok(())
        }));
    }
    // Those that the built-in choice takes on some GPU, or that a tuner may take.
    trials.extend(AttendVariant::portable_choices(false).map(|variant| {
        Trial::test(format!("{}::equals_f64_and_keeps_nan_in_its_rows", variant.name()), move || {
            let backend = open(KernelChoice::Exactly(variant), None)?;
            cases::every_variant_equals_f64(&backend);
            cases::nan_reaches_exactly_the_rows_that_see_it(&backend);
            // Each form of gradients goes with one of these.
            backward::every_gradient_of_strided_tensors_equals_f64(&backend);
            backward::nan_reaches_exactly_the_gradients_of_the_pairs_that_have_it(&backend);
            Ok(())
        })
    }));
    let mut shuffled =
        AttendVariant::portable_choices(true).zip(AttendVariant::portable_choices(false)).peekable();
    if shuffled.peek().is_some_and(|(variant, _)| open(KernelChoice::Exactly(*variant), None).is_ok()) {
        trials.extend(shuffled.map(|(variant, without)| {
            Trial::test(format!("{}::equals_f64_and_changes_no_bit", variant.name()), move || {
                let backend = open(KernelChoice::Exactly(variant), None)?;
                cases::every_variant_equals_f64(&backend);
                cases::nan_reaches_exactly_the_rows_that_see_it(&backend);
                cases::shuffles_change_no_bit(&backend, &open(KernelChoice::Exactly(without), None)?);
                Ok(())
            })
        }));
    }
    // The subgroups of Mesa's software driver as all and as half of those that a variant is for.
    for name in ["8x8-8x2", "8x8-8x4", "8x8-4-8x1", "8x8-4-8x2", "8x8-8-16x1", "8x8-8-16x2"] {
        let variant = format!("cooperative-{name}").parse().expect("the name of a variant");
        if open(KernelChoice::Exactly(variant), None).is_ok() {
            trials.push(Trial::test(format!("cooperative-{name}::shares_rows"), move || {
                let backend = open(KernelChoice::Exactly(variant), None)?;
                cases::every_sharing_of_matrices_equals_f64(&backend);
                for dim in cases::head_dims(&[16, 24]) {
                    backward::gradients_of_any_size_equal_f64(&backend, dim);
                }
                Ok(())
            }));
        }
    }
    // Gradients in tiles as GPUs have them: 64 fixed rows, and 16 moving rows at a time.
    for (name, dim) in [("8x8-8x16", 16), ("8x8-8x8", 128)] {
        let variant = format!("cooperative-{name}").parse().expect("the name of a variant");
        if open(KernelChoice::Exactly(variant), None).is_ok() {
            trials.push(Trial::test(format!("cooperative-{name}::gradients"), move || {
                let backend = open(KernelChoice::Exactly(variant), None)?;
                for dim in cases::head_dims(&[dim]) {
                    backward::gradients_of_any_size_equal_f64(&backend, dim);
                }
                Ok(())
            }));
        }
    }
    if open(KernelChoice::Cooperative, None).is_ok() {
        type Measure = fn(&WgpuBackend, usize) -> kyklos::Result<Option<Probe>>;
        let probes: [(&str, Measure); 2] =
            [("a_probe", WgpuBackend::probe), ("a_probe_of_gradients", WgpuBackend::probe_backward)];
        trials.extend(probes.map(|(name, measure)| {
            Trial::test(format!("cooperative::{name}_finds_agreement_and_times"), move || {
                tuning::a_probe_finds_agreement_and_times(
                    &open(KernelChoice::Cooperative, None)?,
                    &open(KernelChoice::Portable, None)?,
                    measure,
                );
                Ok(())
            })
        }));
    }
    trials.extend(tuning::ALL.map(|(name, test)| Trial::test(format!("tuning::{name}"), test)));
    trials.extend(own_device::ALL.map(|(name, test)| {
        Trial::test(format!("own_device::{name}"), move || {
            test();
            Ok(())
        })
    }));
    trials.extend(pool::ALL.map(|(name, test)| {
        Trial::test(format!("pool::{name}"), move || {
            test();
            Ok(())
        })
    }));
    let child = std::env::var(CHILD).ok();
    if first.class == DeviceClass::SoftwareGpu && child.is_none() {
        let others = [("128", 4), ("256", 8), ("512", 16)]
            .into_iter()
            .filter(|(_, size)| !first.kernel.ends_with(&format!("-{size}")));
        for (bits, size) in others {
            trials.push(Trial::test(format!("subgroups of {bits} bits"), move || {
                passes_with_width(bits, size)
            }));
        }
    }
    if child.as_deref() == Some(NO_MEMORY) {
        trials.push(Trial::ignorable_test(NO_MEMORY, || {
            Ok(device::memory_that_the_driver_has_not_is_an_error(&open(KernelChoice::Auto, None)?))
        }));
    } else if first.class == DeviceClass::SoftwareGpu && cfg!(target_os = "linux") && child.is_none() {
        trials.push(Trial::ignorable_test("no memory left", passes_with_little_memory));
    }
    #[cfg(target_os = "linux")]
    match child.as_deref() {
        None => trials.push(Trial::test("the last device", passes_with_the_last_device)),
        Some(LAST_DEVICE) => trials.push(Trial::test(LAST_DEVICE, || {
            driver::a_driver_stays_loaded_when_its_last_device_is_closed(open(KernelChoice::Auto, None)?);
            Ok(())
        })),
        Some(_) => {}
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    if std::env::var_os(REQUIRED).is_some()
        && !arguments.list
        && conclusion.num_passed + conclusion.num_failed == 0
    {
        eprintln!("{REQUIRED}: nothing ran");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

/// The kernels that the first device can run, and the required kernels that it cannot run.
fn kernels() -> (Vec<(&'static str, KernelChoice)>, Vec<String>) {
    let mut choices = vec![
        ("portable", KernelChoice::Portable),
        ("subgroup", KernelChoice::SubgroupBroadcast),
        ("cooperative", KernelChoice::Cooperative),
    ];
    let mut names = Vec::new();
    choices.retain(|(_, choice)| match open(*choice, None) {
        Ok(backend) => {
            names.push(backend.info().kernel.clone());
            true
        }
        Err(_) => false,
    });
    let required = std::env::var(REQUIRED).unwrap_or_default();
    let required = required.split(',').filter(|kernel| !kernel.is_empty());
    let is_missing = |kernel: &&str| !names.iter().any(|name| name.starts_with(kernel));
    (choices, required.filter(is_missing).map(str::to_owned).collect())
}

fn open(kernel: KernelChoice, max_binding_bytes: Option<u64>) -> Result<WgpuBackend, Failed> {
    let options = WgpuOptions { kernel, max_binding_bytes, cache: None, ..WgpuOptions::default() };
    WgpuBackend::with_options(0, &options).map_err(|error| Failed::from(error.to_string()))
}

/// Runs the main subgroup tests in a separate process, because the driver reads the width only
/// once.
fn passes_with_width(bits: &str, size: u32) -> Result<(), Failed> {
    let mut command = myself(&[])?;
    command.args(["subgroup::every", "--test-threads=1"]).env(WIDTH, bits).env(CHILD, "width");
    // A sampled run tests the larger head dims only at the driver's own width.
    if let Some(most) = amount::amount(Some("32"), None) {
        command.env("KYKLOS_TEST_MOST_HEAD_DIM", most);
    }
    // Required even if the driver does not make such subgroups. Otherwise no kernel would run, and no
    // test would fail.
    passed(&command.env(REQUIRED, format!("subgroup-broadcast-{size}")).output()?)
}

#[cfg(target_os = "linux")]
const LAST_DEVICE: &str = "a_driver_stays_loaded_when_its_last_device_is_closed";

/// Runs the test of a closed device in a separate process, in which no other device is open.
#[cfg(target_os = "linux")]
fn passes_with_the_last_device() -> Result<(), Failed> {
    let mut command = myself(&[])?;
    let output =
        command.args(["--exact", LAST_DEVICE]).env(CHILD, LAST_DEVICE).env_remove(REQUIRED).output()?;
    passed(&output)?;
    let said = String::from_utf8_lossy(&output.stdout);
    if said.contains(" 1 passed") {
        Ok(())
    } else {
        Err(Failed::from(format!("the test did not run: {said}")))
    }
}

const NO_MEMORY: &str = "memory_that_the_driver_has_not_is_an_error";

/// Runs the test of a driver without memory in a separate process with a memory limit.
fn passes_with_little_memory() -> Result<Completion, Failed> {
    // In KiB: the mappings of the driver and its compiler, and two of the buffers that the test makes.
    let limited = ["/bin/sh", "-c", "ulimit -v 6000000 && exec \"$@\"", "sh"];
    let mut command = myself(&limited)?;
    let output =
        command.args([NO_MEMORY, "--test-threads=1"]).env(CHILD, NO_MEMORY).env_remove(REQUIRED).output()?;
    passed(&output)?;
    let said = String::from_utf8_lossy(&output.stdout);
    if said.contains(" 1 passed") {
        Ok(Completion::Completed)
    } else if said.contains(" 1 ignored") {
        Ok(Completion::ignored_with("this driver takes memory when it is written, not when it is asked for"))
    } else {
        Err(Failed::from(format!("the test did not run: {said}")))
    }
}

/// This program, started by the program and arguments in `before`.
///
/// If a loader is called by name, as in the `run` of an unpacked driver, the executable of this
/// process is the loader. Then `KYKLOS_RUNNER` names the command that starts programs.
fn myself(before: &[&str]) -> Result<Command, Failed> {
    let mut words: Vec<OsString> = before.iter().map(OsString::from).collect();
    match std::env::var_os("KYKLOS_RUNNER") {
        Some(runner) => {
            words.push(runner);
            words.push(std::env::args_os().next().ok_or("this program was started without a name")?);
        }
        None => words.push(std::env::current_exe()?.into()),
    }
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    Ok(command)
}

fn passed(output: &Output) -> Result<(), Failed> {
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
