//! What was predicted, beside what was measured.

use maud::{Markup, html};

use super::frame::{Section, bar, numbers, scrolled, seconds};
use crate::observe::page::model::{Origin, Page, Times};
use crate::observe::page::units::duration;

pub(super) fn section(page: &Page) -> Option<Section> {
    let (Origin::Measured, Some(measured_s), Some(predicted_s)) =
        (page.origin, page.wall_s, page.predicted_s)
    else {
        return None;
    };
    let most_s = measured_s.max(predicted_s);
    let per_rank = page.ranks.iter().any(|rank| rank.predicted.is_some());
    let body = html! {
        p { (verdict(measured_s, predicted_s)) }
        (scrolled("Wall time", html! {
            table { tbody {
                (line("predicted", predicted_s, most_s, "predicted"))
                (line("measured", measured_s, most_s, "compute"))
            } }
        }))
        @if per_rank { (numbers("Predicted and measured times of each rank", ranks(page))) }
    };
    Some(Section::new("prediction", "Predicted and measured", body))
}

fn verdict(measured_s: f64, predicted_s: f64) -> String {
    let (measured, predicted) = (duration(measured_s), duration(predicted_s));
    if measured_s <= 0.0 {
        return format!("Predicted {predicted}, measured {measured}.");
    }
    let ratio = predicted_s / measured_s;
    format!(
        "Predicted {predicted}, measured {measured}: the prediction is {ratio:.2} times the measured time."
    )
}

fn line(name: &str, time_s: f64, most_s: f64, class: &str) -> Markup {
    html! {
        tr {
            th scope="row" { (name) } td.tight { (seconds(time_s)) }
            td.barred { (bar(if most_s > 0.0 { time_s / most_s } else { 0.0 }, class)) }
        }
    }
}

fn ranks(page: &Page) -> Markup {
    let pair =
        |predicted: f64, measured: f64| html! { td { (seconds(predicted)) } td { (seconds(measured)) } };
    html! {
        table {
            thead {
                tr { th rowspan="2" scope="col" { "rank" }
                    th colspan="2" scope="colgroup" { "compute" } th colspan="2" scope="colgroup" { "wait" }
                    th colspan="2" scope="colgroup" { "copy" } th colspan="2" scope="colgroup" { "wall" } }
                tr { @for _ in 0..4 { th scope="col" { "predicted" } th scope="col" { "measured" } } }
            }
            tbody { @for rank in &page.ranks {
                @if let (Some(predicted), Some(measured)) = (rank.predicted, rank.times) {
                    tr {
                        th scope="row" { (rank.rank) }
                        @for of in [
                            |times: Times| times.compute_s, |times: Times| times.wait_s, |times: Times| times.copy_s,
                            |times: Times| times.wall_s,
                        ] { (pair(of(predicted), of(measured))) }
                    }
                }
            } }
        }
    }
}
