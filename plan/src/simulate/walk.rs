//! A plan set, walked on a cluster.

use super::cluster::Cluster;
use super::engine;
use super::events::PredictedEvents;
use super::prediction::{LinkPrediction, Prediction, RankPrediction};
use super::program::Program;
use crate::error::Result;
use crate::plan::PlanSet;

/// Walks the plans of `set` on `cluster`, rank i on the i-th device or where the description places
/// it.
///
/// # Errors
/// [`Error::Request`](crate::Error::Request) where the cluster lacks a device, a rate or a link
/// that the plans need; [`Error::Plan`](crate::Error::Plan) for plans that [`crate::plan::check`]
/// would refuse too.
pub fn simulate(set: &PlanSet, cluster: &Cluster) -> Result<Prediction> {
    let program = Program::new(set, cluster)?;
    Ok(run(&program, cluster, false)?.0)
}

/// As [`simulate`], with the events of the run.
///
/// # Errors
/// As [`simulate`].
pub fn simulate_events(set: &PlanSet, cluster: &Cluster) -> Result<(Prediction, PredictedEvents)> {
    run(&Program::new(set, cluster)?, cluster, true)
}

fn run(program: &Program, cluster: &Cluster, keeps_events: bool) -> Result<(Prediction, PredictedEvents)> {
    let outcome = engine::play(program, cluster, keeps_events)?;
    let ranks = program.ranks.iter().zip(&outcome.ranks).map(|(rank, times)| {
        let sends = || rank.exchanges.iter().flat_map(|exchange| &exchange.sends);
        RankPrediction {
            device: rank.device,
            finish_ns: times.end_ns,
            compute_ns: times.compute_ns,
            wait_ns: times.wait_ns,
            copy_ns: times.copy_ns,
            bytes_sent: sends().map(|message| program.messages[*message].bytes).sum(),
            messages_sent: sends().count() as u64,
            peak_bytes: rank.peak_bytes,
            pairs: rank.pairs,
        }
    });
    let ranks: Vec<_> = ranks.collect();
    let mut links: Vec<_> = outcome
        .channels
        .into_iter()
        .map(|channel| LinkPrediction { name: channel.name, bytes: channel.bytes, busy_ns: channel.busy_ns })
        .collect();
    links.sort_by(|a, b| b.busy_ns.cmp(&a.busy_ns).then_with(|| a.name.cmp(&b.name)));
    let wall_ns = ranks.iter().map(|rank| rank.finish_ns).max().unwrap_or(0);
    Ok((Prediction { wall_ns, ranks, links, extrapolated: false }, outcome.events))
}
