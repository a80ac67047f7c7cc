//! The numbers of all ranks: the table that the program prints.

use maud::{Markup, html};

use super::frame::{Section, bytes, counted, scrolled, seconds, share};
use crate::observe::page::model::{Page, RankFigures, Times};

pub(super) fn section(page: &Page) -> Section {
    Section::new("ranks", "Numbers of all ranks", scrolled("Numbers of all ranks", table(page)))
}

fn table(page: &Page) -> Markup {
    let has_times = page.ranks.iter().any(|rank| rank.times.is_some());
    let has_devices = page.ranks.iter().any(|rank| !rank.device.is_empty());
    html! {
        table {
            thead { tr {
                th scope="col" { "rank" }
                @if has_devices { th.text scope="col" { "device" } }
                th scope="col" { "tokens" }
                @if has_times {
                    th scope="col" { "computed" } th scope="col" { "waited" } th scope="col" { "copied" }
                    th scope="col" { "waited, of all" }
                }
                th scope="col" { "sent" } th scope="col" { "messages" } th scope="col" { "peak memory" }
            } }
            tbody { @for (index, rank) in page.ranks.iter().enumerate() { tr {
                th scope="row" { (rank.rank) }
                @if has_devices { td.text { (rank.device) } }
                (row(rank, has_times.then(|| page.wait_share(index)).flatten()))
            } } }
        }
    }
}

fn row(rank: &RankFigures, waited: Option<f64>) -> Markup {
    html! {
        td { (counted(rank.queries)) }
        @if let Some(Times { compute_s, wait_s, copy_s, .. }) = rank.times {
            td { (seconds(compute_s)) } td { (seconds(wait_s)) } td { (seconds(copy_s)) }
            td { @if let Some(waited) = waited { (share(waited)) } }
        }
        td { (bytes(rank.bytes_sent)) } td { (counted(rank.messages_sent)) } td { (bytes(rank.peak_bytes)) }
    }
}
