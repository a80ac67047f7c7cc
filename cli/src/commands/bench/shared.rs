//! `bench --backward --ranks`: a ring of ranks in turns with one rank, on the same device.

use kyklos::backend::{Backend, Device};
use kyklos::plan::{PlanSet, table};
use kyklos::{Mesh, PlacementKind, Split, Strategy, plan_backward, plan_forward};
use serde::Serialize;

use super::{BenchArgs, Case, SEED, json, open};
use crate::devices::DeviceId;
use crate::failure::{Failure, Result, note, print};
use crate::median::median;
use crate::options::TransportName;
use crate::run::gather::gather;
use crate::run::timed::{self, Timed};
use crate::tensors::Source;
use crate::verify::Sample;

/// Both passes of a case.
#[derive(Serialize)]
struct Line {
    device: String,
    kernel: String,
    shape: [u32; 5],
    mask: String,
    dtype: String,
    ranks: u32,
    placement: PlacementKind,
    forward: Pass,
    backward: Pass,
    /// Of the gradients of one head. None: the oracle would take minutes.
    max_abs_error: Option<f64>,
    tolerance: Option<f64>,
}

/// The times of one pass.
#[derive(Serialize)]
struct Pass {
    one_rank: Spread,
    ring: Spread,
    /// The median time of the ring over that of one rank.
    ratio: f64,
}

#[derive(Serialize)]
struct Spread {
    median_ms: f64,
    min_ms: f64,
    max_ms: f64,
    runs: usize,
}

impl Spread {
    fn of(runs: &[Timed]) -> Self {
        let times_ms = || runs.iter().map(|run| run.wall_s * 1e3);
        Self {
            median_ms: median(times_ms()),
            min_ms: times_ms().fold(f64::INFINITY, f64::min),
            max_ms: times_ms().fold(0.0, f64::max),
            runs: runs.len(),
        }
    }
}

impl Pass {
    fn of(one_rank: &[Timed], ring: &[Timed]) -> Self {
        let (one_rank, ring) = (Spread::of(one_rank), Spread::of(ring));
        Self { ratio: ring.median_ms / one_rank.median_ms, one_rank, ring }
    }
}

/// The plans of both passes, and their times.
struct Side {
    forward: PlanSet,
    backward: PlanSet,
    times: [Vec<Timed>; 2],
}

/// Runs the command.
pub(super) fn bench(args: &BenchArgs, devices: &[DeviceId], cases: &[Case]) -> Result<()> {
    let mut lines = Vec::new();
    for device in devices {
        for kernel in &args.kernel.0 {
            let backend = open(*device, *kernel)?;
            for case in cases {
                note(&format!("{device}: {}", case.text()));
                lines.push(line(args, *device, &backend, case)?);
            }
        }
    }
    if args.json {
        return print(&json(&lines)?);
    }
    print(&format!(
        "a ring in turns with one rank on the same device; {} rounds of {} runs; milliseconds: median (from - to)\n\n{}",
        args.rounds,
        args.repeat,
        text(&lines)
    ))
}

fn line(args: &BenchArgs, device: DeviceId, backend: &Device, case: &Case) -> Result<Line> {
    let Case { problem, .. } = case;
    backend.supports_backward(problem.dtype, problem.head_dim as usize)?;
    let ranks = args.ranks.map_or(1, std::num::NonZeroU32::get);
    let placement = PlacementKind::for_problem(problem);
    let side = |ranks: u32| -> Result<Side> {
        let mesh = Mesh::new(1, ranks)?;
        let strategy = Strategy::of_mesh(mesh);
        Ok(Side {
            forward: plan_forward(problem, mesh, placement, &Split::Even, strategy)?,
            backward: plan_backward(problem, mesh, placement, &Split::Even, strategy)?,
            times: [Vec::new(), Vec::new()],
        })
    };
    let mut sides = [side(1)?, side(ranks)?];
    let source = Source::Random { seed: SEED };
    let sample = Sample::new(problem, &source)?;
    let mut held: Option<[f64; 2]> = None;
    for round in 0..args.rounds.get() {
        // Each side begins every other round.
        for place in [round % 2, (round + 1) % 2] {
            let Side { forward, backward, times } = &mut sides[place as usize];
            let devices = vec![backend; forward.mesh.size() as usize];
            let on = (&devices[..], TransportName::InProcess);
            let repeat = u64::from(args.repeat.get());
            let mut passes = timed::both(forward, backward, on, &source, repeat)?;
            times[0].append(&mut passes.forward);
            times[1].append(&mut passes.backward);
            if sample.can_judge_gradients().is_ok() {
                let gradients = gather(backward, passes.gradients);
                let head = sample.head_of(sample.verified_head(), &gradients);
                let verdict =
                    sample.judge_head(sample.verified_head(), &head, &gradients.d_sinks_part, forward)?;
                if let Some(failure) = verdict.failure {
                    return Err(Failure::run(format!("{}: {failure}", case.text())));
                }
                let now = [verdict.max_abs_error, verdict.tolerance];
                held = held.filter(|held| held[0] / held[1] > now[0] / now[1]).or(Some(now));
            }
        }
    }
    let [one_rank, ring] = &sides;
    let pass = |index: usize| Pass::of(&one_rank.times[index], &ring.times[index]);
    Ok(Line {
        device: device.to_string(),
        kernel: backend.info().kernel.clone(),
        shape: case.shape,
        mask: case.mask.to_string(),
        dtype: problem.dtype.to_string(),
        ranks,
        placement,
        forward: pass(0),
        backward: pass(1),
        max_abs_error: held.map(|[error, _]| error),
        tolerance: held.map(|[_, tolerance]| tolerance),
    })
}

fn text(lines: &[Line]) -> String {
    let header = ["device", "case", "pass", "1 rank", "ring", "ranks", "ring / 1 rank", "error", "tolerance"];
    let mut rows = Vec::new();
    for line in lines {
        let shape: Vec<String> = line.shape.iter().map(u32::to_string).collect();
        let case = format!("{} {} {}", shape.join(","), line.mask, line.dtype);
        for (name, pass) in [("forward", &line.forward), ("backward", &line.backward)] {
            let spread = |of: &Spread| format!("{:.2} ({:.2} - {:.2})", of.median_ms, of.min_ms, of.max_ms);
            let number = |number: Option<f64>| match (name, number) {
                ("forward", _) => "-".to_owned(),
                (_, None) => "not held".to_owned(),
                (_, Some(number)) => format!("{number:.1e}"),
            };
            rows.push(vec![
                line.device.clone(),
                case.clone(),
                name.to_owned(),
                spread(&pass.one_rank),
                spread(&pass.ring),
                line.ranks.to_string(),
                format!("{:.3}", pass.ratio),
                number(line.max_abs_error),
                number(line.tolerance),
            ]);
        }
    }
    table(&header, rows)
}
