//! `kyklos tune`: checks and times the kernels of a device on several shapes, and keeps the
//! fastest.

mod args;
mod case;
mod choose;
mod report;
mod rounds;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kyklos::backend::wgpu::{KernelChoice, TuningEntry, WgpuBackend, WgpuOptions};
use kyklos::machine::can_load_drivers;

pub(crate) use self::args::TuneArgs;
use self::case::{Case, cases};
use self::report::{CaseReport, Report};
use crate::activity;
use crate::devices::tuned;
use crate::devices::{self, BackendKind, DeviceId, DeviceRequest};
use crate::failure::{Failure, Result, note, print};
use crate::interrupt;
use crate::options::KernelName;
use crate::switches;

/// Runs the command.
pub(crate) fn tune(args: &TuneArgs) -> Result<()> {
    interrupt::end_on_interrupt()?;
    if switches::TUNE.is_off()? && !args.dry_run {
        return Err(Failure::request(
            "KYKLOS_TUNE=off, and what kyklos tune keeps would be ignored",
            "unset it, or use --dry-run",
        ));
    }
    let KernelName(kernel) = args.kernel;
    if let KernelChoice::Exactly(variant) = kernel {
        return Err(Failure::request(
            format!("--kernel {} leaves nothing to choose", variant.name()),
            "use auto, portable, subgroup or cooperative",
        ));
    }
    let index = device_index(args.device)?;
    let deadline = Instant::now() + Duration::from_secs(u64::from(args.budget_s.get()));
    let options = WgpuOptions { kernel, ..WgpuOptions::default() };
    let backend = WgpuBackend::with_options(index, &options)?;
    let cases = cases(args, &backend)?;
    let mut report = Report::new(index, &backend, args);
    for (number, case) in cases.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(cases.len() - number).unwrap_or(u32::MAX);
        note(&format!("{} of {}: {:?} {}", number + 1, cases.len(), case.shape, case.problem.dtype));
        activity::doing("measuring its kernels");
        let variants = backend.attend_choices(case.problem.dtype, case.problem.head_dim as usize)?;
        let measured = rounds::measure(index, &case.problem, &variants, Instant::now() + share)?;
        for wrong in measured.wrong() {
            note(&format!("WRONG RESULT on {}: {wrong}", DeviceId { kind: BackendKind::Wgpu, index }));
        }
        report.cases.push(CaseReport::new(case, measured));
    }
    report.kept_in = keep(args, &cases, &report);
    print(&if args.json { report.json()? } else { report.text() })?;
    match report.cases.iter().map(CaseReport::wrong).sum::<usize>() {
        0 => Ok(()),
        count => Err(Failure::run(format!(
            "{count} candidates gave wrong results and were not chosen: the driver or the kernel is broken"
        ))),
    }
}

/// The number of the device, which must be one that has several kernels.
fn device_index(request: DeviceRequest) -> Result<usize> {
    let one_kernel = |kind: BackendKind| {
        Failure::request(
            format!("--device {request} means {kind}, which has one kernel"),
            "use wgpu, or wgpu:0; kyklos devices lists them",
        )
    };
    if let DeviceRequest::Of(kind, _) = request
        && !kind.has_kernels()
    {
        return Err(one_kernel(kind));
    }
    if BackendKind::Wgpu.devices().is_empty() {
        return Err(Failure::refused(match BackendKind::Wgpu.left_out() {
            Some(left_out) => format!("nothing to tune: {left_out}"),
            None if can_load_drivers() => "nothing to tune: no Vulkan, Metal or DX12 driver was found, and the cpu has \
                                           one kernel: install the GPU's driver"
                .to_owned(),
            None => "nothing to tune: this program is static (musl), which loads no driver, and the cpu has one kernel: \
                     use a build for glibc"
                .to_owned(),
        }));
    }
    match devices::choose(&[request], 0)? {
        DeviceId { kind: BackendKind::Wgpu, index } => Ok(index),
        DeviceId { kind, .. } => Err(one_kernel(kind)),
    }
}

/// Keeps the winners; a built-in choice is not written where runs take it anyway. A file that
/// cannot be used is a note, not a failure.
fn keep(args: &TuneArgs, cases: &[Case], report: &Report) -> Option<PathBuf> {
    if args.dry_run {
        return None;
    }
    let Some(path) = tuned::path() else {
        note("note: the choices are not kept: this user has no cache folder: set KYKLOS_CACHE_DIR");
        return None;
    };
    // Read now, not at the start: another process may have changed the file.
    let mut table = tuned::read(&path).unwrap_or_else(|why| {
        note(&format!("note: {} is replaced: {why}", path.display()));
        Default::default()
    });
    for (case, measured) in cases.iter().zip(&report.cases) {
        match measured.chosen() {
            Some(variant) if measured.is_needed() => {
                table.set(TuningEntry { key: case.key.clone(), variant })
            }
            Some(_) => table.forget(&case.key),
            None => {}
        }
    }
    match tuned::write(&path, &table) {
        Ok(()) => Some(path),
        Err(failure) => {
            note(&format!("note: the choices are not kept: {}: set KYKLOS_CACHE_DIR", failure.text));
            None
        }
    }
}
