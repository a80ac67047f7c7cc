//! Bytes between ranks: a matrix, or for many ranks a picture of it and the largest entries.

use std::collections::HashMap;

use maud::{Markup, html};

use super::frame::{Section, bar, bytes, counted, numbers, percentage, scrolled, seconds};
use crate::observe::page::model::{LinkLoad, Page, Traffic};
use crate::observe::page::units::{plural, ratio};

pub(crate) fn section(page: &Page) -> Section {
    let whole: u64 = page.traffic.iter().map(|traffic| traffic.bytes).sum();
    let messages: u64 = page.traffic.iter().map(|traffic| traffic.messages).sum();
    let body = html! {
        @if page.traffic.is_empty() {
            p { "No bytes move between ranks." }
        } @else {
            p { (kyklos::plan::bytes(whole)) " in " (plural(messages, "message")) ", between "
                (plural(page.traffic.len() as u64, "ordered pair")) " of ranks." }
            @if page.ranks.len() <= FEW { (scrolled("Bytes from each rank to each rank", matrix(page))) }
            @else { (blocks(page)) }
            (numbers("Messages and bytes of each ordered pair", pairs(page)))
        }
        @if !page.links.is_empty() {
            h3 { "Load of the described links" }
            (scrolled("Load of the described links", links(page)))
        }
    };
    Section::new("traffic", "Bytes between ranks", body)
}

fn most(page: &Page) -> u64 {
    page.traffic.iter().map(|traffic| traffic.bytes).max().unwrap_or(0)
}

fn matrix(page: &Page) -> Markup {
    let most = most(page);
    let known: HashMap<(u32, u32), u64> =
        page.traffic.iter().map(|traffic| ((traffic.from, traffic.to), traffic.bytes)).collect();
    let of = |from: u32, to: u32| known.get(&(from, to)).copied().unwrap_or(0);
    html! {
        table.heat {
            thead { tr {
                th scope="col" { "from \\ to" }
                @for rank in &page.ranks { th scope="col" { (rank.rank) } }
                th scope="col" { "all" }
            } }
            tbody { @for from in &page.ranks { tr {
                th scope="row" { (from.rank) }
                @for to in &page.ranks {
                    @let sent = of(from.rank, to.rank);
                    @if from.rank == to.rank { td.self {} }
                    @else if sent == 0 { td { "–" } }
                    @else { td style={ "--s:" (format!("{:.3}", ratio(sent, most))) } { (bytes(sent)) } }
                }
                td { (bytes(page.ranks.iter().map(|to| of(from.rank, to.rank)).sum())) }
            } } }
        }
    }
}

/// The matrix in at most [`MOST_BLOCKS`] × [`MOST_BLOCKS`] blocks of ranks.
fn blocks(page: &Page) -> Markup {
    let ranks = page.ranks.len();
    let each = ranks.div_ceil(MOST_BLOCKS);
    let blocks = ranks.div_ceil(each);
    let index: HashMap<u32, usize> =
        page.ranks.iter().enumerate().map(|(index, rank)| (rank.rank, index)).collect();
    let mut sums: HashMap<(usize, usize), u64> = HashMap::new();
    for Traffic { from, to, bytes, .. } in &page.traffic {
        if let (Some(from), Some(to)) = (index.get(from), index.get(to)) {
            *sums.entry((from / each, to / each)).or_default() += bytes;
        }
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_unstable();
    let most = sums.iter().map(|(_, sum)| *sum).max().unwrap_or(0);
    #[expect(clippy::cast_precision_loss, reason = "blocks")]
    let part = |block: usize| percentage(block as f64 / blocks.max(1) as f64);
    let named = |block: usize| {
        let ranks = &page.ranks[block * each..ranks.min((block + 1) * each)];
        match (ranks.first(), ranks.last()) {
            (Some(first), Some(last)) if first.rank != last.rank => {
                format!("ranks {} to {}", first.rank, last.rank)
            }
            (Some(first), _) => format!("rank {}", first.rank),
            _ => String::new(),
        }
    };
    html! {
        figure {
            svg.blocks role="img" {
                title { "Bytes from rows of ranks to columns of ranks" }
                @for ((from, to), sum) in &sums {
                    rect x=(part(*to)) y=(part(*from)) width=(part(1)) height=(part(1))
                        fill-opacity=(format!("{:.3}", 0.15 + 0.85 * ratio(*sum, most))) {
                        title { (named(*from)) " to " (named(*to)) ": " (kyklos::plan::bytes(*sum)) }
                    }
                }
            }
            figcaption {
                "Rows send, columns receive, rank 0 at the top and at the left. "
                @if each > 1 { "One cell is the sum over " (each) " × " (each) " ranks. " }
                "The darkest cell is " (kyklos::plan::bytes(most)) "."
            }
        }
    }
}

fn pairs(page: &Page) -> Markup {
    let mut traffic: Vec<&Traffic> = page.traffic.iter().collect();
    traffic.sort_by_key(|traffic| (std::cmp::Reverse(traffic.bytes), traffic.from, traffic.to));
    let rest = traffic.split_off(traffic.len().min(MOST_PAIRS));
    let most = most(page);
    html! {
        table {
            thead { tr {
                th scope="col" { "from" } th scope="col" { "to" } th scope="col" { "messages" } th scope="col" { "bytes" } th scope="col" {}
            } }
            tbody {
                @for Traffic { from, to, bytes: sent, messages } in traffic { tr {
                    th scope="row" { "rank " (from) } td { "rank " (to) } td { (counted(*messages)) } td { (bytes(*sent)) }
                    td.barred { (bar(ratio(*sent, most), "send")) }
                } }
                @if !rest.is_empty() { tr {
                    th scope="row" { (rest.len()) " more pairs" } td {}
                    td { (counted(rest.iter().map(|traffic| traffic.messages).sum())) }
                    td { (bytes(rest.iter().map(|traffic| traffic.bytes).sum())) } td {}
                } }
            }
        }
    }
}

fn links(page: &Page) -> Markup {
    let mut links: Vec<&LinkLoad> = page.links.iter().collect();
    let rest = links.split_off(links.len().min(MOST_LINKS));
    let wall_s = page.wall_s.or(page.predicted_s).unwrap_or(0.0);
    html! {
        table {
            thead { tr {
                th.text scope="col" { "link" } th scope="col" { "bytes" } th scope="col" { "busy" } th.barred scope="col" { "busy, of the wall time" }
            } }
            tbody { @for link in links { tr {
                th scope="row" { (link.name) } td { (bytes(link.bytes)) } td { (seconds(link.busy_s)) }
                td.barred { (bar(if wall_s > 0.0 { link.busy_s / wall_s } else { 0.0 }, "send")) }
            } } }
        }
        @if !rest.is_empty() { p.note { (plural(rest.len() as u64, "less busy link")) " not shown." } }
    }
}

/// Up to this many ranks, the matrix is a table.
const FEW: usize = 16;
const MOST_BLOCKS: usize = 40;
const MOST_PAIRS: usize = 100;
const MOST_LINKS: usize = 20;
