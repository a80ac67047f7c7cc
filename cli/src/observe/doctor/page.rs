//! A diagnosis as a page: findings, ranks, bytes between them, and their last events.

use maud::{Markup, html};

use super::Diagnosis;
use super::read::Record;
use super::slowness::waited_ns;
use super::words::Finding;
use crate::observe::page::model::{Page, RankFigures, Traffic};
use crate::observe::page::parts::{
    Head, Section, counted, document, exact, numbers, scrolled, shares, swatch, traffic_section,
};
use crate::observe::page::units::{duration, seconds};
use crate::observe::record::format::{EventLine, RankLine, Spent};

impl Diagnosis {
    /// The page of `--report`.
    pub(crate) fn page(&self) -> String {
        let Self { records, findings, slow } = self;
        let of_job = records.first().map(|record| &record.rank);
        let facts = of_job.map_or_else(Vec::new, |line| {
            vec![
                ("job", line.job.clone()),
                ("strategy and mesh", format!("{} over {}", line.strategy, line.mesh)),
                ("release", line.version.clone()),
            ]
        });
        let there = match records.len() {
            1 => "1 record".to_owned(),
            records => format!("{records} records"),
        };
        let summary = match (findings.first(), slow.first()) {
            (Some(finding), _) => format!("{there}. Likely cause: {}.", finding.text),
            (None, Some(hint)) => format!("{there}; no problem found. Slow: {}.", hint.text),
            (None, None) => format!("{there}; no problem found."),
        };
        let head = Head {
            title: "Diagnosis of a run",
            badge: "from records",
            summary: &summary,
            alerts: &[],
            facts: &facts,
        };
        let sections = vec![
            Section::new("findings", "Findings", listed(findings, slow)),
            Section::new("ranks", "Ranks at their last step", ranks(records)),
            traffic_section(&traffic(records)),
            Section::new("events", "Last events of each rank", events(records)),
        ];
        document(&head, sections)
    }
}

fn listed(findings: &[Finding], slow: &[Finding]) -> Markup {
    let item = |kind: &str, finding: &Finding| {
        html! { li { strong { (kind) " (" (finding.what) "): " } (finding.text) } }
    };
    html! {
        @if findings.is_empty() { p { "No problem found." } }
        ul.findings {
            @for finding in findings { (item("Problem", finding)) }
            @for finding in slow { (item("Slow", finding)) }
        }
    }
}

fn ranks(records: &[Record]) -> Markup {
    let failed = records.iter().any(|record| record.rank.error.is_some());
    let network =
        records.iter().find_map(|record| record.rank.network.as_deref().zip(Some(record.rank.rank)));
    let table = html! {
        table {
            thead { tr {
                th scope="col" { "rank" } th.text scope="col" { "ended" } th scope="col" { "operation" } th scope="col" { "step" }
                th scope="col" { "pending calls" } th scope="col" { "computed" } th scope="col" { "waited" }
                th scope="col" { "copied" } th.text scope="col" { "time" } th.wide.text scope="col" { "doing" }
                @if failed { th.wide.text scope="col" { "error" } }
            } }
            tbody { @for record in records { (row(record, failed)) } }
        }
    };
    html! {
        ul.legend aria-label="Legend" {
            li { (swatch("compute")) "compute" } li { (swatch("wait")) "wait for messages" } li { (swatch("copy")) "copy" }
        }
        (scrolled("Ranks at their last step", table))
        @if let Some((network, rank)) = network { p.note { "Network of rank " (rank) ": " (network) "." } }
    }
}

fn row(record: &Record, failed: bool) -> Markup {
    let RankLine { rank, why, at, spent, error, .. } = &record.rank;
    let time = |ns: u64| exact(ns, duration(seconds(ns)));
    html! {
        tr {
            th scope="row" { (rank) } td.text { (why) } td { (counted(at.op)) } td { (counted(u64::from(at.step))) }
            td { (counted(record.calls.len() as u64)) } td { (time(spent.compute_ns)) } td { (time(waited_ns(*spent))) }
            td { (time(spent.device_copy_ns)) } td.barred { (spent_bar(*spent)) }
            td.wide.text { (at.doing.as_deref().unwrap_or_default()) }
            @if failed { td.wide.text { (error.as_deref().unwrap_or_default()) } }
        }
    }
}

/// The shares of a rank's time, side by side.
fn spent_bar(spent: Spent) -> Markup {
    let parts = [("compute", spent.compute_ns), ("wait", waited_ns(spent)), ("copy", spent.device_copy_ns)];
    let parts = parts.map(|(class, ns)| (class, seconds(ns)));
    shares(&parts, parts.iter().map(|(_, part_s)| part_s).sum())
}

/// What ranks have sent to each other, by their own records.
fn traffic(records: &[Record]) -> Page {
    let of_record = |record: &Record| {
        let from = record.rank.rank;
        let peers = record.peers.iter().filter(|peer| peer.bytes_sent > 0);
        peers
            .map(|peer| Traffic { from, to: peer.rank, bytes: peer.bytes_sent, messages: peer.messages_sent })
            .collect::<Vec<_>>()
    };
    let size = records.first().map_or(0, |record| record.rank.size);
    Page {
        ranks: (0..size).map(|rank| RankFigures { rank, ..RankFigures::default() }).collect(),
        traffic: records.iter().flat_map(of_record).collect(),
        ..Page::default()
    }
}

fn events(records: &[Record]) -> Markup {
    let most = (ALL_EVENTS / records.len().max(1)).clamp(10, MOST_EVENTS);
    html! {
        @for record in records {
            @let shown = &record.events[record.events.len().saturating_sub(most)..];
            @let older = record.rank.forgotten + (record.events.len() - shown.len()) as u64;
            (numbers(&format!("rank {}: {} events", record.rank.rank, shown.len()), html! {
                @if older > 0 { p.note { (counted(older)) " older events are not shown." } }
                (event_table(shown))
            }))
        }
    }
}

fn event_table(events: &[EventLine]) -> Markup {
    html! {
        table {
            thead { tr {
                th scope="col" { "at" } th.text scope="col" { "event" } th scope="col" { "peer" } th scope="col" { "operation" }
                th scope="col" { "message" } th scope="col" { "step" } th scope="col" { "bytes" }
            } }
            tbody { @for event in events { tr {
                td { (exact(event.at_ns, duration(seconds(event.at_ns)))) } td.text { (event.event) } td { "rank " (event.peer) }
                td { (event.op) } td { (event.message) } td { (event.step) } td { (counted(event.bytes)) }
            } } }
        }
    }
}

/// Events of all ranks together, and of one.
const ALL_EVENTS: usize = 6000;
const MOST_EVENTS: usize = 200;
