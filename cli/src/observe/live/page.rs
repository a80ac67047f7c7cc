//! The live page without its numbers: the script fills them in.

use std::sync::Arc;

use maud::{PreEscaped, html};

use crate::observe::page::parts::shell;

/// The page, the same for all calls.
pub(super) fn html() -> Arc<str> {
    let columns = ["rank", "device", "share", "health", "progress", "doing", "computed", "waited", "copied"];
    let head = html! {
        style { (PreEscaped(STYLE)) }
        script type="module" src="/live.mjs" {}
    };
    let body = html! {
        a.skip href="#main" { "Skip to the ranks" }
        header {
            p.brand { "kyklos" span.badge id="badge" { "live" } }
            h1 id="title" { "Attention" }
            p.summary id="text" role="status" { "Waiting for rank 0." }
            noscript { p.alert { "This page needs its script, which comes from rank 0 too." } }
            p.alert id="lost" role="alert" hidden {}
            p.overall {
                progress id="done" max="1" value="0" aria-label="Steps of all ranks" {}
                span id="percent" { "0 %" }
                span id="elapsed" {}
            }
            dl.facts id="facts" {}
        }
        main id="main" {
            section aria-labelledby="live-title" {
                h2 id="live-title" { "Ranks" }
                div.scroll tabindex="0" role="region" aria-labelledby="live-title" {
                    table.live {
                        thead { tr { @for column in columns { th.text[is_text(column)] scope="col" { (column) } } } }
                        tbody id="ranks" {}
                    }
                }
                p.note id="note" {
                    "Times are of ranks in the process of rank 0, counted at the end of each step. Those of other processes come with \
                     the report at the end."
                }
            }
            section aria-labelledby="log-title" {
                h2 id="log-title" { "What happened" }
                ol.log id="log" role="log" aria-labelledby="log-title" {}
            }
            div id="report" {}
        }
        footer { p { "Served by rank 0, kyklos " (env!("CARGO_PKG_VERSION")) ". The page ends with the call; it stays readable here." } }
    };
    shell("Live", head, body).into()
}

fn is_text(column: &str) -> bool {
    matches!(column, "device" | "health" | "progress" | "doing")
}

pub(super) const SCRIPT: &str = include_str!("live.mjs");
const STYLE: &str = include_str!("live.css");
