//! `kyklos bench`: attention kernels on resident data, timed and checked.

pub(crate) mod against;
mod args;
mod device_time;
mod line;
mod plans;
mod shared;
pub(crate) mod strategies;

use std::time::{Duration, Instant};

use kyklos::backend::wgpu::KernelChoice;
use kyklos::backend::{Backend, Control, Device, KernelTime};
use kyklos::{AttentionProblem, Dtype, Mask};

use self::against::Times;
pub(crate) use self::args::{BenchArgs, BenchCommand};
use self::device_time::DeviceTime;
use self::line::{EveryRow, Line, Measured, json, text};
use crate::activity;
use crate::devices::{self, BackendKind, DeviceId, let_in_nowhere};
use crate::failure::{Failure, Result, note, print};
use crate::median::median;
use crate::options::{KernelName, List, Shape};
use crate::run::resident::{Resident, state_shape};
use crate::tensors::Source;
use crate::verify::{Sample, Verdict, Whole};

/// The times of a right result.
struct Checked {
    first_ms: f64,
    times_ms: Vec<f64>,
    /// The kernels of each timed run, by the clock of the device.
    kernels: Vec<Vec<KernelTime>>,
    /// The largest error, and how large it may be.
    held: Option<[f64; 2]>,
    every_row: Option<EveryRow>,
}

/// Runs the command.
pub(crate) fn bench(args: &BenchArgs) -> Result<()> {
    match &args.command {
        Some(BenchCommand::Strategies(args)) => strategies::strategies(args),
        Some(BenchCommand::Plans(args)) => plans::plans(args),
        None => kernels(args),
    }
}

/// Times single kernels.
fn kernels(args: &BenchArgs) -> Result<()> {
    let List(requests) = &args.device;
    let mut devices = Vec::new();
    for place in 0..requests.len() {
        let device = devices::choose(requests, place)?;
        if device.kind == BackendKind::Tab {
            return Err(let_in_nowhere());
        }
        if !devices.contains(&device) {
            devices.push(device);
        }
    }
    if args.verify && args.dtype.contains(&Dtype::F32) {
        return Err(Failure::request(
            "--verify with f32: it compares the other types with f32".to_owned(),
            "add --dtype f16 or --dtype bf16; a sample of f32 rows is always compared with the oracle"
                .to_owned(),
        ));
    }
    let cases = cases(args)?;
    if args.ranks.is_some() {
        return shared::bench(args, &devices, &cases);
    }
    if !args.against.is_empty() {
        return bench_against(args, &devices, &cases);
    }
    let mut lines = Vec::new();
    for device in devices {
        let mut seen = Vec::new();
        for kernel in &args.kernel.0 {
            match open(device, *kernel) {
                // `auto` may be one of the other kernels: it is not timed twice.
                Ok(backend) if seen.contains(&backend.info().kernel) => {}
                Ok(backend) => {
                    seen.push(backend.info().kernel.clone());
                    lines.extend(cases.iter().map(|case| case.line(device, &backend, args)));
                }
                Err(failure) => lines.extend(cases.iter().map(|case| {
                    let info = device.describe();
                    case.empty_line(device, (info.name, info.driver, kernel.to_string()), &failure)
                })),
            }
        }
    }
    print(&if args.json { json(&lines)? } else { text(&lines) })?;
    match lines.iter().filter(|line| line.error.is_some()).count() {
        0 => Ok(()),
        count => Err(Failure::run(format!("{count} of {} combinations were not measured", lines.len()))),
    }
}

/// Times one device and kernel in turns with other programs.
fn bench_against(args: &BenchArgs, devices: &[DeviceId], cases: &[Case]) -> Result<()> {
    let (&[device], &[kernel]) = (devices, &args.kernel.0[..]) else {
        return Err(Failure::request(
            format!("--against with {} devices and {} kernels", devices.len(), args.kernel.0.len()),
            "name one of each",
        ));
    };
    let backend = open(device, kernel)?;
    let info = backend.info();
    let (repeat, rounds) = (args.repeat.get(), args.rounds.get());
    let mut comparisons = Vec::new();
    for case in cases {
        let text = if args.backward { case.text() + ",backward" } else { case.text() };
        comparisons.push(against::compare(text, &args.against, rounds, repeat, || {
            note(&format!("kyklos {}", case.text()));
            let Checked { first_ms, times_ms, kernels, held, .. } = Check { case, args }.on(&backend)?;
            let [max_abs_error, tolerance] = held.unwrap_or([0.0, f64::INFINITY]);
            let device_ms =
                kernels.iter().any(|run| !run.is_empty()).then(|| device_time::all_ms(&kernels).collect());
            Ok((Times { first_ms, times_ms, device_ms, max_abs_error }, tolerance))
        })?);
    }
    if args.json {
        return print(&json(&comparisons)?);
    }
    print(&format!(
        "{} ({}), {}; data resident; {rounds} rounds of {repeat} calls, programs in turns; ratio: their time over ours\n\n{}",
        info.name,
        info.driver,
        info.kernel,
        against::text(&comparisons)
    ))
}

fn open(device: DeviceId, KernelName(kernel): KernelName) -> Result<Device> {
    if !device.kind.has_kernels() && kernel != KernelChoice::Auto {
        return Err(Failure::request(format!("{device} has one kernel"), "use --kernel auto"));
    }
    device.open_with(kernel)
}

/// A shape, mask and dtype.
struct Case {
    problem: AttentionProblem,
    shape: [u32; 5],
    mask: Mask,
}

fn cases(args: &BenchArgs) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for Shape(shape) in &args.shape {
        for mask in &args.mask {
            for dtype in &args.dtype {
                let mut problem = AttentionProblem::new(*shape, *dtype, mask.clone())?;
                if let Some(queries) = args.queries {
                    let tokens = problem.kv_len;
                    let first = tokens.checked_sub(queries.get()).ok_or_else(|| {
                        Failure::request(
                            format!("--queries {queries} of {tokens} tokens"),
                            format!("use at most {tokens}"),
                        )
                    })?;
                    problem = problem.with_queries(queries.get(), first)?;
                }
                cases.push(Case { problem, shape: *shape, mask: mask.clone() });
            }
        }
    }
    Ok(cases)
}

impl Case {
    fn line(&self, device: DeviceId, backend: &Device, args: &BenchArgs) -> Line {
        let info = backend.info();
        let case = format!("{device} {}: {:?} {} {}", info.kernel, self.shape, self.mask, self.problem.dtype);
        note(&case);
        activity::doing(&format!("measuring {case}"));
        let names = (
            info.name.clone(),
            info.driver.clone(),
            backend.kernel(self.problem.dtype, state_shape(&self.problem)),
        );
        match (Check { case: self, args }).on(backend) {
            Ok(checked) => Line {
                measured: Some(self.measured(checked, args.backward)),
                error: None,
                ..self.empty_line(device, names, &Failure::run(""))
            },
            Err(failure) => self.empty_line(device, names, &failure),
        }
    }

    fn empty_line(
        &self,
        device: DeviceId,
        (name, driver, kernel): (String, String, String),
        why: &Failure,
    ) -> Line {
        Line {
            device: device.to_string(),
            name,
            driver,
            kernel,
            shape: self.shape,
            queries: self.problem.q_len,
            mask: self.mask.to_string(),
            dtype: self.problem.dtype.to_string(),
            measured: None,
            error: Some(why.text.clone()),
        }
    }

    /// The case as other programs read it.
    fn text(&self) -> String {
        let [batch, keys, heads, kv_heads, dim] = self.shape;
        let tokens = match self.problem.q_len {
            queries if queries == keys => keys.to_string(),
            queries => format!("{queries}:{keys}"),
        };
        format!("{batch},{tokens},{heads},{kv_heads},{dim},{},{}", self.mask, self.problem.dtype)
    }

    fn measured(&self, checked: Checked, backward: bool) -> Measured {
        let Checked { first_ms, times_ms, kernels, held, every_row } = checked;
        // Two products forward, five backward.
        let products = if backward { 2.5 } else { 1.0 };
        let times = || times_ms.iter().copied();
        let median_ms = median(times());
        Measured {
            first_ms,
            median_ms,
            device: DeviceTime::of(&kernels),
            min_ms: times().fold(f64::INFINITY, f64::min),
            max_ms: times().fold(0.0, f64::max),
            gflop_per_s: products * self.flops() / median_ms / 1e6,
            max_abs_error: held.map(|[error, _]| error),
            tolerance: held.map(|[_, tolerance]| tolerance),
            every_row,
        }
    }

    /// A multiply-add counts as two.
    fn flops(&self) -> f64 {
        let p = &self.problem;
        let row =
            |batch: u32, row: u32| p.mask.visible(batch as usize, p.q_position(row), p.kv_len).keys() as f64;
        let pairs: f64 = (0..p.batch).flat_map(|b| (0..p.q_len).map(move |r| row(b, r))).sum();
        4.0 * pairs * f64::from(p.head_dim) * f64::from(p.q_heads)
    }
}

/// Times a case. The result must agree with the oracle, and with `--verify` every row with the
/// device's own result in f32.
struct Check<'a> {
    case: &'a Case,
    args: &'a BenchArgs,
}

impl Check<'_> {
    fn on(self, backend: &Device) -> Result<Checked> {
        let Self { case, args } = self;
        if args.backward {
            return self.backward_on(backend);
        }
        let mut resident = Resident::new(backend, &case.problem, SEED)?;
        let (first_ms, times_ms, kernels) =
            timed(backend, args.amount(), || resident.run(backend, &Control::default()))?;
        let (o, lse) = resident.results(backend)?;
        let kernel = &backend.info().kernel;
        let sample = Sample::new(&case.problem, &Source::Random { seed: SEED })?;
        let right = |verdict: Verdict| match verdict.failure {
            None => Ok(verdict),
            Some(failure) => Err(Failure::run(format!("wrong result: {failure}"))),
        };
        let Verdict { max_abs_error, tolerance, .. } = right(sample.judge_alone(&o, &lse, kernel)?)?;
        let every_row = if args.verify {
            drop(resident);
            let mut wide = Resident::widened(backend, &case.problem, SEED)?;
            wide.run(backend, &Control::default())?;
            let (wide_o, wide_lse) = wide.results(backend)?;
            let actual = Whole { dtype: case.problem.dtype, o: &o, lse: &lse };
            let wide = Whole { dtype: Dtype::F32, o: &wide_o, lse: &wide_lse };
            let verdict = right(sample.judge_every_row(actual, wide, kernel)?)?;
            Some(EveryRow { rows: verdict.rows, max_abs_error: verdict.max_abs_error })
        } else {
            None
        };
        Ok(Checked { first_ms, times_ms, kernels, held: Some([max_abs_error, tolerance]), every_row })
    }

    fn backward_on(self, backend: &Device) -> Result<Checked> {
        let Self { case, args } = self;
        let mut resident = Resident::new(backend, &case.problem, SEED)?;
        let mut gradients = resident.gradients(backend, SEED)?;
        resident.run(backend, &Control::default())?;
        let (first_ms, times_ms, kernels) = timed(backend, args.amount(), || {
            resident.run_backward(backend, &mut gradients, &Control::default())
        })?;
        let whole = resident.whole_gradients(backend, &mut gradients)?;
        let sample = Sample::new(&case.problem, &Source::Random { seed: SEED })?;
        let held = sample.judge_gradients(&whole)?;
        if let Some(failure) = held.as_ref().and_then(|verdict| verdict.failure.as_ref()) {
            return Err(Failure::run(failure.clone()));
        }
        let held = held.map(|verdict| [verdict.max_abs_error, verdict.tolerance]);
        Ok(Checked { first_ms, times_ms, kernels, held, every_row: None })
    }
}

/// How many runs are timed.
#[derive(Clone, Copy)]
enum Amount {
    Runs(u32),
    /// As many as end in this time, after half of it for runs that are not timed.
    Time(Duration),
}

impl BenchArgs {
    fn amount(&self) -> Amount {
        match self.duration_ms {
            Some(ms) => Amount::Time(Duration::from_millis(u64::from(ms.get()))),
            None => Amount::Runs(self.repeat.get()),
        }
    }
}

/// Runs a call once, and then as often as `amount` says. Measures each run until the device has
/// done it. Returns the time of the first, the times of the others, and their kernels by the clock
/// of the device.
fn timed(
    backend: &Device,
    amount: Amount,
    mut run: impl FnMut() -> Result<()>,
) -> Result<(f64, Vec<f64>, Vec<Vec<KernelTime>>)> {
    let mut once = || -> Result<_> {
        let started = Instant::now();
        run()?;
        let ms = started.elapsed().as_secs_f64() * 1e3;
        Ok((ms, backend.kernel_times()?))
    };
    let (first_ms, _) = once()?;
    backend.measure_kernels(true);
    let timed = match amount {
        Amount::Runs(repeat) => (0..repeat).map(|_| once()).collect::<Result<Vec<_>>>()?,
        Amount::Time(duration) => {
            let mut run_for = |duration, least| -> Result<Vec<_>> {
                let (began, mut runs) = (Instant::now(), Vec::new());
                while runs.len() < least || began.elapsed() < duration {
                    runs.push(once()?);
                }
                Ok(runs)
            };
            run_for(duration / 2, 1)?;
            run_for(duration, LEAST_RUNS)?
        }
    };
    backend.measure_kernels(false);
    let (times_ms, kernels) = timed.into_iter().unzip();
    Ok((first_ms, times_ms, kernels))
}

/// Runs that are timed even if they take longer than the time for them.
const LEAST_RUNS: usize = 3;

/// Seed of the tensors.
const SEED: u64 = 0;
