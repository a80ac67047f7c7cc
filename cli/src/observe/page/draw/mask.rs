//! The mask as a picture: who holds which tokens, which keys queries see, and the shares of work.

use std::collections::BTreeMap;
use std::fmt::Write;

use maud::{Markup, html};

use super::frame::{Section, bar, counted, exact, fill_of, numbers, percentage, scrolled, share, swatch};
use crate::observe::page::mask::{Holder, MaskPicture};
use crate::observe::page::model::Page;
use crate::observe::page::units::{count, plural};

pub(super) fn section(page: &Page) -> Section {
    let label = "Tokens and work of each rank";
    let body = html! {
        @if page.masks.len() > 1 {
            p.note { "Different masks of the batch; at most 4 are drawn." }
        }
        div.masks {
            @for picture in &page.masks { (figure(page, picture)) }
            div.beside {
                (legend(page))
                p.note { (page.mask_note) }
                @if page.ranks.len() <= FEW { (scrolled(label, table(page))) } @else { (numbers(label, table(page))) }
            }
        }
    };
    Section::new("mask", "Mask, tokens and work", body)
}

fn figure(page: &Page, picture: &MaskPicture) -> Markup {
    let MaskPicture { q_len, kv_len, cells, .. } = picture;
    let (rows, columns) = (cells.len(), cells.first().map_or(0, Vec::len));
    let aspect = (f64::from(*kv_len) / f64::from((*q_len).max(1))).clamp(0.4, 6.0);
    let seen = match picture.pairs {
        Some(pairs) => {
            format!("{} of {} pairs are visible", count(pairs), count(u64::from(*q_len) * u64::from(*kv_len)))
        }
        None => "Of each block of queries some were looked at".to_owned(),
    };
    let entries = match &picture.entries[..] {
        _ if page.masks.len() == 1 => String::new(),
        entries => {
            let entries: Vec<String> = entries.iter().map(u32::to_string).collect();
            format!("Batch entry {}: ", entries.join(", "))
        }
    };
    html! {
        figure {
            div.maskplot {
                span.xname { "keys → (strip: rank that holds them)" }
                span.yname { "← queries" }
                (strip(page, &picture.kv_holders, true))
                (strip(page, &picture.q_holders, false))
                svg.cells viewBox={ "0 0 " (columns) " " (rows) } preserveAspectRatio="none"
                    shape-rendering="crispEdges" role="img" style={ "aspect-ratio:" (format!("{aspect:.3}")) } {
                    title { "Mask: " (seen) }
                    desc { "A row for each block of queries, a column for each block of keys. The table has the numbers." }
                    @for ((class, level), path) in paths(page, picture) {
                        path.(class).{ "p" (level) } d=(path) {}
                    }
                }
                div.ends { span { "key 0" } span { "key " (count(u64::from(kv_len.saturating_sub(1)))) } }
            }
            figcaption { (entries) (seen) ". One cell is up to "
                (count(u64::from(q_len.div_ceil(rows.max(1) as u32)))) " × "
                (plural(u64::from(kv_len.div_ceil(columns.max(1) as u32)), "token")) "; a paler cell is visible in part." }
        }
    }
}

/// The holders of blocks, along the keys or along the queries, with the numbers of ranks where
/// there is room.
fn strip(page: &Page, holders: &[Holder], along_keys: bool) -> Markup {
    let runs = runs(holders);
    #[expect(clippy::cast_precision_loss, reason = "blocks")]
    let part = |blocks: usize| blocks as f64 / holders.len().max(1) as f64;
    let (what, room) = if along_keys { ("keys", ROOM_ALONG_KEYS) } else { ("queries", ROOM_ALONG_QUERIES) };
    html! {
        svg.strip.{ (if along_keys { "xstrip" } else { "ystrip" }) } role="img" {
            title { "Ranks that hold the " (what) }
            @for (start, length, holder) in runs {
                @let (class, label) = look(page, holder);
                @let (at, size, middle) = (part(start), part(length), part(start) + part(length) / 2.0);
                @if along_keys {
                    rect class=(class) x=(percentage(at)) width=(percentage(size)) height="100%" { title { (label) } }
                } @else {
                    rect class=(class) y=(percentage(at)) height=(percentage(size)) width="100%" { title { (label) } }
                }
                @if let (Holder::Rank(_), true) = (holder, size >= room) {
                    @let number = label.trim_start_matches("rank ");
                    @if along_keys {
                        text x=(percentage(middle)) y="50%" { (number) }
                    } @else {
                        text x="50%" y=(percentage(middle)) { (number) }
                    }
                }
            }
        }
    }
}

/// Runs of the same holder: start, length, holder.
fn runs(holders: &[Holder]) -> Vec<(usize, usize, Holder)> {
    let mut runs: Vec<(usize, usize, Holder)> = Vec::new();
    for (block, holder) in holders.iter().enumerate() {
        match runs.last_mut() {
            Some((_, length, last)) if last == holder => *length += 1,
            _ => runs.push((block, 1, *holder)),
        }
    }
    runs
}

/// Class and label of a holder.
fn look(page: &Page, holder: Holder) -> (String, String) {
    match holder {
        Holder::Rank(index) => {
            let rank = page.ranks.get(index as usize).map_or(index, |rank| rank.rank);
            (fill_of(rank), format!("rank {rank}"))
        }
        Holder::Several => ("several".to_owned(), "several ranks, in turns".to_owned()),
        Holder::Every => ("every".to_owned(), "every rank".to_owned()),
    }
}

/// Of each class and level of visibility: its cells, as rectangles of a path.
fn paths(page: &Page, picture: &MaskPicture) -> BTreeMap<(String, u8), String> {
    let mut paths: BTreeMap<(String, u8), String> = BTreeMap::new();
    for (row, (cells, holder)) in picture.cells.iter().zip(&picture.q_holders).enumerate() {
        let (class, _) = look(page, *holder);
        let mut column = 0;
        while column < cells.len() {
            let level = level(cells[column]);
            let length = cells[column..].iter().take_while(|part| self::level(**part) == level).count();
            if level > 0 {
                let path = paths.entry((class.clone(), level)).or_default();
                let _ = write!(path, "M{column} {row}h{length}v1h-{length}z");
            }
            column += length;
        }
    }
    paths
}

/// 0 where nothing is visible, 4 where everything is.
fn level(part: f32) -> u8 {
    match part {
        part if part <= 0.0 => 0,
        part if part < 0.34 => 1,
        part if part < 0.67 => 2,
        part if part < 1.0 => 3,
        _ => 4,
    }
}

fn legend(page: &Page) -> Markup {
    let holders =
        || page.masks.iter().flat_map(|picture| picture.q_holders.iter().chain(&picture.kv_holders));
    let others = [Holder::Several, Holder::Every].into_iter();
    let others: Vec<Holder> = others.filter(|other| holders().any(|holder| holder == other)).collect();
    html! {
        ul.legend aria-label="Legend" {
            @if page.ranks.len() <= MOST_IN_LEGEND {
                @for rank in &page.ranks { li { (swatch(&fill_of(rank.rank))) "rank " (rank.rank) } }
            } @else {
                li { "After " (MOST_IN_LEGEND) " ranks colours and patterns repeat; the table names the ranks in order." }
            }
            @for other in others {
                @let (class, label) = look(page, other);
                li { (swatch(&class)) (label) }
            }
        }
    }
}

fn table(page: &Page) -> Markup {
    let whole: f64 = page.ranks.iter().map(|rank| rank.pairs).sum();
    let most = page.ranks.iter().map(|rank| rank.pairs).fold(0.0, f64::max);
    let part = |pairs: f64| if whole > 0.0 { pairs / whole } else { 0.0 };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count, for reading")]
    let rounded = |pairs: f64| pairs.round() as u64;
    html! {
        table {
            thead { tr {
                th scope="col" { "rank" } th scope="col" { "queries" } th scope="col" { "keys" }
                th.barred colspan="2" scope="colgroup" { "share of work" } th scope="col" { "pairs × heads" }
                th.text scope="col" { "its queries" }
            } }
            tbody { @for rank in &page.ranks { tr {
                th scope="row" { (swatch(&fill_of(rank.rank))) (rank.rank) }
                td { (counted(rank.queries)) } td { (counted(rank.keys)) }
                td.tight { (share(part(rank.pairs))) }
                td.barred { (bar(if most > 0.0 { rank.pairs / most } else { 0.0 }, &fill_of(rank.rank))) }
                td { (exact(rank.pairs, count(rounded(rank.pairs)))) } td.text { (rank.tokens) }
            } } }
        }
    }
}

/// Up to this many ranks, the table is open.
const FEW: usize = 12;
const MOST_IN_LEGEND: usize = 24;
/// The room for a number, as a part of the strip.
const ROOM_ALONG_KEYS: f64 = 0.04;
const ROOM_ALONG_QUERIES: f64 = 0.028;
