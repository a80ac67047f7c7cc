//! The CUDA backend on the fake driver: the suite of all backends, and what becomes of faults.
//!
//! Each trial is a process of its own, for which the fake driver is the only one: this program, told by the environment
//! which scenario to play. A driver that was broken on purpose stays broken, and what was left behind shows at the end.
//!
//! Linux only: the emulator under the fake driver asks for more than others have.

#![expect(unreachable_pub, reason = "`common` is shared by several suites")]
#![expect(clippy::unwrap_used, reason = "a check that cannot go on fails")]

#[path = "../common/mod.rs"]
mod common;
#[cfg(target_os = "linux")]
mod faults;
#[cfg(target_os = "linux")]
mod graphs;
#[cfg(target_os = "linux")]
mod kernel_choice;
#[cfg(target_os = "linux")]
mod scenario;

#[cfg(target_os = "linux")]
fn main() {
    let scenarios =
        [scenario::suite(), kernel_choice::scenarios(), faults::scenarios(), graphs::scenarios()].concat();
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
