//! `kyklos plan`: what `attend` would run. No device is opened.

mod args;
mod explain;
mod page;
pub(crate) mod probe;

use kyklos::plan::{Explained, explain};
use kyklos::{AttentionProblem, Mesh};
use kyklos_transport::Rank;

pub(crate) use self::args::PlanArgs;
use self::explain::explain as explain_plans;
use crate::activity;
use crate::failure::{Failure, Result, note, print, print_json};
use crate::observe::page::units::duration;
use crate::options::SplitName;
use crate::request::Request;

/// Runs the command.
pub(crate) fn plan(args: &PlanArgs) -> Result<()> {
    let is_auto = matches!(args.problem.split, Some(SplitName::Auto));
    if is_auto && (args.explain || args.problem.hardware.is_none()) {
        return Err(Failure::request(
            "--split auto without devices to measure",
            "describe them with --hardware and leave --explain out, or run kyklos attend",
        ));
    }
    // A page draws proved plans, of --explain too.
    if !args.explain || args.report.is_some() {
        few_ranks(args)?;
    }
    let page_file = args.report.as_deref().map(|path| page::open(path, args)).transpose()?;
    activity::doing("choosing a plan");
    if args.explain {
        return explain_plans(args, page_file);
    }
    let request = Request::new(&args.problem, 0, None)?;
    if let Some(warning) = request.source.warning() {
        note(&warning);
    }
    let size = request.mesh.size();
    if let Some(rank) = args.rank.filter(|rank| *rank >= size) {
        return Err(Failure::request(
            format!("--rank {rank} of {size} ranks"),
            format!("use a rank from 0 to {}", size - 1),
        ));
    }
    few_tokens(&request.problem)?;
    activity::doing("proving the plans");
    let plans = request.plan()?;
    let backward = request.plan_backward()?;
    if let Some(file) = page_file {
        page::write(file, &request, &plans, backward.as_ref(), None)?;
    }
    if args.json {
        let forward = Explained::new(plans.set(), plans.checks(), request.predicted_s);
        return match &backward {
            Some(backward) => {
                let backward =
                    Explained::new(backward.set(), backward.checks(), request.predicted_backward_s);
                print_json(&serde_json::json!({ "forward": forward, "backward": backward }))
            }
            None => print_json(&forward),
        };
    }
    let shown = args.rank.or((size > FEW).then_some(0)).map(Rank);
    let predicted = request.predicted_s.map(|seconds| format!("predicted  {}\n", duration(seconds)));
    let mut text = predicted.unwrap_or_default() + &explain(plans.set(), plans.checks(), shown);
    if let Some(backward) = backward {
        text.push_str("\nbackward pass\n\n");
        if let Some(seconds) = request.predicted_backward_s {
            text.push_str(&format!("predicted  {}\n", duration(seconds)));
        }
        text.push_str(&explain(backward.set(), backward.checks(), shown));
    }
    print(&text)
}

/// Refuses more ranks than plans are made of.
fn few_ranks(args: &PlanArgs) -> Result<()> {
    let asked = args.problem.ranks.map_or(1, std::num::NonZeroU32::get);
    let asked = asked.max(args.problem.mesh.chosen().map_or(1, Mesh::size));
    if asked > MAX_RANKS {
        return Err(Failure::request(
            format!("a plan of {asked} ranks"),
            format!(
                "use at most {MAX_RANKS}, because each rank's plan is proved, or --explain, which predicts without a proof"
            ),
        ));
    }
    Ok(())
}

/// Refuses more tokens than plans are proved for.
fn few_tokens(problem: &AttentionProblem) -> Result<()> {
    let tokens = problem.q_len.max(problem.kv_len);
    if tokens > MAX_TOKENS {
        return Err(Failure::request(
            format!("a plan over {tokens} tokens"),
            format!("plans are proved token by token, for at most {MAX_TOKENS}"),
        ));
    }
    Ok(())
}

/// Up to this many ranks, the steps of all ranks are shown.
const FEW: u32 = 4;
/// The proof needs memory for each token.
const MAX_TOKENS: u32 = 1 << 26;
/// Fewer than a group may have: plans of a ring grow with the square of its ranks, and all are made
/// and proved here.
const MAX_RANKS: u32 = 1024;
const _: () = assert!(MAX_RANKS <= kyklos::MAX_RANKS, "a plan is for a group");
