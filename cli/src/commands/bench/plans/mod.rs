//! `kyklos bench plans`: the time to make plans, to prove them and to vote on them, by the number
//! of ranks.

mod args;
mod votes;

use std::time::Instant;

use kyklos::plan::{PlanSet, Step, check, plan_hash, table};
use kyklos::{AttentionProblem, Dtype, Mesh, PlacementKind, PlanError, Split, Strategy, plan_forward};
use serde::Serialize;

pub(crate) use self::args::PlansArgs;
use self::votes::Vote;
use crate::failure::{Failure, Result, note, print, print_json};
use crate::options::StrategyName;

/// All measurements.
#[derive(Serialize)]
struct Report {
    plans: Vec<Row>,
    growth: Vec<Growth>,
    votes: Vec<Vote>,
}

/// One plan set.
#[derive(Clone, Debug, Serialize)]
struct Row {
    strategy: String,
    mesh: String,
    ranks: u32,
    /// Of all ranks, as the next two.
    steps: u64,
    messages: u64,
    buffers: u64,
    plan_s: f64,
    prove_s: f64,
    hash_s: f64,
}

/// By which power of the plan's own size a time grows: 1 is in proportion.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Growth {
    strategy: String,
    what: &'static str,
    /// Least squares over the logarithms of size and time; none with fewer than two sizes.
    power: Option<f64>,
}

/// Runs the command.
pub(crate) fn plans(args: &PlansArgs) -> Result<()> {
    let mut rows = Vec::new();
    for StrategyName(strategy) in &args.strategy {
        for ranks in &args.ranks {
            let mesh = mesh(*strategy, ranks.get(), args.ulysses.get())?;
            note(&format!("{strategy} {mesh}"));
            rows.push(row(args, *strategy, mesh)?);
        }
    }
    let votes = votes::measure(args)?;
    let report = Report { growth: growth(&rows), plans: rows, votes };
    match args.json {
        true => print_json(&report),
        false => print(&text(&report)),
    }
}

/// The mesh of `ranks` ranks on which a strategy is measured.
fn mesh(strategy: Strategy, ranks: u32, ulysses: u32) -> Result<Mesh> {
    let both = ranks.is_multiple_of(ulysses).then(|| Mesh::new(ulysses, ranks / ulysses));
    let meshes = [both, Some(Mesh::new(1, ranks)), Some(Mesh::new(ranks, 1))];
    let meshes = meshes.into_iter().flatten().collect::<Result<Vec<_>, PlanError>>()?;
    let fits = meshes.into_iter().find(|mesh| strategy.accepts(*mesh).is_ok());
    fits.ok_or_else(|| {
        Failure::request(
            format!("strategy {strategy} on {ranks} ranks with --ulysses {ulysses}"),
            "give numbers of ranks that are at least twice --ulysses, and multiples of it",
        )
    })
}

fn row(args: &PlansArgs, strategy: Strategy, mesh: Mesh) -> Result<Row> {
    let ranks = mesh.size();
    let tokens = args.tokens.get().checked_mul(ranks).ok_or_else(|| {
        Failure::request(format!("{} tokens on each of {ranks} ranks", args.tokens), "use fewer tokens")
    })?;
    let heads = mesh.ulysses().max(HEADS);
    let problem = AttentionProblem::new([1, tokens, heads, heads, DIM], Dtype::F16, args.mask.clone())?;
    let placement = PlacementKind::for_problem(&problem);
    let make = || plan_forward(&problem, mesh, placement, &Split::Even, strategy);
    let mut best = Best::default();
    for _ in 0..args.repeat.get() {
        let started = Instant::now();
        let set = make()?;
        best.took(0, started);
        let started = Instant::now();
        check(&set)?;
        best.took(1, started);
        let started = Instant::now();
        std::hint::black_box(plan_hash(&set, &[]));
        best.took(2, started);
        best.size = size(&set);
    }
    let Best { seconds: [plan_s, prove_s, hash_s], size: [steps, messages, buffers] } = best;
    Ok(Row {
        strategy: strategy.to_string(),
        mesh: mesh.to_string(),
        ranks,
        steps,
        messages,
        buffers,
        plan_s,
        prove_s,
        hash_s,
    })
}

/// The shortest times so far, and the size of the plans.
#[derive(Default)]
struct Best {
    seconds: [f64; 3],
    size: [u64; 3],
}

impl Best {
    fn took(&mut self, what: usize, started: Instant) {
        let now = started.elapsed().as_secs_f64();
        let best = &mut self.seconds[what];
        *best = if *best == 0.0 { now } else { best.min(now) };
    }
}

/// Steps, messages and buffers of all ranks.
fn size(set: &PlanSet) -> [u64; 3] {
    let steps = || set.plans.iter().flat_map(|plan| &plan.steps);
    let messages = steps().map(|step| match step {
        Step::Exchange { sends, .. } => sends.len() as u64,
        _ => 0,
    });
    let buffers = set.plans.iter().map(|plan| plan.buffers.len() as u64);
    [steps().count() as u64, messages.sum(), buffers.sum()]
}

impl Row {
    /// What a time is compared with: steps, and both ends of messages.
    #[expect(clippy::cast_precision_loss, reason = "counts of things in memory")]
    fn size(&self) -> f64 {
        (self.steps + 2 * self.messages) as f64
    }
}

/// A time of a row, and its name.
type Time = (&'static str, fn(&Row) -> f64);

/// The powers of each strategy. A time is that of plan sets large enough to be measured.
fn growth(rows: &[Row]) -> Vec<Growth> {
    let mut names: Vec<&String> = rows.iter().map(|row| &row.strategy).collect();
    names.dedup();
    let times: [Time; 3] =
        [("plan", |row| row.plan_s), ("prove", |row| row.prove_s), ("hash", |row| row.hash_s)];
    let of = |name: &String, (what, time): Time| {
        let points = rows.iter().filter(|row| row.strategy == *name && time(row) >= SHORTEST_S);
        let points: Vec<[f64; 2]> = points.map(|row| [row.size().ln(), time(row).ln()]).collect();
        Growth { strategy: name.clone(), what, power: slope(&points) }
    };
    names.into_iter().flat_map(|name| times.map(|time| of(name, time))).collect()
}

/// The slope of the line through `points`, by least squares.
fn slope(points: &[[f64; 2]]) -> Option<f64> {
    let mean = |axis: usize| points.iter().map(|point| point[axis]).sum::<f64>() / points.len() as f64;
    let (x, y) = (mean(0), mean(1));
    let spread: f64 = points.iter().map(|point| (point[0] - x).powi(2)).sum();
    let both: f64 = points.iter().map(|point| (point[0] - x) * (point[1] - y)).sum();
    (points.len() > 1 && spread > 0.0).then(|| both / spread)
}

fn text(report: &Report) -> String {
    let ms = |seconds: f64| format!("{:.3}", seconds * 1e3);
    let rows = report.plans.iter().map(|row| {
        let Row { strategy, mesh, steps, messages, buffers, plan_s, prove_s, hash_s, .. } = row;
        let counts = [steps, messages, buffers].map(u64::to_string);
        let times = [plan_s, prove_s, hash_s].map(|seconds| ms(*seconds));
        let each = [plan_s, prove_s].map(|seconds| format!("{:.0}", seconds * 1e9 / row.size()));
        [vec![strategy.clone(), mesh.clone()], counts.to_vec(), times.to_vec(), each.to_vec()].concat()
    });
    let header = [
        "strategy",
        "mesh",
        "steps",
        "messages",
        "buffers",
        "plan ms",
        "prove ms",
        "hash ms",
        "plan ns each",
        "prove ns each",
    ];
    let mut out = table(&header, rows.collect());
    out.push_str(
        "each: of the steps and of both ends of the messages\n\ntime grows with their number to the power of\n",
    );
    let rows = report.growth.iter().map(|growth| {
        let power = growth.power.map_or_else(|| "-".to_owned(), |power| format!("{power:.2}"));
        vec![growth.strategy.clone(), growth.what.to_owned(), power]
    });
    out.push_str(&table(&["strategy", "what", "power"], rows.collect()));
    if !report.votes.is_empty() {
        let rows = report.votes.iter().map(|vote| {
            vec![
                vote.ranks.to_string(),
                ms(vote.seconds),
                format!("{:.0}", vote.seconds * 1e9 / f64::from(vote.ranks)),
            ]
        });
        out.push_str("\nvotes of threads of this process\n");
        out.push_str(&table(&["ranks", "vote ms", "ns for each rank"], rows.collect()));
    }
    out
}

/// Heads of a mesh with fewer Ulysses ranks.
const HEADS: u32 = 8;
const DIM: u32 = 64;
/// Shorter times are of the clock.
const SHORTEST_S: f64 = 50e-6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_is_found_and_one_size_has_none() {
        let row = |steps: u64| Row {
            strategy: "ring".to_owned(),
            mesh: "1x2".to_owned(),
            ranks: 2,
            steps,
            messages: 0,
            buffers: 0,
            plan_s: 1e-4 * steps as f64,
            prove_s: 1e-5 * (steps as f64).powf(1.5),
            hash_s: 1e-9,
        };
        let powers: Vec<Option<f64>> =
            growth(&[row(10), row(100), row(1000)]).into_iter().map(|growth| growth.power).collect();
        let [Some(plan), Some(prove), None] = powers[..] else { panic!("{powers:?}") };
        assert!((plan - 1.0).abs() < 1e-9 && (prove - 1.5).abs() < 1e-9, "{plan} {prove}");
        assert_eq!(slope(&[[1.0, 2.0]]), None);
    }
}
