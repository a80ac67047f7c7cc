//! The most memory that each rank needs at once, beside its budget.

use maud::{Markup, html};

use super::frame::{Section, bar, bytes, numbers, scrolled, share};
use crate::observe::page::model::{Budget, Page, RankFigures};
use crate::observe::page::units::ratio;

pub(super) fn section(page: &Page) -> Section {
    let label = "Memory of each rank";
    let most = page.ranks.iter().map(|rank| rank.peak_bytes).max().unwrap_or(0);
    let table = table(page, most);
    let body = html! {
        p { "A rank holds at most " (kyklos::plan::bytes(most)) " of plan buffers at once: inputs, output, and what it keeps between \
            steps. Memory of kernels and of the network is not counted." }
        @if page.ranks.iter().all(|rank| rank.budget.is_none()) {
            p.note { "No budget is known here; bars compare ranks." }
        }
        @if page.ranks.len() <= FEW { (scrolled(label, table)) } @else { (numbers(label, table)) }
    };
    Section::new("memory", "Memory", body)
}

fn table(page: &Page, most: u64) -> Markup {
    html! {
        table {
            thead { tr {
                th scope="col" { "rank" } th scope="col" { "peak" } th.text scope="col" { "budget" } th.barred colspan="2" scope="colgroup" { (of_what(page)) }
            } }
            tbody { @for rank in &page.ranks { tr {
                th scope="row" { (rank.rank) } td { (bytes(rank.peak_bytes)) } td.text { (budget(rank)) }
                (filled(rank, most))
            } } }
        }
    }
}

fn of_what(page: &Page) -> &'static str {
    match page.ranks.iter().any(|rank| rank.budget.is_some_and(|budget| budget.shared_by > 1)) {
        true => "peaks of all sharing ranks, of the budget",
        false if page.ranks.iter().any(|rank| rank.budget.is_some()) => "peak, of the budget",
        false => "peak, of the largest",
    }
}

fn budget(rank: &RankFigures) -> Markup {
    html! {
        @match rank.budget {
            None => "not known",
            Some(Budget { bytes: budget, shared_by }) => {
                (bytes(budget)) @if shared_by > 1 { ", shared by " (shared_by) " ranks" }
            }
        }
    }
}

fn filled(rank: &RankFigures, most: u64) -> Markup {
    let (part, class) = match rank.budget {
        None => (ratio(rank.peak_bytes, most), "predicted"),
        Some(Budget { bytes, shared_by }) => {
            let part = ratio(rank.peak_bytes.saturating_mul(u64::from(shared_by)), bytes);
            (part, if part > 1.0 { "over" } else { "compute" })
        }
    };
    html! { td.tight { (share(part)) } td.barred { (bar(part, class)) } }
}

/// Up to this many ranks, the table is open.
const FEW: usize = 32;
