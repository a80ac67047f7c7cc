//! The table as text and as JSON.

use std::collections::BTreeMap;

use kyklos::plan::table;

use super::cell::{CellState, Report, Target};
use crate::failure::{Failure, Result};

/// All selected cells.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) reports: Vec<Report>,
    /// Names of the devices in the run.
    pub(crate) devices: Vec<String>,
    /// Kinds of devices that this machine does not have.
    pub(crate) not_run: Vec<String>,
}

impl Table {
    /// One line for each strategy and row, one column for each device and transport.
    pub(crate) fn text(&self) -> String {
        let targets = self.targets();
        let mut refusals: Vec<&str> = Vec::new();
        // Lines in the order of strategies, and of rows in each; cells run row by row.
        let mut lines: BTreeMap<_, Vec<&Report>> = BTreeMap::new();
        let mut strategies = Vec::new();
        let mut rows = Vec::new();
        for report in &self.reports {
            let strategy = place_in(&mut strategies, report.cell.strategy);
            let row = place_in(&mut rows, report.cell.row.name);
            lines.entry((report.cell.pass, strategy, row)).or_default().push(report);
        }
        let columns = targets.iter().map(|target| format!("{} {}", target.device, target.transport.name()));
        let header: Vec<String> =
            ["strategy", "mesh", "pass", "row"].into_iter().map(str::to_owned).chain(columns).collect();
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        let body = lines.values().map(|reports| {
            let cell = &reports[0].cell;
            let (pass, row) = (cell.pass.name().to_owned(), cell.row.name.to_owned());
            let names = [cell.strategy.to_string(), cell.mesh.to_string(), pass, row];
            let states = targets.iter().map(|target| {
                let here = reports.iter().filter(|report| report.cell.target == *target);
                summary(&here.map(|report| &report.state).collect::<Vec<_>>(), &mut refusals)
            });
            names.into_iter().chain(states.collect::<Vec<_>>()).collect()
        });
        let body = body.collect();
        let mut out = format!("{}\n", self.devices.join("\n"));
        for absent in &self.not_run {
            out.push_str(&format!("not run: {absent}\n"));
        }
        out.push_str("\nEach cell counts combinations of dtype and placement; the validator refuses before anything runs.\n\n");
        out.push_str(&table(&header, body));
        for (index, refusal) in refusals.iter().enumerate() {
            out.push_str(&format!("{}[{}] {refusal}\n", if index == 0 { "\n" } else { "" }, index + 1));
        }
        out.push_str(&format!("\n{}\n", self.count()));
        for report in self.reports.iter().filter(|report| report.state.is_bad()) {
            let (CellState::Wrong { why, .. } | CellState::Failed(why)) = &report.state else { continue };
            out.push_str(&format!("\n{}\n  {why}\n", report.command));
        }
        out
    }

    /// All cells.
    pub(crate) fn json(&self) -> Result<String> {
        let Self { reports, devices, not_run } = self;
        serde_json::to_string_pretty(
            &serde_json::json!({ "devices": devices, "not_run": not_run, "cells": reports }),
        )
        .map(|json| json + "\n")
        .map_err(|error| Failure::run(format!("cannot print the table: {error}")))
    }

    fn count(&self) -> String {
        let count =
            |is: fn(&CellState) -> bool| self.reports.iter().filter(|report| is(&report.state)).count();
        format!(
            "{} cells: {} correct, {} refused, {} wrong, {} failed",
            self.reports.len(),
            count(|state| matches!(state, CellState::Correct { .. })),
            count(|state| matches!(state, CellState::Refused(_))),
            count(|state| matches!(state, CellState::Wrong { .. })),
            count(|state| matches!(state, CellState::Failed(_))),
        )
    }

    fn targets(&self) -> Vec<Target> {
        let mut targets = Vec::new();
        for report in &self.reports {
            place_in(&mut targets, report.cell.target);
        }
        targets
    }
}

/// Counts of the results in one line and column.
fn summary<'a>(states: &[&'a CellState], refusals: &mut Vec<&'a str>) -> String {
    let (mut correct, mut refused, mut wrong, mut failed) = (0, 0, 0, 0);
    let mut notes = Vec::new();
    for state in states {
        match state {
            CellState::Correct { .. } => correct += 1,
            CellState::Wrong { .. } => wrong += 1,
            CellState::Failed(_) => failed += 1,
            CellState::Refused(text) => {
                refused += 1;
                place_in(&mut notes, place_in(refusals, text.as_str()) + 1);
            }
        }
    }
    let notes: String = notes.iter().map(|note| format!("[{note}]")).collect();
    let parts = [
        (correct, "correct".to_owned()),
        (refused, format!("refused {notes}")),
        (wrong, "WRONG".to_owned()),
        (failed, "FAILED".to_owned()),
    ];
    let said: Vec<String> = parts
        .into_iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    said.join(", ")
}

/// The index of `item` in `list`; adds it if it is missing.
pub(super) fn place_in<T: PartialEq>(list: &mut Vec<T>, item: T) -> usize {
    list.iter().position(|other| *other == item).unwrap_or_else(|| {
        list.push(item);
        list.len() - 1
    })
}
