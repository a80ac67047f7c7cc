//! `kyklos plan --explain`: every plan that could run, with its predicted time. Without `--probe`
//! no device is opened.

use std::sync::Arc;

use kyklos::backend::ShortWork;
use kyklos::plan::{PlanSet, expected_of_wire, table};
use kyklos::simulate::{
    Candidate, Cluster, EstimatedPlan, Feasibility, Passes, Prediction, bound, candidates, choose,
    explain_choice, why_first,
};
use kyklos::{
    AttentionProblem, Mesh, PlacementKind, PlanError, Split, Strategy, TokenRuns, plan_backward, plan_forward,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::args::PlanArgs;
use super::few_tokens;
use super::page;
use crate::activity;
use crate::commands::plan::probe::{self, Probe};
use crate::devices;
use crate::failure::{Failure, Result, note, print};
use crate::hints;
use crate::median::median;
use crate::new_file::check_writable;
use crate::observe::page::model::{Choice, PossiblePlan, Price};
use crate::observe::page::target::PageFile;
use crate::request::description::{self, nothing_fits};
use crate::request::{ProblemRequest, Request, forward_s};
use crate::run::timed;

/// Runs the command. `page`: the file of `--report`.
pub(crate) fn explain(args: &PlanArgs, page: Option<PageFile>) -> Result<()> {
    if let Some(rank) = args.rank {
        return Err(Failure::request(
            format!("--rank {rank} with --explain, which has no steps of ranks"),
            "leave one of the two out",
        ));
    }
    if let Some(path) = &args.save {
        check_writable("--save", path, "cluster.toml")?;
    }
    let asked = ProblemRequest::new(&args.problem, 0, None)?;
    if let Some(warning) = asked.source.warning() {
        note(&warning);
    }
    let ranks = asked.wanted.ranks;
    let (cluster, measured) = match &args.problem.hardware {
        Some(path) => (description::read(path)?.grown_for(ranks)?, Vec::new()),
        None if args.probe => probe(args, &asked)?,
        None => {
            return Err(Failure::request(
                "--explain without devices and links to look at",
                "name a description with --hardware, such as clusters/two-hosts-1gbe.toml, or measure with --probe",
            ));
        }
    };
    if let Some(path) = &args.save {
        std::fs::write(path, cluster.to_toml()?).map_err(|error| Failure::file("write", path, &error))?;
    }
    let mut priced = choose(&asked.problem, &asked.wanted, &cluster)?;
    for EstimatedPlan { verdict, .. } in &mut priced {
        if let Feasibility::Refused(error) = verdict {
            *error = hints::in_remedy(error.clone());
        }
    }
    // If every plan is refused, the request is wrong: one line.
    if let Some(EstimatedPlan { verdict: Feasibility::Refused(error), .. }) = priced.first() {
        return Err(nothing_fits(priced.len(), error));
    }
    let compared = compare(&priced, &measured);
    let bound = priced
        .first()
        .map(|first| bound(&asked.problem, first.candidate, &asked.wanted, &cluster))
        .transpose()?;
    let why = why_first(&priced);
    if let (Some(page), Some(first)) = (page, priced.first()) {
        few_tokens(&asked.problem)?;
        let bounded = bound.as_ref().map(|bound| format!("What bounds it: {bound}."));
        let choice = Choice {
            reasons: why.iter().map(|why| format!("{why}.")).chain(bounded).collect(),
            plans: priced.iter().map(|priced| possible(priced, &compared)).collect(),
        };
        write_page(page, &asked, first, &cluster, choice)?;
    }
    if args.json {
        let object = json!({
            "cluster": cluster.name(),
            "problem": asked.problem,
            "wire_expected_error": asked.problem.wire.expected_error(asked.problem.head_dim, asked.problem.scale),
            "ranks": ranks,
            "bound": bound,
            "why": why,
            "description": cluster.description(),
            "measured": compared,
            "plans": priced.iter().map(plan).collect::<Vec<_>>(),
        });
        let text = serde_json::to_string_pretty(&object)
            .map_err(|error| Failure::run(format!("cannot print the plans: {error}")))?;
        print(&(text + "\n"))?;
    } else {
        let mut out = format!(
            "{}\ncluster    {}\n\n{}",
            headline(&asked.problem, ranks),
            cluster.name(),
            explain_choice(&priced)
        );
        if let (Some(why), Some(bound)) = (why, bound) {
            out.push_str(&format!("\n{why}; what bounds it: {bound}\n"));
        }
        out.push_str(&comparison(&compared));
        print(&out)?;
    }
    Ok(())
}

/// Writes the page of the fastest plan, with the plans among which it was chosen.
fn write_page(
    file: PageFile,
    asked: &ProblemRequest,
    first: &EstimatedPlan,
    cluster: &Cluster,
    choice: Choice,
) -> Result<()> {
    let Candidate { strategy, mesh, placement } = first.candidate;
    let request = Request {
        gradients: asked.wanted.gradients,
        problem: asked.problem.clone(),
        source: asked.source.clone(),
        mesh,
        strategy,
        placement,
        split: asked.wanted.split.clone(),
        predicted_s: forward_s(first),
        predicted_backward_s: first.passes.as_ref().map(|passes| passes.backward.wall_s()),
        cluster: Some(Arc::new(cluster.clone())),
        open: None,
    };
    page::write(file, &request, &request.plan()?, request.plan_backward()?.as_ref(), Some(choice))
}

fn possible(priced: &EstimatedPlan, compared: &[Compared]) -> PossiblePlan {
    PossiblePlan {
        name: priced.candidate.to_string(),
        priced: match &priced.verdict {
            Feasibility::Refused(error) => Err(error.to_string()),
            Feasibility::Fits(prediction) => Ok(Price {
                predicted_s: prediction.wall_s(),
                passes_s: priced
                    .passes
                    .as_ref()
                    .map(|Passes { forward, backward, .. }| [forward, backward].map(Prediction::wall_s)),
                idle: prediction.idle(),
                bytes_sent: prediction.bytes_sent(),
                peak_bytes: prediction.peak_bytes(),
            }),
        },
        measured_s: compared
            .iter()
            .find(|compared| compared.plan == priced.candidate)
            .map(|found| found.measured_s),
    }
}

/// Makes the plans of one pass.
type Planner = fn(&AttentionProblem, Mesh, PlacementKind, &Split, Strategy) -> Result<PlanSet, PlanError>;

/// A plan that was run.
#[derive(Clone, Debug, Serialize)]
struct Compared {
    plan: Candidate,
    predicted_s: f64,
    measured_s: f64,
    /// Predicted time divided by measured time, minus one.
    error: f64,
}

/// Measures the devices and the link of ranks in this process. With `--measure`, also runs every
/// plan, in turns with that.
fn probe(args: &PlanArgs, asked: &ProblemRequest) -> Result<(Cluster, Vec<(Candidate, f64)>)> {
    let (problem, wanted) = (&asked.problem, &asked.wanted);
    probe::fits(wanted.ranks)?;
    let devices = (0..wanted.ranks as usize).map(|rank| devices::choose(&args.device.0, rank));
    activity::doing("measuring devices and messages");
    let mut probe = Probe::new(problem, wanted.gradients, devices.collect::<Result<_>>()?, args.transport)?;
    let _short: Vec<_> = probe.backends().into_iter().map(ShortWork::on).collect();
    let Some(rounds) = args.measure else {
        probe.look()?;
        return Ok((probe.cluster()?, Vec::new()));
    };
    let (q, kv) = (TokenRuns::contiguous(0..problem.q_len), TokenRuns::contiguous(0..problem.kv_len));
    let tensors = asked.source.all(problem, &q, &kv)?;
    let passes = |candidate: Candidate| {
        let plan = |candidate: Candidate, plans: Planner| {
            let Candidate { strategy, mesh, placement } = candidate;
            plans(problem, mesh, placement, &wanted.split, strategy)
        };
        let backward = wanted.gradients.then(|| plan(candidate.of_backward(problem), plan_backward));
        Ok::<_, PlanError>((plan(candidate, plan_forward)?, backward.transpose()?))
    };
    let mut runs = Vec::new();
    for candidate in candidates(problem, wanted)? {
        // A refused plan appears in the table with the reason.
        if let Ok(sets) = passes(candidate) {
            runs.push((candidate, sets, Vec::new()));
        }
    }
    for _ in 0..rounds.get() {
        probe.look()?;
        for (_, (forward, backward), walls_s) in &mut runs {
            let on = (&probe.backends()[..], args.transport);
            walls_s.push(match backward {
                None => timed::run(forward, on.0, on.1, &tensors, 1)?.wall_s,
                Some(backward) => {
                    let both = timed::both(forward, backward, on, &asked.source, 1)?;
                    timed::middle(both.forward)?.wall_s + timed::middle(both.backward)?.wall_s
                }
            });
        }
    }
    Ok((
        probe.cluster()?,
        runs.into_iter().map(|(candidate, _, walls_s)| (candidate, median(walls_s))).collect(),
    ))
}

fn compare(priced: &[EstimatedPlan], measured: &[(Candidate, f64)]) -> Vec<Compared> {
    let found = priced.iter().filter_map(|priced| {
        let predicted_s = priced.prediction()?.wall_s();
        let (plan, measured_s) = *measured.iter().find(|(candidate, _)| *candidate == priced.candidate)?;
        Some(Compared { plan, predicted_s, measured_s, error: predicted_s / measured_s - 1.0 })
    });
    found.collect()
}

fn comparison(compared: &[Compared]) -> String {
    if compared.is_empty() {
        return String::new();
    }
    let rows = compared.iter().map(|line| {
        let ms = [line.predicted_s, line.measured_s].map(|seconds| format!("{:.3}", seconds * 1e3));
        [&[line.plan.to_string()][..], &ms, &[format!("{:+.1} %", line.error * 100.0)]].concat()
    });
    let sizes = || compared.iter().map(|line| line.error.abs());
    format!(
        "\n{}\nerror of the prediction: median {:.1} %, worst {:.1} %\n",
        table(&["plan", "predicted ms", "measured ms", "error"], rows.collect()),
        median(sizes()) * 100.0,
        sizes().fold(0.0, f64::max) * 100.0
    )
}

fn headline(problem: &AttentionProblem, ranks: u32) -> String {
    let plural = if ranks == 1 { "" } else { "s" };
    let wire = match problem.wire.rounds() {
        true => format!("wire       {}\n", expected_of_wire(problem)),
        false => String::new(),
    };
    format!(
        "problem    {} x {} queries to {} keys, {} query heads, {} kv heads, dim {}, {}, mask {}\n{wire}ranks      {ranks} rank{plural}",
        problem.batch,
        problem.q_len,
        problem.kv_len,
        problem.q_heads,
        problem.kv_heads,
        problem.head_dim,
        problem.dtype,
        problem.mask
    )
}

fn plan(priced: &EstimatedPlan) -> Value {
    let candidate = json!(priced.candidate);
    match &priced.verdict {
        Feasibility::Refused(error) => json!({ "plan": candidate, "refused": error.to_string() }),
        Feasibility::Fits(prediction) => json!({
            "plan": candidate,
            "predicted_s": prediction.wall_s(),
            "passes": priced.passes.as_ref().map(|Passes { forward, backward, backward_strategy }| json!({
                "forward_s": forward.wall_s(),
                "backward_s": backward.wall_s(),
                "backward_strategy": backward_strategy,
            })),
            "overlap": prediction.overlap(),
            "idle": prediction.idle(),
            "bytes_sent": prediction.bytes_sent(),
            "peak_bytes": prediction.peak_bytes(),
            "extrapolated": prediction.extrapolated,
            "per_rank": prediction.ranks,
            "links": prediction.links,
        }),
    }
}
