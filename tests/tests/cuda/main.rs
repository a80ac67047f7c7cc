//! The CUDA backend on the fake driver: the conformance suite of all backends, driver faults,
//! kernel choice, graphs, tensors of a caller, NCCL, copies between devices, and options for tests
//! of a new device.
//!
//! Each trial is a process of its own that finds the fake driver as its CUDA driver: this program,
//! with the name of the scenario in the environment. So a destroyed context affects no other trial,
//! and objects that are not freed are found at exit.
//!
//! Linux only, as the emulator in the fake driver is.

#![expect(clippy::unwrap_used, reason = "a check that cannot go on fails")]

#[cfg(target_os = "linux")]
mod caller;
#[cfg(target_os = "linux")]
mod faults;
#[cfg(target_os = "linux")]
mod gradients;
#[cfg(target_os = "linux")]
mod graphs;
#[cfg(target_os = "linux")]
mod kernel_choice;
#[cfg(target_os = "linux")]
mod nccl;
#[cfg(target_os = "linux")]
mod peers;
#[cfg(target_os = "linux")]
mod refusals;
#[cfg(target_os = "linux")]
mod scenario;
#[cfg(target_os = "linux")]
mod steps;
#[cfg(target_os = "linux")]
mod switches;

#[cfg(target_os = "linux")]
fn main() {
    let scenarios = [
        scenario::suite(),
        kernel_choice::scenarios(),
        faults::scenarios(),
        refusals::scenarios(),
        gradients::scenarios(),
        graphs::scenarios(),
        caller::scenarios(),
        nccl::scenarios(),
        peers::scenarios(),
        steps::scenarios(),
        switches::scenarios(),
    ]
    .concat();
    if let Some(name) = std::env::var_os(scenario::CHOSEN) {
        let chosen = scenarios.iter().find(|scenario| scenario.name.as_str() == name).unwrap();
        return (chosen.run)();
    }
    let arguments = libtest_mimic::Arguments::from_args();
    let trials = scenarios.into_iter().map(scenario::Scenario::trial).collect();
    libtest_mimic::run(&arguments, trials).exit();
}

#[cfg(not(target_os = "linux"))]
fn main() {}
