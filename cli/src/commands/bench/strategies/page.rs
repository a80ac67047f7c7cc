//! The results as one HTML page.

use maud::{Markup, html};

use super::journal::Header;
use super::record::{Measured, RankMeasured, Record, State, by_case, median_s, refusals};
use crate::observe::page::parts::{
    Head, Section, bar, bytes, counted, document, numbers, scrolled, seconds, shares, swatch,
};

/// The page.
pub(super) fn html(header: &Header, records: &[Record]) -> String {
    let count = |state: State| records.iter().filter(|record| record.state == state).count();
    let (done, refused, failed) = (count(State::Done), count(State::Refused), count(State::Failed));
    let summary = format!("{done} cells with times, {refused} refused, {failed} failed.");
    let alerts: Vec<String> = match failed {
        0 => Vec::new(),
        1 => vec!["1 cell has failed".to_owned()],
        failed => vec![format!("{failed} cells have failed")],
    };
    let facts = facts(header);
    let head = Head {
        title: "Strategies of a group",
        badge: "measured",
        summary: &summary,
        alerts: &alerts,
        facts: &facts,
    };
    let mut sections = Vec::new();
    for (number, (case, cells)) in by_case(records).into_iter().enumerate() {
        let mut timed: Vec<(&Record, &Measured)> =
            cells.iter().filter_map(|record| Some((*record, record.measured.as_ref()?))).collect();
        timed.sort_by(|a, b| median_s(a.0).total_cmp(&median_s(b.0)));
        if !timed.is_empty() {
            sections.push(Section::named(format!("case-{number}"), case, of_case(&timed)));
        }
    }
    if failed > 0 {
        sections.push(Section::new("failed", "Failed cells", failures(records)));
    }
    if refused > 0 {
        sections.push(Section::new("refused", "Refused cells", refused_cells(records)));
    }
    document(&head, sections)
}

fn facts(header: &Header) -> Vec<(&'static str, String)> {
    let Header { release, ranks, processes, transport, devices, repeat, messages } = header;
    let mut kinds: Vec<&String> = devices.iter().collect();
    kinds.dedup();
    let kinds: Vec<&str> = kinds.into_iter().map(String::as_str).collect();
    let place = if *processes { "each a process" } else { "in one process" };
    vec![
        ("ranks", format!("{ranks}, {place}, {transport}")),
        ("devices", kinds.join(", ")),
        ("messages", messages.clone()),
        ("runs of each cell", format!("{repeat}, after one that compiles kernels")),
        ("release", release.clone()),
    ]
}

fn of_case(timed: &[(&Record, &Measured)]) -> Markup {
    let slowest_s = timed.iter().map(|(_, measured)| measured.median_s).fold(0.0, f64::max);
    html! {
        (scrolled("Times of all cells", html! {
            table {
                thead { tr {
                    th.text scope="col" { "strategy" } th.text scope="col" { "mesh" } th.text scope="col" { "placement" }
                    th scope="col" { "median" } th scope="col" { "from" } th scope="col" { "to" }
                    th scope="col" { "time" } th scope="col" { "predicted" } th scope="col" { "predicted / measured" }
                    th scope="col" { "sent" } th scope="col" { "packets" } th scope="col" { "peak of plan" }
                    th scope="col" { "peak of process" } th scope="col" { "error" }
                } }
                tbody { @for (record, measured) in timed { (cell(record, measured, slowest_s)) } }
            }
        }))
        (numbers("Phases of each rank", phases(timed)))
    }
}

fn cell(record: &Record, measured: &Measured, slowest_s: f64) -> Markup {
    let Measured { median_s, min_s, max_s, max_abs_error, per_rank, .. } = measured;
    let most = |of: fn(&RankMeasured) -> Option<u64>| per_rank.iter().filter_map(of).max();
    let predicted_s = record.predicted.as_ref().map(|predicted| predicted.wall_s);
    html! {
        tr {
            th.text scope="row" { (record.name.strategy) } td.text { (record.name.mesh) }
            td.text { (record.name.placement.as_deref().unwrap_or_default()) }
            td { (seconds(*median_s)) } td { (seconds(*min_s)) } td { (seconds(*max_s)) }
            td.barred { (bar(if slowest_s > 0.0 { median_s / slowest_s } else { 0.0 }, "compute")) }
            td { @if let Some(predicted_s) = predicted_s { (seconds(predicted_s)) } }
            td { @if let Some(predicted_s) = predicted_s { (format!("{:.2}", predicted_s / median_s)) } }
            td { (bytes(record.most_sent())) }
            td { @if let Some(sent) = most(|rank| rank.wire_bytes) { (bytes(sent)) } }
            td { (bytes(record.most_memory())) }
            td { @if let Some(peak) = most(|rank| rank.process_peak_bytes) { (bytes(peak)) } }
            td { (format!("{max_abs_error:.1e}")) }
        }
    }
}

fn phases(timed: &[(&Record, &Measured)]) -> Markup {
    html! {
        ul.legend aria-label="Legend" {
            li { (swatch("compute")) "compute" } li { (swatch("wait")) "wait" } li { (swatch("copy")) "copy" }
        }
        table {
            thead { tr {
                th.text scope="col" { "cell" } th scope="col" { "rank" } th scope="col" { "tokens" } th scope="col" { "plan" }
                th scope="col" { "load" } th scope="col" { "compile" } th scope="col" { "compute" } th scope="col" { "wait" }
                th scope="col" { "copy" } th scope="col" { "of the run" } th scope="col" { "collect" } th scope="col" { "sent" }
                th scope="col" { "messages" } th scope="col" { "peak of plan" }
            } }
            tbody { @for (record, measured) in timed { @for rank in &measured.per_rank { (phase(record, rank)) } } }
        }
    }
}

fn phase(record: &Record, rank: &RankMeasured) -> Markup {
    let parts = [("compute", rank.compute_s), ("wait", rank.wait_s), ("copy", rank.copy_s)];
    html! {
        tr {
            th.text scope="row" { (record.name.way()) } td { (rank.rank) } td { (counted(rank.tokens)) }
            td { (seconds(rank.plan_s)) } td { (seconds(rank.load_s)) } td { (seconds(rank.compile_s)) }
            td { (seconds(rank.compute_s)) } td { (seconds(rank.wait_s)) } td { (seconds(rank.copy_s)) }
            td.barred { (shares(&parts, rank.wall_s)) } td { (seconds(rank.collect_s)) }
            td { (bytes(rank.bytes_sent)) } td { (counted(rank.messages_sent)) } td { (bytes(rank.peak_bytes)) }
        }
    }
}

fn failures(records: &[Record]) -> Markup {
    html! {
        ul.findings {
            @for record in records.iter().filter(|record| record.state == State::Failed) {
                li { strong { (record.name) ": " } (record.why.as_deref().unwrap_or_default()) }
            }
        }
    }
}

fn refused_cells(records: &[Record]) -> Markup {
    html! {
        @for (why, count) in refusals(records) {
            (numbers(&format!("{count}: {why}"), html! {
                table { tbody {
                    @for record in records {
                        @if record.state == State::Refused && record.why.as_deref() == Some(&why[..]) {
                            tr { td.text { (record.name) } }
                        }
                    }
                } }
            }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cells::CellName;
    use super::*;

    #[test]
    fn no_text_of_a_cell_is_markup_and_numbers_are_exact() {
        let name = |strategy: &str| CellName {
            shape: [1, 8, 2, 2, 8],
            mask: "full".to_owned(),
            dtype: "f32".to_owned(),
            mesh: "1x2".to_owned(),
            strategy: strategy.to_owned(),
            placement: Some("zigzag".to_owned()),
        };
        let rank =
            RankMeasured { device: "<b>cpu".to_owned(), bytes_sent: 12_345, ..RankMeasured::default() };
        let measured = Measured {
            median_s: 0.25,
            min_s: 0.125,
            max_s: 0.5,
            runs: 3,
            max_abs_error: 1e-7,
            tolerance: 1e-6,
            per_rank: vec![rank],
        };
        let done = Record {
            name: name("ring"),
            state: State::Done,
            why: None,
            predicted: None,
            measured: Some(measured),
        };
        let evil = "<script>alert(1)</script> & \"more\"";
        let records = [
            done,
            Record::without_times(name("gather"), State::Failed, evil),
            Record::without_times(name("tree"), State::Refused, evil),
        ];
        let header = Header {
            release: "1".to_owned(),
            ranks: 1,
            processes: false,
            transport: "in-process".to_owned(),
            devices: vec![evil.to_owned()],
            repeat: 3,
            messages: evil.to_owned(),
        };
        let page = html(&header, &records);
        assert!(!page.contains("<script") && page.matches("&lt;script").count() >= 3);
        for value in ["0.25", "0.125", "0.5", "12345"] {
            assert!(page.contains(&format!("<data value=\"{value}\">")), "{value}");
        }
        let xml = page.split_inclusive('>').map(|part| match part.contains("<meta ") {
            true => format!("{}/>", part.trim_end_matches('>')),
            false => part.to_owned(),
        });
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..roxmltree::ParsingOptions::default() };
        let xml: String = xml.collect();
        roxmltree::Document::parse_with_options(&xml, options).unwrap();
    }
}
