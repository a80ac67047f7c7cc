//! One attention call, shared by every device of this machine, checked against f64.
//!
//! The devices form a ring. Each rank holds some of the tokens, as many as its measured speed
//! allows, and attends from its own queries to all keys and values, which travel round the ring.
//! The result is exact.
#![forbid(unsafe_code)]

mod call;
mod devices;
mod error;
mod speed;
mod verify;

use std::io::Write;
use std::process::ExitCode;

use call::{Call, gflops};
use devices::{OneDevice, choose};
use error::Result;
use kyklos::simulate::Capacity;
use speed::measure;

fn main() -> ExitCode {
    give_a_runtime_folder();
    match demonstrate(&mut std::io::stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the demonstration and writes what it finds to `out`.
fn demonstrate(out: &mut dyn Write) -> Result<()> {
    writeln!(out, "Exact attention over one sequence that is split across devices.")?;
    writeln!(out, "Looking for devices and measuring their speed ...\n")?;
    out.flush()?;

    let choice = choose();
    for note in &choice.notes {
        writeln!(out, "{note}")?;
    }
    let mut ranks = Vec::new();
    for device in choice.devices {
        match measure(&device) {
            Ok(capacity) => ranks.push((device, capacity)),
            // A broken driver of one device does not end the demonstration on the others.
            Err(error) => writeln!(out, "{device} is left out: {error}")?,
        }
    }
    let (devices, capacities): (Vec<OneDevice>, Vec<Capacity>) = ranks.into_iter().unzip();
    let gflops: Vec<f64> = capacities.iter().map(gflops).collect();
    let call = Call::new(&capacities)?;
    writeln!(out, "{}", call.description())?;
    out.flush()?;

    let together = call.run(&devices)?;
    writeln!(
        out,
        "rank  device                                   measured  tokens  computed    waited      sent"
    )?;
    for (rank, device) in devices.iter().enumerate() {
        let report = &together.reports[rank];
        writeln!(
            out,
            "{rank:>4}  {:<36}  {:>5.0} GFLOP/s  {:>6}  {:>5.0} ms  {:>5.0} ms  {:>4.1} MiB",
            device.to_string(),
            gflops[rank],
            report.tokens,
            milliseconds(report.compute_ns),
            milliseconds(report.wait_ns),
            report.bytes_sent as f64 / f64::from(1 << 20),
        )?;
    }
    out.flush()?;

    let fastest = (0..devices.len()).max_by(|a, b| gflops[*a].total_cmp(&gflops[*b])).unwrap_or_default();
    let alone = call.run_alone(&devices[fastest])?;
    let verdict = verify::verify(&call, &together, &alone)?;
    writeln!(
        out,
        "\nexact      {} rows agree with attention in f64: largest error {:.1e}, allowed {:.1e}",
        verdict.rows, verdict.max_abs_error, verdict.tolerance
    )?;
    let ratio = alone.wall_s / together.wall_s.max(1e-9);
    writeln!(
        out,
        "time       {:.0} ms together, {:.0} ms on {} alone: {ratio:.2} x as fast",
        together.wall_s * 1e3,
        alone.wall_s * 1e3,
        devices[fastest],
    )?;
    let sum: f64 = gflops.iter().sum();
    writeln!(
        out,
        "           The speeds measured before predict {:.2} x: the sum of all devices over the fastest one.",
        sum / gflops[fastest].max(1e-9)
    )?;
    match verdict.failure {
        Some(failure) => Err(failure.into()),
        None => Ok(()),
    }
}

/// Without `XDG_RUNTIME_DIR`, software Vulkan drivers print a complaint. The variable must be set
/// before the process starts, so this process starts itself again.
fn give_a_runtime_folder() {
    #[cfg(target_os = "linux")]
    if std::env::var_os("XDG_RUNTIME_DIR").is_none()
        && let Ok(program) = std::env::current_exe()
    {
        use std::os::unix::process::CommandExt;
        // Returns only on failure; then the drivers complain, which is harmless.
        let _ = std::process::Command::new(program).env("XDG_RUNTIME_DIR", std::env::temp_dir()).exec();
    }
}

#[expect(clippy::cast_precision_loss, reason = "printed with three digits")]
fn milliseconds(ns: u64) -> f64 {
    ns as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demonstration_shares_one_call_and_shows_time_and_error() {
        let mut out = Vec::new();
        demonstrate(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        for words in
            ["GFLOP/s", "   0  ", "   1  ", "rows agree with attention in f64", "x as fast", "predict"]
        {
            assert!(text.contains(words), "`{words}` is missing in:\n{text}");
        }
    }
}
