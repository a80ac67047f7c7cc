//! `kyklos tune`: the kernels that a device has for its shapes, checked, timed against each other, and the choice kept.

mod choose;
mod report;
mod rounds;

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use kyklos::backend::wgpu::{KernelChoice, TuningEntry, TuningKey, WgpuBackend, WgpuOptions};
use kyklos::backend::{Backend, DeviceClass};
use kyklos::{AttentionProblem, Dtype, Mask};

use crate::devices::tuned;
use crate::devices::{self, DeviceId, DeviceRequest};
use crate::failure::{Failure, Result, note, print};
use crate::interrupt;
use crate::options::{KernelName, ListItem, Shape};
use crate::run::resident::state_shape;
use crate::switches;
use report::{CaseReport, Report};

/// What is tuned.
#[derive(Clone, Debug, Args)]
pub(crate) struct TuneArgs {
    /// wgpu, the best there is, or one by number (wgpu:1)
    #[arg(long, value_name = "D", default_value = "wgpu")]
    device: DeviceRequest,
    /// Among which kernels: auto, portable, subgroup, cooperative. A choice made under a name other than auto is used only where
    /// that name is given
    #[arg(long, value_name = "K", default_value = "auto", value_parser = KernelName::item)]
    kernel: KernelName,
    /// f32, f16, bf16; may be given again
    #[arg(long, value_name = "NAME", default_values = ["f32", "f16"])]
    dtype: Vec<Dtype>,
    /// Elements of a head; may be given again [default: 64 and 128]
    #[arg(long, value_name = "D", conflicts_with = "shape")]
    head_dim: Vec<u32>,
    /// Batch, tokens, query heads, kv heads, head dim; may be given again [default: 1,1024,8,8,D for each head dim, and on
    /// hardware also 128 and 8192 tokens]
    #[arg(long, value_name = "B,S,HQ,HKV,D")]
    shape: Vec<Shape>,
    /// Seconds that it may take; shapes for which there is no time keep the choice that they have
    #[arg(long, value_name = "N", default_value = "60")]
    budget_s: NonZeroU32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Keep nothing
    #[arg(long)]
    dry_run: bool,
}

/// One shape in one dtype.
struct Case {
    problem: AttentionProblem,
    shape: [u32; 5],
    key: TuningKey,
}

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
        let variants = backend.attend_choices(case.problem.dtype, case.problem.head_dim as usize)?;
        let measured = rounds::measure(index, &case.problem, &variants, Instant::now() + share)?;
        for wrong in measured.wrong() {
            note(&format!("WRONG RESULT on {}: {wrong}", DeviceId::Wgpu(index)));
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

/// The device, which must be one that has several kernels.
fn device_index(request: DeviceRequest) -> Result<usize> {
    let one_kernel = |what: &str| {
        Failure::request(
            format!("--device {request} is {what}, which has one kernel"),
            "use wgpu, or wgpu:0; kyklos devices lists them",
        )
    };
    if let DeviceRequest::Cuda(_) = request {
        return Err(one_kernel("CUDA"));
    }
    let none = !devices::has_wgpu();
    if none && request != DeviceRequest::Cpu {
        return Err(Failure::run(
            "nothing to tune: no Vulkan, Metal or DX12 driver was found, and the cpu has one kernel: install the \
             GPU's driver",
        ));
    }
    match devices::choose(&[request], 0)? {
        DeviceId::Wgpu(index) => Ok(index),
        DeviceId::Cpu => Err(one_kernel("the cpu here")),
        DeviceId::Cuda(_) => Err(one_kernel("CUDA")),
    }
}

fn cases(args: &TuneArgs, backend: &WgpuBackend) -> Result<Vec<Case>> {
    let mut shapes: Vec<[u32; 5]> = args.shape.iter().map(|Shape(shape)| *shape).collect();
    if shapes.is_empty() {
        let software = backend.info().class == DeviceClass::SoftwareGpu;
        let tokens = if software { &TOKENS[..1] } else { &TOKENS[..] };
        let dims = if args.head_dim.is_empty() { &HEAD_DIMS[..] } else { &args.head_dim };
        shapes
            .extend(dims.iter().flat_map(|dim| tokens.iter().map(|tokens| [1, *tokens, HEADS, HEADS, *dim])));
    }
    let mut cases: Vec<Case> = Vec::new();
    for shape in shapes {
        for dtype in &args.dtype {
            let problem = AttentionProblem::new(shape, *dtype, MASK.parse::<Mask>()?)?;
            let key = backend.tuning_key(*dtype, state_shape(&problem))?;
            if let Some(same) = cases.iter().find(|case| case.key == key) {
                return Err(Failure::request(
                    format!("shapes {:?} and {shape:?} in {dtype} share one choice", same.shape),
                    "leave one out",
                ));
            }
            cases.push(Case { problem, shape, key });
        }
    }
    Ok(cases)
}

/// Keeps the winners; where the built-in choice won, nothing is needed. A file that cannot be used is no failure.
fn keep(args: &TuneArgs, cases: &[Case], report: &Report) -> Option<PathBuf> {
    if args.dry_run {
        return None;
    }
    let Some(path) = tuned::path() else {
        note("note: the choices are not kept: this user has no cache folder: set KYKLOS_CACHE_DIR");
        return None;
    };
    // Read now, not at the start: another program may have added to it.
    let mut table = tuned::read(&path).unwrap_or_else(|why| {
        note(&format!("note: {} is replaced: {why}", path.display()));
        Default::default()
    });
    for (case, measured) in cases.iter().zip(&report.cases) {
        match measured.chosen() {
            Some(variant) if measured.displaces() => {
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

const HEAD_DIMS: [u32; 2] = [64, 128];
/// Shapes that fill devices hardly, well and fully. The first is enough for a few cores, and the last would take them
/// minutes.
const TOKENS: [u32; 3] = [1024, 128, 8192];
const HEADS: u32 = 8;
/// Its tiles are full and partial: both loops of a kernel are timed and checked.
const MASK: &str = "causal";
