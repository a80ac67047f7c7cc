//! The page of `--report` for plans: what a simulation predicts, or without a description of
//! devices what plans alone tell.

use std::collections::BTreeMap;
use std::path::Path;

use kyklos::plan::{ProvedPlans, bytes};
use kyklos::simulate::{
    Activity, Cluster, PredictedEvents, PredictedMessage, PredictedWork, Prediction, simulate_events,
};

use super::args::PlanArgs;
use crate::failure::Result;
use crate::interrupt;
use crate::job::results::report::facts;
use crate::observe::page::model::{
    Budget, Choice, Kind, LinkLoad, Origin, Page, Segment, Timeline, TimelineRow, Times,
};
use crate::observe::page::spans::longest_first;
use crate::observe::page::target::{PageFile, PageTarget};
use crate::observe::page::units::seconds;
use crate::observe::page::{html, page_of_plans};
use crate::request::Request;
use crate::tensors::output::keep_apart;

/// Creates the file, before any work.
pub(super) fn open(path: &Path, args: &PlanArgs) -> Result<PageFile> {
    let PlanArgs { problem, .. } = args;
    keep_apart(("--report", path), ("the input", problem.input.as_deref()), 1)?;
    keep_apart(("--report", path), ("the description", problem.hardware.as_deref()), 1)?;
    keep_apart(("--report", path), ("the saved description", args.save.as_deref()), 1)?;
    let target = PageTarget::new(path)?;
    interrupt::end_on_interrupt()?;
    target.open()
}

/// Writes the page and gives it its name. `choice`: the plans among which this one was chosen, with
/// `--explain`.
pub(super) fn write(
    file: PageFile,
    request: &Request,
    plans: &ProvedPlans,
    backward: Option<&ProvedPlans>,
    choice: Option<Choice>,
) -> Result<()> {
    let pass = |plans, predicted_s| of_pass(request, plans, predicted_s);
    let mut page = pass(plans, request.predicted_s)?;
    page.title = format!("Plan: {} on {} ranks", request.strategy, page.ranks.len());
    page.facts.splice(0..0, facts(request));
    let backward = backward.map(|plans| pass(plans, request.predicted_backward_s)).transpose()?;
    file.write(&html(&Page { choice, backward: backward.map(Box::new), ..page }))
}

/// What a page shows of the forward or of the backward pass.
fn of_pass(request: &Request, plans: &ProvedPlans, predicted_s: Option<f64>) -> Result<Page> {
    let mut page = page_of_plans(plans, &[]);
    page.origin = Origin::Predicted;
    page.wall_s = predicted_s;
    page.predicted_s = predicted_s;
    if let Some(cluster) = request.cluster.as_ref().filter(|_| page.ranks.len() <= MOST_SIMULATED) {
        let (prediction, events) = simulate_events(plans.set(), cluster)?;
        page.facts.push(("devices and links", cluster.name().to_owned()));
        predicted(&mut page, &prediction, cluster);
        page.timeline = Some(timeline(&events, page.ranks.len()));
    }
    Ok(page)
}

fn predicted(page: &mut Page, prediction: &Prediction, cluster: &Cluster) {
    page.wall_s = Some(prediction.wall_s());
    let mut sharing: BTreeMap<usize, u32> = BTreeMap::new();
    prediction.ranks.iter().for_each(|rank| *sharing.entry(rank.device).or_default() += 1);
    for (rank, predicted) in page.ranks.iter_mut().zip(&prediction.ranks) {
        rank.times = Some(Times {
            compute_s: seconds(predicted.compute_ns),
            wait_s: seconds(predicted.wait_ns),
            copy_s: seconds(predicted.copy_ns),
            wall_s: seconds(predicted.finish_ns),
        });
        let Some((kind, memory)) = cluster.kind_and_memory(predicted.device) else { continue };
        rank.device = format!("{kind} (device {})", predicted.device);
        let shared_by = sharing.get(&predicted.device).copied().unwrap_or(1);
        rank.budget = memory.map(|bytes| Budget { bytes, shared_by });
    }
    let links = prediction.links.iter();
    page.links = links
        .map(|link| LinkLoad { name: link.name.clone(), bytes: link.bytes, busy_s: seconds(link.busy_ns) })
        .collect();
}

fn timeline(events: &PredictedEvents, ranks: usize) -> Timeline {
    let mut segments: Vec<Vec<Segment>> = vec![Vec::new(); ranks];
    let mut waited: Vec<BTreeMap<u32, u64>> = vec![BTreeMap::new(); ranks];
    for work in &events.work {
        segments[work.rank].push(segment(work));
        if let Some(peer) = work.peer.and_then(|peer| u32::try_from(peer).ok()) {
            *waited[work.rank].entry(peer).or_default() += work.end_ns - work.start_ns;
        }
    }
    for PredictedMessage { from, to, bytes: size, start_ns, end_ns } in &events.messages {
        let ns = (signed(*start_ns), signed(*end_ns));
        segments[*from].push(Segment::one(Kind::Send, ns, &format!("{} to rank {to}", bytes(*size))));
        segments[*to].push(Segment::one(Kind::Receive, ns, &format!("{} from rank {from}", bytes(*size))));
    }
    let size = u32::try_from(ranks).unwrap_or(u32::MAX);
    let rows = segments.into_iter().zip(waited).map(|(segments, waited)| TimelineRow {
        waited_for: longest_first(waited),
        ..TimelineRow::merged(segments, size)
    });
    Timeline { rows: rows.collect() }
}

fn segment(work: &PredictedWork) -> Segment {
    let ns = (signed(work.start_ns), signed(work.end_ns));
    match (work.activity, work.peer) {
        (Activity::Compute, _) => Segment::one(Kind::Compute, ns, ""),
        (Activity::Copy, _) => Segment::one(Kind::Copy, ns, ""),
        (Activity::Wait, Some(peer)) => {
            Segment::one(Kind::Wait, ns, &format!("the last message is one with rank {peer}"))
        }
        (Activity::Wait, None) => Segment::one(Kind::Wait, ns, ""),
    }
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

/// A simulation walks every hop of every rank: of more ranks it takes too long for a picture.
const MOST_SIMULATED: usize = 256;
