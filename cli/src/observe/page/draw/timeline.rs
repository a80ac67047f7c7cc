//! The timelines of all ranks, one below the other.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::frame::{Section, exact, percentage, scrolled, swatch};
use crate::observe::page::model::{
    Kind, MOST_WITH_MESSAGES, Origin, Page, RankFigures, Segment, Timeline, TimelineRow,
};
use crate::observe::page::units::{count, duration, in_hundred, plural, ratio, seconds};

pub(super) fn section(page: &Page) -> Section {
    let body = match &page.timeline {
        Some(timeline) => drawn(page, timeline),
        None if page.wall_s.is_some() => html! {
            p { "There are too many ranks to simulate each of them; the time above is that of the whole plan." }
        },
        None => html! {
            p { "A plan alone has no times. Name a description of devices and links with --hardware, such as a file of clusters/." }
        },
    };
    Section::new("timeline", "Timeline of all ranks", body)
}

fn drawn(page: &Page, timeline: &Timeline) -> Markup {
    let dense = timeline.rows.len() > FEW;
    let (start_ns, end_ns) = timeline.ends_ns();
    let scale = Scale { start_ns, whole_ns: end_ns.abs_diff(start_ns) };
    let step = scale.step_s() / scale.whole_s();
    let rows = || page.ranks.iter().zip(&timeline.rows);
    html! {
        ul.legend aria-label="Legend" {
            @for kind in kinds(dense) {
                li { (swatch(kind.name())) (meaning(*kind)) (of_all(page, *kind)) }
            }
        }
        div.timeline.dense[dense] style={ "--step:" (percentage(step)) } {
            (axis(&scale))
            @for (rank, row) in rows() { (lane(rank, row, &scale, timeline.rows.len())) }
        }
        p.note {
            "Percentages are of the time of all ranks. Open a rank to read its longest segments. "
            @if page.origin == Origin::Measured { "Times are of the last run, from the first event of any rank on. " }
            (merged(timeline))
            (clocks(timeline))
        }
    }
}

fn kinds(dense: bool) -> &'static [Kind] {
    if dense { &Kind::ALL[..3] } else { &Kind::ALL }
}

const fn meaning(kind: Kind) -> &'static str {
    match kind {
        Kind::Compute => "compute",
        Kind::Wait => "wait for messages",
        Kind::Copy => "copy",
        Kind::Send => "message sent",
        Kind::Receive => "message received",
    }
}

/// The part of the time of all ranks.
fn of_all(page: &Page, kind: Kind) -> Markup {
    let times = || page.ranks.iter().filter_map(|rank| rank.times);
    let spent =
        |of: fn(&crate::observe::page::model::Times) -> f64| times().map(|times| of(&times)).sum::<f64>();
    let spent_s = match kind {
        Kind::Compute => spent(|times| times.compute_s),
        Kind::Wait => spent(|times| times.wait_s),
        Kind::Copy => spent(|times| times.copy_s),
        Kind::Send | Kind::Receive => return html! {},
    };
    #[expect(clippy::cast_precision_loss, reason = "ranks")]
    let whole_s = page.wall_s.unwrap_or(0.0) * times().count() as f64;
    html! { @if whole_s > 0.0 { ", " (in_hundred((spent_s / whole_s).min(1.0))) } }
}

/// From nanoseconds on the clock of rank 0 to a place on the axis.
struct Scale {
    start_ns: i64,
    whole_ns: u64,
}

impl Scale {
    fn part(&self, ns: i64) -> f64 {
        ratio(u64::try_from(ns.saturating_sub(self.start_ns)).unwrap_or(0), self.whole_ns)
    }

    fn whole_s(&self) -> f64 {
        seconds(self.whole_ns)
    }

    /// Seconds since the start.
    fn since_s(&self, ns: i64) -> f64 {
        seconds(u64::try_from(ns.saturating_sub(self.start_ns)).unwrap_or(0))
    }

    /// Seconds between two ticks: 1, 2 or 5 times a power of ten, for 3 to 7 ticks.
    fn step_s(&self) -> f64 {
        let rough = self.whole_s() / 5.0;
        let power = 10_f64.powf(rough.log10().floor());
        let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| rough <= factor * power);
        factor.unwrap_or(10.0) * power
    }

    /// Places and labels of ticks.
    fn ticks(&self) -> Vec<(f64, String)> {
        let step_s = self.step_s();
        let places = (0..TICKS).map(|tick| f64::from(tick) * step_s);
        // A label at the right end would not fit.
        let fitting = places.take_while(|at_s| at_s / self.whole_s() <= 0.96);
        fitting.map(|at_s| (at_s / self.whole_s(), tick_label(at_s, step_s))).collect()
    }
}

fn tick_label(at_s: f64, step_s: f64) -> String {
    let (unit, factor) = match step_s {
        step if step >= 0.5 => ("s", 1.0),
        step if step >= 0.5e-3 => ("ms", 1e3),
        _ => ("µs", 1e6),
    };
    let decimals = usize::from(step_s * factor < 0.95);
    if at_s == 0.0 { "0".to_owned() } else { format!("{:.decimals$} {unit}", at_s * factor) }
}

fn axis(scale: &Scale) -> Markup {
    html! {
        div.axis aria-hidden="true" {
            span {}
            div.ticks {
                @for (at, label) in scale.ticks() { span style={ "left:" (percentage(at)) } { (label) } }
            }
        }
    }
}

fn lane(rank: &RankFigures, row: &TimelineRow, scale: &Scale, rows: usize) -> Markup {
    let dense = rows > FEW;
    let told = told(rank, row);
    html! {
        details.lane {
            summary title=(told) {
                span { "rank " (rank.rank) }
                svg.plot role="img" aria-label=(told) {
                    @for (segment, y, height) in placed(row, dense) {
                        @let from = scale.part(segment.start_ns);
                        @let width = (scale.part(segment.end_ns) - from).max(THINNEST);
                        rect class=(segment.kind.name()) x=(percentage(from)) y=(y) width=(percentage(width)) height=(height) {
                            title { (words(segment, scale)) }
                        }
                    }
                }
            }
            p.note { (told) "." }
            (scrolled(&format!("Longest segments of rank {}", rank.rank), longest(row, scale, rows)))
        }
    }
}

/// Segments with top and height in CSS pixels, in the order in which they are drawn. Shares of one
/// stretch of time stand on top of each other, compute at the bottom.
fn placed(row: &TimelineRow, dense: bool) -> Vec<(&Segment, f64, f64)> {
    let kinds = kinds(dense);
    let mut whole: Vec<&Segment> =
        row.segments.iter().filter(|s| kinds.contains(&s.kind) && !is_share(s)).collect();
    // Waits first: what happens inside them is drawn over them.
    whole.sort_by_key(|segment| segment.kind);
    let mut out: Vec<_> = whole
        .into_iter()
        .map(|segment| {
            let (y, height) = place(segment.kind, dense);
            (segment, y, height)
        })
        .collect();
    let mut used: BTreeMap<i64, f64> = BTreeMap::new();
    for kind in kinds {
        for segment in row.segments.iter().filter(|segment| segment.kind == *kind && is_share(segment)) {
            let share = ratio(segment.busy_ns, segment.end_ns.abs_diff(segment.start_ns));
            let (top, height) = place(*kind, dense);
            let below = match kind.is_message() {
                true => 0.0,
                false => used.get(&segment.start_ns).copied().unwrap_or(0.0),
            };
            let share = share.min(1.0 - below);
            if !kind.is_message() {
                used.insert(segment.start_ns, below + share);
            }
            let pixels = |part: f64| (part * height * 10.0).round() / 10.0;
            out.push((segment, top + pixels(1.0 - below - share), pixels(share)));
        }
    }
    out
}

/// Whether a segment is a stretch of time of which its kind has a share.
const fn is_share(segment: &Segment) -> bool {
    segment.events != 1 || segment.busy_ns < segment.end_ns.abs_diff(segment.start_ns)
}

/// Top and height of a kind of segment, in CSS pixels.
const fn place(kind: Kind, dense: bool) -> (f64, f64) {
    match (kind, dense) {
        (Kind::Wait | Kind::Compute | Kind::Copy, false) => (0.0, 17.0),
        (Kind::Wait | Kind::Compute | Kind::Copy, true) => (0.0, 12.0),
        (Kind::Send, _) => (19.0, 5.0),
        (Kind::Receive, _) => (25.0, 5.0),
    }
}

/// What a rank did, in words.
fn told(rank: &RankFigures, row: &TimelineRow) -> String {
    let mut out = format!("rank {}", rank.rank);
    if let Some(times) = rank.times {
        out.push_str(&format!(
            ": computed {}, waited {}, copied {}",
            duration(times.compute_s),
            duration(times.wait_s),
            duration(times.copy_s)
        ));
    }
    if !row.waited_for.is_empty() {
        let peers = row.waited_for.iter().take(MOST_PEERS);
        let peers: Vec<String> =
            peers.map(|(peer, ns)| format!("rank {peer} {}", duration(seconds(*ns)))).collect();
        let more = if row.waited_for.len() > MOST_PEERS { ", …" } else { "" };
        out.push_str(&format!("; waits ended by messages with {}{more}", peers.join(", ")));
    }
    out
}

fn words(segment: &Segment, scale: &Scale) -> String {
    let Segment { kind, start_ns, end_ns, busy_ns, events, text } = segment;
    let (from, whole) = (duration(scale.since_s(*start_ns)), duration(seconds(end_ns.abs_diff(*start_ns))));
    match events {
        1 if text.is_empty() => format!("{}: {whole} from {from} on", kind.name()),
        1 => format!("{}: {text}; {whole} from {from} on", kind.name()),
        events => {
            format!(
                "{}: {events} events, {} of {whole} from {from} on",
                kind.name(),
                duration(seconds(*busy_ns))
            )
        }
    }
}

fn longest(row: &TimelineRow, scale: &Scale, rows: usize) -> Markup {
    let mut segments: Vec<&Segment> = row.segments.iter().collect();
    segments.sort_by_key(|segment| (std::cmp::Reverse(segment.busy_ns), segment.start_ns));
    segments.truncate((ALL_ROWS / rows.max(1)).clamp(5, MOST_ROWS));
    segments.sort_by_key(|segment| segment.start_ns);
    html! {
        table {
            thead { tr {
                th.text scope="col" { "kind" } th scope="col" { "from" } th scope="col" { "for" } th scope="col" { "events" }
                th.wide.text scope="col" { "what" }
            } }
            tbody { @for segment in segments { tr {
                td.text { (segment.kind.name()) }
                td { (exact(scale.since_s(segment.start_ns), duration(scale.since_s(segment.start_ns)))) }
                td { (exact(seconds(segment.busy_ns), duration(seconds(segment.busy_ns)))) }
                td { (count(segment.events)) }
                td.wide.text { (segment.text) }
            } } }
        }
    }
}

/// What is drawn of how many events.
fn merged(timeline: &Timeline) -> String {
    let events = plural(timeline.rows.iter().map(|row| row.events).sum(), "event");
    let shares = timeline.rows.iter().flat_map(|row| &row.segments).any(is_share);
    let drawn = match shares {
        false => String::new(),
        true => ", too many to draw each: the heights of colours are shares of time".to_owned(),
    };
    let messages = match timeline.rows.len() <= FEW {
        true => String::new(),
        false => format!("; messages are drawn for up to {FEW} ranks"),
    };
    format!("{events} of all ranks{drawn}{messages}. ")
}

fn clocks(timeline: &Timeline) -> String {
    match timeline.rows.iter().map(|row| row.clock_within_ns).max().unwrap_or(0) {
        0 => String::new(),
        ns => format!("Clocks of ranks agree within {}.", duration(seconds(ns))),
    }
}

/// Up to this many ranks, messages are drawn and lanes are high.
const FEW: usize = MOST_WITH_MESSAGES as usize;
const TICKS: u32 = 12;
/// A shorter segment is drawn with this part of the width.
const THINNEST: f64 = 0.0008;
const MOST_PEERS: usize = 4;
/// Rows of all tables together, and of one.
const ALL_ROWS: usize = 2000;
const MOST_ROWS: usize = 60;
