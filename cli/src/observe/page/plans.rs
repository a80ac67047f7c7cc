//! What plans alone tell: who holds and computes what, and the bytes between ranks.

use std::collections::BTreeMap;

use kyklos::TokenRuns;
use kyklos::plan::{PlanSet, ProvedPlans, Step};
use kyklos::simulate::pairs_of_ranks;
use kyklos_transport::Rank;

use super::mask::pictures;
use super::model::{Page, RankFigures, Traffic};

/// A page with what the plans tell. `members` are the numbers of the ranks in the first group.
pub(crate) fn page_of_plans(plans: &ProvedPlans, members: &[Rank]) -> Page {
    let set = plans.set();
    let pairs = pairs_of_ranks(set);
    let ranks = plans.checks().iter().zip(pairs).zip((0..).map(Rank)).map(|((check, pairs), rank)| {
        let queries = set.q_placement.of_rank(rank);
        RankFigures {
            rank: number(members, rank.0),
            queries: queries.len() as u64,
            keys: set.kv_placement.held_by(rank).len() as u64,
            tokens: ranges(queries),
            pairs,
            bytes_sent: check.bytes_sent,
            messages_sent: check.messages_sent,
            peak_bytes: check.peak_bytes,
            ..RankFigures::default()
        }
    });
    Page {
        ranks: ranks.collect(),
        masks: pictures(set),
        mask_note: mask_note(set),
        traffic: traffic(plans, members),
        ..Page::default()
    }
}

fn mask_note(set: &PlanSet) -> String {
    let mut note =
        "A coloured cell is visible, and its colour is that of the rank that holds the query.".to_owned();
    let ulysses = set.mesh.ulysses();
    if ulysses > 1 {
        note.push_str(&format!(
            " With Ulysses, {ulysses} consecutive ranks compute their rows together, each of them some of the heads."
        ));
    }
    if set.problem.bias.is_some() {
        note.push_str(" The attention bias tensor, which may hide more, is not drawn.");
    }
    note
}

/// The number in the first group of a rank.
pub(crate) fn number(members: &[Rank], rank: u32) -> u32 {
    members.get(rank as usize).map_or(rank, |member| member.0)
}

fn traffic(plans: &ProvedPlans, members: &[Rank]) -> Vec<Traffic> {
    let traffic = |((from, to), (bytes, messages))| Traffic {
        from: number(members, from),
        to: number(members, to),
        bytes,
        messages,
    };
    sent(plans).into_iter().map(traffic).collect()
}

/// The bytes and the messages that the plans send from one rank to another.
pub(crate) fn sent(plans: &ProvedPlans) -> BTreeMap<(u32, u32), (u64, u64)> {
    let set = plans.set();
    let mut sums: BTreeMap<(u32, u32), (u64, u64)> = BTreeMap::new();
    for plan in &set.plans {
        for step in &plan.steps {
            let Step::Exchange { sends, .. } = step else { continue };
            for send in sends {
                let bytes: u64 = send.parts.iter().map(|part| plan.slice_bytes(&set.problem, part)).sum();
                let sum = sums.entry((plan.rank, send.to)).or_default();
                *sum = (sum.0 + bytes, sum.1 + 1);
            }
        }
    }
    sums
}

/// Token ranges, of which at most [`MOST_RANGES`] are named.
fn ranges(tokens: &TokenRuns) -> String {
    let runs = tokens.runs();
    let word = |run: &kyklos::Run| {
        let last = run.start + (run.count.max(1) - 1) * run.stride.max(1);
        match (run.count, run.stride) {
            (1, _) => run.start.to_string(),
            (_, 0 | 1) => format!("{}–{last}", run.start),
            (_, stride) => format!("{}–{last}, every {stride}", run.start),
        }
    };
    let named: Vec<String> = runs.iter().take(MOST_RANGES).map(word).collect();
    match runs.len().saturating_sub(MOST_RANGES) {
        0 if named.is_empty() => "none".to_owned(),
        0 => named.join("; "),
        more => format!("{}; and {more} more ranges", named.join("; ")),
    }
}

const MOST_RANGES: usize = 4;
