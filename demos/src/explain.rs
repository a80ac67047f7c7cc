//! `kyklos plan --explain`: every plan that could run on described devices and links, priced. No device is touched.

use std::path::Path;

use kyklos::simulate::{Cluster, Priced, Verdict, bound, choose, explain_choice, why_first};
use kyklos::{AttentionProblem, Error};
use serde_json::{Value, json};

use crate::args::PlanArgs;
use crate::failure::{Failure, Result, note, print};
use crate::request::Asked;

/// Runs the command.
pub(crate) fn explain(args: &PlanArgs) -> Result<()> {
    if let Some(rank) = args.rank {
        return Err(Failure::request(
            format!("--rank {rank} with --explain, which shows plans and no steps"),
            "leave one of the two away",
        ));
    }
    let asked = Asked::new(&args.problem, 0, None)?;
    if let Some(warning) = asked.source.warning() {
        note(&warning);
    }
    let ranks = asked.wanted.ranks;
    let cluster = match &args.problem.cluster {
        Some(path) => read(path)?.grown_for(ranks)?,
        None => {
            return Err(Failure::request(
                "--explain without devices and links to look at",
                "name a description with --cluster, such as clusters/two-hosts-1gbe.toml",
            ));
        }
    };
    let priced = choose(&asked.problem, &asked.wanted, &cluster)?;
    let first = priced.first().filter(|priced| priced.prediction().is_some());
    let bound = first
        .map(|first| bound(&asked.problem, first.candidate, &asked.wanted.split, &cluster))
        .transpose()?;
    let why = why_first(&priced);
    if args.json {
        let object = json!({
            "cluster": cluster.name(),
            "problem": asked.problem,
            "ranks": ranks,
            "bound": bound,
            "why": why,
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
        print(&out)?;
    }
    match (first, priced.first().map(|priced| &priced.verdict)) {
        (None, Some(Verdict::Refused(error))) => Err(nothing_fits(priced.len(), error)),
        _ => Ok(()),
    }
}

/// Reads a description.
pub(crate) fn read(path: &Path) -> Result<Cluster> {
    let bytes = std::fs::metadata(path).map_err(|error| Failure::file("read", path, &error))?.len();
    if bytes > MOST_BYTES {
        return Err(Failure::request(
            format!("{} has {bytes} bytes", path.display()),
            format!("a cluster description has at most {MOST_BYTES}"),
        ));
    }
    let text = std::fs::read_to_string(path).map_err(|error| Failure::file("read", path, &error))?;
    Cluster::from_toml(&text).map_err(|error| {
        let failure = Failure::from(error);
        Failure { text: format!("{}: {}", path.display(), failure.text), ..failure }
    })
}

/// Every candidate is refused.
pub(crate) fn nothing_fits(candidates: usize, first: &Error) -> Failure {
    let plural = if candidates == 1 { "the plan is" } else { "all plans are" };
    Failure {
        exit: 2,
        text: format!("{plural} refused, of {candidates} the first one because: {first}"),
        of_group: false,
    }
}

fn headline(problem: &AttentionProblem, ranks: u32) -> String {
    let plural = if ranks == 1 { "" } else { "s" };
    format!(
        "problem    {} x {} queries to {} keys, {} query heads, {} kv heads, dim {}, {}, mask {}\nranks      {ranks} rank{plural}",
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

fn plan(priced: &Priced) -> Value {
    let candidate = json!(priced.candidate);
    match &priced.verdict {
        Verdict::Refused(error) => json!({ "plan": candidate, "refused": error.to_string() }),
        Verdict::Fits(prediction) => json!({
            "plan": candidate,
            "predicted_s": prediction.wall_s(),
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

const MOST_BYTES: u64 = 1 << 20;
