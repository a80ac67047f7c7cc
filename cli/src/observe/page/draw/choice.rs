//! The plans that could run, with what each is predicted to take.

use maud::{Markup, html};

use super::frame::{Section, bar, bytes, scrolled, seconds, share};
use crate::observe::page::model::{Choice, Page, PossiblePlan, Price};

pub(super) fn section(page: &Page) -> Option<Section> {
    let choice = page.choice.as_ref()?;
    let body = html! {
        @for reason in &choice.reasons { p { (reason) } }
        (scrolled("Plans that could run", table(choice)))
        @if choice.plans.len() > MOST_PLANS { p.note { (choice.plans.len() - MOST_PLANS) " more plans are not shown." } }
        p.note { "Bytes and memory are of the rank with the most. The other pictures are of the first plan." }
    };
    Some(Section::new("choice", "Plans that could run", body))
}

fn table(choice: &Choice) -> Markup {
    let plans = &choice.plans[..choice.plans.len().min(MOST_PLANS)];
    let is_measured = plans.iter().any(|plan| plan.measured_s.is_some());
    let has_passes =
        plans.iter().any(|plan| plan.priced.as_ref().is_ok_and(|price| price.passes_s.is_some()));
    let columns = 5 + if is_measured { 2 } else { 0 } + if has_passes { 2 } else { 0 };
    let slowest_s = plans.iter().filter_map(|plan| Some(plan.priced.as_ref().ok()?.predicted_s));
    let slowest_s = slowest_s.fold(f64::MIN_POSITIVE, f64::max);
    html! {
        table {
            thead { tr {
                th scope="col" { "plan" } th.barred colspan="2" scope="colgroup" { "predicted" }
                @if has_passes { th scope="col" { "forward" } th scope="col" { "backward" } }
                @if is_measured { th scope="col" { "measured" } th scope="col" { "predicted / measured" } }
                th scope="col" { "idle" } th scope="col" { "sent" } th scope="col" { "peak memory" }
            } }
            tbody { @for plan in plans { tr {
                th scope="row" { (plan.name) }
                @match &plan.priced {
                    Ok(price) => (line(price, plan, is_measured, slowest_s)),
                    Err(reason) => { td.wide.text colspan=(columns) { "refused: " (reason) } }
                }
            } } }
        }
    }
}

fn line(price: &Price, plan: &PossiblePlan, is_measured: bool, slowest_s: f64) -> Markup {
    let Price { predicted_s, passes_s, idle, bytes_sent, peak_bytes } = *price;
    html! {
        td.tight { (seconds(predicted_s)) } td.barred { (bar(predicted_s / slowest_s, "predicted")) }
        @for pass_s in passes_s.into_iter().flatten() { td { (seconds(pass_s)) } }
        @if is_measured {
            td { @if let Some(measured_s) = plan.measured_s { (seconds(measured_s)) } }
            td { @if let Some(measured_s) = plan.measured_s { (format!("{:.2}", predicted_s / measured_s)) } }
        }
        td { (share(idle)) } td { (bytes(bytes_sent)) } td { (bytes(peak_bytes)) }
    }
}

const MOST_PLANS: usize = 100;
