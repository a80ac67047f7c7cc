//! The planner's choice in words.

use std::fmt::Write;

use super::candidate::Candidate;
use super::candidates::{EstimatedPlan, Feasibility, Passes, PlanQuery, price};
use crate::error::Result;
use crate::plan::{bytes, table};
use crate::problem::AttentionProblem;
use crate::simulate::cluster::Cluster;
use crate::simulate::prediction::{Prediction, RankPrediction};

/// Priced candidates as a table: for each one its prediction or its refusal. With gradients, of
/// both passes together, and the time of each.
pub fn explain_choice(priced: &[EstimatedPlan]) -> String {
    let mut rows = Vec::new();
    let both = priced.iter().any(|priced| priced.passes.is_some());
    for EstimatedPlan { candidate, verdict, passes } in priced {
        let Feasibility::Fits(prediction) = verdict else { continue };
        let names =
            [candidate.strategy.to_string(), candidate.mesh.to_string(), candidate.placement.to_string()];
        let busiest = prediction.links.first();
        let star = if prediction.extrapolated { "*" } else { "" };
        let wall = [format!("{:.3}{star}", prediction.wall_s() * 1e3)];
        let of_passes = passes.iter().flat_map(|Passes { forward, backward, backward_strategy }| {
            let [forward, backward] = [forward, backward].map(|pass| format!("{:.3}", pass.wall_s() * 1e3));
            [forward, backward, backward_strategy.to_string()]
        });
        let numbers = [
            percent(prediction.overlap()),
            percent(prediction.idle()),
            bytes(prediction.bytes_sent()),
            bytes(prediction.peak_bytes()),
            busiest.map_or_else(|| "-".to_owned(), |link| bytes(link.bytes)),
            busiest.map_or_else(String::new, |link| link.name.clone()),
        ];
        rows.push(names.into_iter().chain(wall).chain(of_passes).chain(numbers).collect());
    }
    let names = ["strategy", "mesh", "placement", "predicted ms"];
    let of_passes = ["forward ms", "backward ms", "backward by"];
    let numbers = ["computing", "idle", "sent", "peak", "link carries", "busiest link"];
    let header = [&names[..], if both { &of_passes } else { &[] }, &numbers].concat();
    let mut out = if rows.is_empty() { String::new() } else { table(&header, rows) };
    if priced.iter().filter_map(EstimatedPlan::prediction).any(|prediction| prediction.extrapolated) {
        out.push_str("* extrapolated from two shorter rings with shards of the same size\n");
    }
    for EstimatedPlan { candidate, verdict, .. } in priced {
        if let Feasibility::Refused(error) = verdict {
            let _ = writeln!(out, "refused    {candidate}: {error}");
        }
    }
    out
}

/// One sentence that says why the first of `priced` is first: where it spends its time, and where
/// the next one needs more.
pub fn why_first(priced: &[EstimatedPlan]) -> Option<String> {
    let mut fitting =
        priced.iter().filter_map(|priced| priced.prediction().map(|found| (priced.candidate, found)));
    let (first, best) = fitting.next()?;
    let mut out = format!("{first} is first: {}", spent(best));
    let Some((second, next)) = fitting.next() else {
        out.push_str("; nothing else fits");
        return Some(out);
    };
    let more = next.wall_ns.saturating_sub(best.wall_ns);
    if u128::from(more) * 1000 < u128::from(best.wall_ns) {
        let _ = write!(out, "; {second} takes as long");
        return Some(out);
    }
    let per_rank = |prediction: &Prediction, of: fn(&RankPrediction) -> u64| {
        prediction.ranks.iter().map(of).sum::<u64>() / prediction.ranks.len().max(1) as u64
    };
    let idle = |prediction: &Prediction| {
        prediction.wall_ns.saturating_sub(per_rank(prediction, |rank| rank.compute_ns + rank.copy_ns))
    };
    const IDLE: usize = 2;
    let reasons = [
        (
            "computes longer (uneven work, smaller steps, or shared devices)",
            [best, next].map(|of| per_rank(of, |rank| rank.compute_ns)),
        ),
        ("copies longer", [best, next].map(|of| per_rank(of, |rank| rank.copy_ns))),
        ("has its ranks idle longer", [best, next].map(idle)),
    ];
    let most = reasons.into_iter().enumerate().max_by_key(|(_, (_, [a, b]))| b.saturating_sub(*a));
    let (which, (reason, [a, b])) = most?;
    let _ = write!(
        out,
        "; the next, {second}, takes {} more and mostly {reason}, by {} a rank",
        duration(more),
        duration(b.saturating_sub(a))
    );
    // Ranks are idle for the links.
    if let (IDLE, Some(link)) = (which, next.links.first()) {
        let _ = write!(out, " ({} busy for {})", link.name, duration(link.busy_ns));
    }
    Some(out)
}

/// The parts of the time of a prediction, in words.
fn spent(prediction: &Prediction) -> String {
    format!(
        "of {} its ranks compute {}, copy {} and are idle {}",
        duration(prediction.wall_ns),
        percent(prediction.overlap()),
        percent((1.0 - prediction.overlap() - prediction.idle()).max(0.0)),
        percent(prediction.idle())
    )
}

/// The cost that bounds a plan: without it the plan would be fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Computing.
    Compute,
    /// Bytes on links.
    Link,
    /// The number of messages.
    Latency,
    /// Ranks that compute longer than others.
    Imbalance,
    /// Packing and staging.
    Copies,
}

/// The bound of what is wanted of `candidate` on `cluster`. It is computing if that takes most of
/// the time, else the cost whose removal would save most time.
///
/// # Errors
/// As [`choose`](crate::simulate::choose).
pub fn bound(
    problem: &AttentionProblem,
    candidate: Candidate,
    wanted: &PlanQuery,
    cluster: &Cluster,
) -> Result<Bound> {
    let on = |cluster: &Cluster| price(problem, candidate, wanted, cluster).map(|(prediction, _)| prediction);
    let as_is = on(cluster)?;
    let without = |other: &Cluster| -> Result<u64> { Ok(as_is.wall_ns.saturating_sub(on(other)?.wall_ns)) };
    let ranks = as_is.ranks.len().max(1) as u64;
    let computed: u64 = as_is.ranks.iter().map(|rank| rank.compute_ns).sum::<u64>() / ranks;
    let longest = as_is.ranks.iter().map(|rank| rank.compute_ns).max().unwrap_or(0);
    let savings = [
        (Bound::Link, without(&cluster.with_endless_bandwidth())?),
        (Bound::Latency, without(&cluster.without_latency())?),
        (Bound::Imbalance, longest - computed),
        (Bound::Copies, as_is.ranks.iter().map(|rank| rank.copy_ns).max().unwrap_or(0)),
    ];
    let (cause, saved) = savings.into_iter().max_by_key(|(_, saved)| *saved).unwrap_or((Bound::Compute, 0));
    Ok(if saved * 4 < as_is.wall_ns { Bound::Compute } else { cause })
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Compute => "computing",
            Self::Link => "bytes on links",
            Self::Latency => "latency",
            Self::Imbalance => "uneven work",
            Self::Copies => "copies",
        })
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[expect(clippy::cast_precision_loss, reason = "rounded for reading")]
fn duration(ns: u64) -> String {
    let ns = ns as f64;
    if ns >= 1e9 {
        format!("{:.2} s", ns / 1e9)
    } else if ns >= 1e6 {
        format!("{:.2} ms", ns / 1e6)
    } else {
        format!("{:.1} µs", ns / 1e3)
    }
}
