//! The sentence that sums a page up.

use super::model::{Origin, Page, RankFigures};
use super::units::{duration, percent, plural, ratio};

/// A sentence about the call, or one about each of its passes.
pub(super) fn summary_of_passes(page: &Page) -> String {
    match &page.backward {
        None => summary(page),
        Some(backward) => {
            format!("Forward pass: {} Backward pass: {}", summary(page), summary(backward))
        }
    }
}

/// One sentence: how long the ranks took, and what for.
pub(super) fn summary(page: &Page) -> String {
    let ranks = plural(page.ranks.len() as u64, "rank");
    let took = match (page.origin, page.wall_s) {
        (Origin::Measured, Some(wall_s)) => format!("{ranks} finished in {}", duration(wall_s)),
        (_, Some(wall_s)) => {
            let verb = if page.ranks.len() == 1 { "is" } else { "are" };
            format!("{ranks} {verb} predicted to finish in {}", duration(wall_s))
        }
        (_, None) => return format!("{ranks}; {}.", uneven(page)),
    };
    format!("{took}; {}.", spent(page))
}

/// What ranks waited for, or what else took most of the time.
fn spent(page: &Page) -> String {
    let waits = (0..page.ranks.len()).filter_map(|index| Some((index, page.wait_share(index)?)));
    let Some((index, share)) = waits.max_by(|a, b| a.1.total_cmp(&b.1)) else {
        return uneven(page);
    };
    let verb = match page.origin {
        Origin::Measured => "waited",
        Origin::Predicted => "waits",
    };
    if page.ranks.len() == 1 {
        return "it waits for no other rank".to_owned();
    }
    if share < LITTLE {
        return longest(page)
            .unwrap_or_else(|| format!("no rank {verb} for more than {} of that time", percent(LITTLE)));
    }
    let shares = (0..page.ranks.len()).filter_map(|index| page.wait_share(index));
    #[expect(clippy::cast_precision_loss, reason = "ranks")]
    let mean = shares.sum::<f64>() / page.ranks.len() as f64;
    if page.ranks.len() > 2 && mean >= share * ALIKE {
        let verb = verb.trim_end_matches('s');
        return format!("all ranks {verb} for messages, {} of that time on average", percent(mean));
    }
    let rank = page.ranks[index].rank;
    let waited_for = page.timeline.as_ref().and_then(|timeline| timeline.rows.get(index));
    let mainly = waited_for.and_then(|row| {
        let whole_ns: u64 = row.waited_for.iter().map(|(_, ns)| ns).sum();
        let (peer, ns) = row.waited_for.first()?;
        let mainly = if row.waited_for.len() == 1 { "" } else { "mainly " };
        // A part that is no more than that of the others names no cause.
        (ratio(*ns, whole_ns) >= MOST).then(|| format!(", {mainly}for rank {peer}"))
    });
    format!("rank {rank} {verb} {} of that time{}", percent(share), mainly.unwrap_or_default())
}

/// The rank that computes longer than the others, if one does: the others are idle after their end.
fn longest(page: &Page) -> Option<String> {
    let computed_s = |rank: &RankFigures| rank.times.map_or(0.0, |times| times.compute_s);
    let most = page.ranks.iter().max_by(|a, b| computed_s(a).total_cmp(&computed_s(b)))?;
    #[expect(clippy::cast_precision_loss, reason = "ranks")]
    let mean_s = page.ranks.iter().map(computed_s).sum::<f64>() / page.ranks.len() as f64;
    let over = computed_s(most) / mean_s;
    let verb = match page.origin {
        Origin::Measured => "computed",
        Origin::Predicted => "computes",
    };
    let took = duration(computed_s(most));
    (over >= MUCH)
        .then(|| format!("rank {} {verb} for {took}, {over:.2} times the mean of all ranks", most.rank))
}

/// How unevenly the work is shared.
fn uneven(page: &Page) -> String {
    let whole: f64 = page.ranks.iter().map(|rank| rank.pairs).sum();
    let Some(most) = page.ranks.iter().max_by(|a, b| a.pairs.total_cmp(&b.pairs)).filter(|_| whole > 0.0)
    else {
        return "no query sees a key".to_owned();
    };
    #[expect(clippy::cast_precision_loss, reason = "ranks")]
    let mean = whole / page.ranks.len() as f64;
    let over = most.pairs / mean;
    let sends = page.ranks.iter().map(|rank| rank.bytes_sent).max().unwrap_or(0);
    let shared = if over < 1.005 {
        "all have equal work".to_owned()
    } else {
        format!("rank {} has the most work, {over:.2} times the mean", most.rank)
    };
    match sends {
        0 => format!("{shared}; no bytes move"),
        bytes => format!("{shared}; a rank sends at most {}", kyklos::plan::bytes(bytes)),
    }
}

/// A smaller share of waits is not worth a name.
const LITTLE: f64 = 0.05;
/// From this part of the longest wait on, the mean wait is one of all ranks.
const ALIKE: f64 = 0.75;
/// From this factor over the mean on, a rank is what the others are idle for.
const MUCH: f64 = 1.1;
/// From this share of the waits on, a rank is what another one waited for.
const MOST: f64 = 0.4;
