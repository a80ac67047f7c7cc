//! The frame of a page: head, navigation, sections, and small parts that sections share.

use std::borrow::Cow;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::observe::page::units::{count, in_hundred};

/// What stands above the sections.
pub(crate) struct Head<'a> {
    pub(crate) title: &'a str,
    /// Where the numbers come from.
    pub(crate) badge: &'a str,
    /// One sentence.
    pub(crate) summary: &'a str,
    pub(crate) alerts: &'a [String],
    pub(crate) facts: &'a [(&'static str, String)],
}

/// A part of a page with a heading.
pub(crate) struct Section {
    /// For links to it.
    pub(crate) id: Cow<'static, str>,
    pub(crate) title: Cow<'static, str>,
    pub(crate) body: Markup,
}

impl Section {
    pub(crate) fn new(id: &'static str, title: &'static str, body: Markup) -> Self {
        Self { id: id.into(), title: title.into(), body }
    }

    /// A section of which there are several kinds: its id is made by the caller, from letters,
    /// digits and dashes.
    pub(crate) fn named(id: String, title: String, body: Markup) -> Self {
        Self { id: id.into(), title: title.into(), body }
    }

    /// The same section of one of two passes. `id` is empty, or begins the links to all sections of
    /// the pass.
    pub(super) fn of_pass(self, (id, pass): (&str, &str)) -> Self {
        let Self { id: own, title, body } = self;
        Self { id: format!("{id}{own}").into(), title: format!("{title}, {pass} pass").into(), body }
    }
}

/// The whole page.
pub(crate) fn document(head: &Head<'_>, sections: Vec<Section>) -> String {
    let body = html! {
        a.skip href="#main" { "Skip to the pictures" }
        header {
            p.brand { "kyklos" span.badge { (head.badge) } }
            h1 { (head.title) }
            p.summary { (head.summary) }
            @for alert in head.alerts {
                p.alert role="alert" { strong { "Attention: " } (alert) }
            }
            dl.facts {
                @for (name, value) in head.facts {
                    div { dt { (name) } dd { (value) } }
                }
            }
            nav aria-label="Sections" {
                @for section in &sections { a href={ "#" (section.id) } { (section.title) } }
            }
        }
        main id="main" {
            @for section in &sections {
                section id=(section.id) aria-labelledby={ (section.id) "-title" } {
                    h2 id={ (section.id) "-title" } { (section.title) }
                    (section.body)
                }
            }
        }
        footer { p { "Written by kyklos " (env!("CARGO_PKG_VERSION")) ". This file needs no network and runs no script." } }
    };
    // Whatever a text says, the page loads nothing and runs nothing.
    let policy = html! {
        meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'";
    };
    shell(head.title, policy, body)
}

/// A page with the style sheet and the patterns that it names.
pub(crate) fn shell(title: &str, more: Markup, body: Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                (more)
                title { (title) " – kyklos" }
                style { (PreEscaped(STYLE)) (PreEscaped(fills())) }
            }
            body { (patterns()) (body) }
        }
    };
    page.into_string()
}

/// The report of `--json`, for programs and for readers who want every digit.
pub(super) fn raw(json: &str) -> Option<Section> {
    let body = html! {
        details { summary { "The object that --json prints" } pre tabindex="0" { (json) } }
    };
    (!json.is_empty() && json.len() <= MOST_JSON).then(|| Section::new("json", "Report as JSON", body))
}

/// A table that scrolls by itself where it is wider than the page.
pub(crate) fn scrolled(label: &str, table: Markup) -> Markup {
    html! { div.scroll tabindex="0" role="region" aria-label=(label) { (table) } }
}

/// A picture's numbers as a table, which opens on demand.
pub(crate) fn numbers(label: &str, table: Markup) -> Markup {
    html! { details { summary { (label) } (scrolled(label, table)) } }
}

/// A number as readers see it, with the exact one for programs.
pub(crate) fn exact(value: impl std::fmt::Display, shown: impl std::fmt::Display) -> Markup {
    html! { data value=(value) { (shown) } }
}

pub(crate) fn bytes(bytes: u64) -> Markup {
    exact(bytes, kyklos::plan::bytes(bytes))
}

pub(crate) fn counted(number: u64) -> Markup {
    exact(number, count(number))
}

pub(crate) fn seconds(seconds: f64) -> Markup {
    exact(seconds, crate::observe::page::units::duration(seconds))
}

pub(super) fn share(share: f64) -> Markup {
    exact(share, in_hundred(share))
}

/// A horizontal bar of a share between 0 and 1.
pub(crate) fn bar(share: f64, class: &str) -> Markup {
    html! {
        svg.bar aria-hidden="true" { rect class=(class) width=(percentage(share)) height="100%" {} }
    }
}

/// Parts of a whole side by side, each with its class and its seconds.
pub(crate) fn shares(parts: &[(&str, f64)], whole_s: f64) -> Markup {
    let mut from = 0.0;
    let bars = parts.iter().map(|(class, part_s)| {
        let (at, share) = (from, part_s / whole_s.max(1e-9));
        from += share;
        (*class, at, share)
    });
    html! {
        svg.bar aria-hidden="true" {
            @for (class, at, share) in bars {
                rect class=(class) x=(percentage(at)) width=(percentage(share)) height="100%" {}
            }
        }
    }
}

/// A share as a length in SVG and CSS.
pub(crate) fn percentage(share: f64) -> String {
    let text = format!("{:.3}", share.clamp(0.0, 1.0) * 100.0);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}

/// The class that fills with the colour and pattern of a rank. Colours repeat with another pattern;
/// labels always name ranks.
pub(super) fn fill_of(rank: u32) -> String {
    format!("f{}", rank % (COLOURS * 3))
}

/// The box of a legend.
pub(crate) fn swatch(class: &str) -> Markup {
    html! { svg.swatch aria-hidden="true" { rect class=(class) width="100%" height="100%" {} } }
}

/// The fills of ranks that share a colour: hatched, then dotted. Cells of masks are scaled, so they
/// have finer patterns.
fn fills() -> String {
    let rule = |colour: u32| {
        let [hatched, dotted] = [COLOURS + colour, 2 * COLOURS + colour];
        format!(
            ".f{hatched}{{fill:url(#h{colour})}}.f{dotted}{{fill:url(#d{colour})}}\
             .cells .f{hatched}{{fill:url(#hm{colour})}}.cells .f{dotted}{{fill:url(#dm{colour})}}"
        )
    };
    (0..COLOURS).map(rule).collect()
}

/// Patterns that the style sheet names: of the colours of ranks, of waits and copies, and of blocks
/// of several ranks.
fn patterns() -> Markup {
    html! {
        svg.patterns aria-hidden="true" width="0" height="0" {
            defs {
                @for colour in 0..COLOURS {
                    @let class = format!("c{colour}");
                    (hatch(&format!("h{colour}"), &class, 1.0)) (hatch(&format!("hm{colour}"), &class, FINER))
                    (dots(&format!("d{colour}"), &class, 1.0)) (dots(&format!("dm{colour}"), &class, FINER))
                }
                (hatch("hatch-wait", "cw", 1.0))
                (dots("dots-copy", "cc", 1.0))
                (hatch("hatch-several", "cs", 1.0)) (hatch("hatch-several-cells", "cs", FINER))
            }
        }
    }
}

fn hatch(id: &str, class: &str, scale: f64) -> Markup {
    html! {
        pattern id=(id) width="6" height="6" patternUnits="userSpaceOnUse" patternTransform={ "rotate(45) scale(" (scale) ")" } {
            rect.(class).pale width="6" height="6" {}
            rect.(class) width="3" height="6" {}
        }
    }
}

fn dots(id: &str, class: &str, scale: f64) -> Markup {
    html! {
        pattern id=(id) width="6" height="6" patternUnits="userSpaceOnUse" patternTransform={ "scale(" (scale) ")" } {
            rect.(class).pale width="6" height="6" {}
            circle.(class) cx="2" cy="2" r="1.6" {}
            circle.(class) cx="5" cy="5" r="1.6" {}
        }
    }
}

const STYLE: &str = include_str!("page.css");
/// Colours that readers tell apart, colour-blind ones too.
const COLOURS: u32 = 8;
/// Cells of masks are drawn about four pixels wide.
const FINER: f64 = 0.25;
const MOST_JSON: usize = 256 << 10;
