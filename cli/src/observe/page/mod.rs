//! The page of `--report`: one HTML file without scripts and without other files, about one call.
//!
//! `model` has what a page shows. `plans` fills in what plans tell, `spans` the timelines of ranks,
//! and the commands the rest. `draw` turns a page into HTML and SVG; every text is escaped there by
//! its templates.

mod draw;
mod mask;
pub(crate) mod model;
mod plans;
pub(crate) mod spans;
pub(crate) mod target;
pub(crate) mod units;
mod words;

#[cfg(test)]
mod tests;

pub(crate) use self::draw::{html, parts};
pub(crate) use self::plans::{number, page_of_plans, sent};
