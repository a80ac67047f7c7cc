//! HTML and SVG of a page. Sizes are percentages or CSS pixels, so that pictures fit every width
//! and text is never scaled.

mod choice;
mod figures;
mod frame;
mod mask;
mod memory;
mod prediction;
mod timeline;
mod traffic;

use self::frame::document;
use super::model::{Origin, Page};
use super::words::summary_of_passes;

/// For pages of other commands.
pub(crate) mod parts {
    pub(crate) use super::frame::{
        Head, Section, bar, bytes, counted, document, exact, numbers, scrolled, seconds, shares, shell,
        swatch,
    };
    pub(crate) use super::traffic::section as traffic_section;
}

/// The page as one file.
pub(crate) fn html(page: &Page) -> String {
    let badge = match page.origin {
        Origin::Measured => "measured",
        Origin::Predicted => "predicted: nothing was run",
    };
    let mut sections: Vec<_> = choice::section(page).into_iter().chain([mask::section(page)]).collect();
    match &page.backward {
        None => sections.extend(of_pass(page)),
        Some(backward) => {
            sections.extend(of_pass(page).map(|section| section.of_pass(("", "forward"))));
            sections.extend(of_pass(backward).map(|section| section.of_pass(("backward-", "backward"))));
        }
    }
    sections.extend(frame::raw(&page.json));
    let head = frame::Head {
        title: &page.title,
        badge,
        summary: &summary_of_passes(page),
        alerts: &page.alerts,
        facts: &page.facts,
    };
    document(&head, sections)
}

/// What a page shows of each pass.
fn of_pass(page: &Page) -> impl Iterator<Item = frame::Section> {
    let sections = [
        Some(timeline::section(page)),
        Some(figures::section(page)),
        Some(traffic::section(page)),
        Some(memory::section(page)),
        prediction::section(page),
    ];
    sections.into_iter().flatten()
}
