//! The files of the results, and the table on standard output.

use std::io::Write;
use std::path::Path;

use kyklos::plan::{bytes, table};

use super::leader::Leader;
use super::page;
use super::record::{Measured, RankMeasured, Record, State, by_case, median_s, refusals};
use crate::failure::{Failure, Result, print};
use crate::new_file::NewFile;

/// Writes the files of all cells that have ended. None if the folder was never open.
pub(super) fn write(leader: &Leader<'_>) -> Result<()> {
    let Some(header) = leader.header() else { return Ok(()) };
    let records = leader.records();
    let folder = leader.folder();
    let json = serde_json::to_string_pretty(&records)
        .map_err(|error| Failure::run(format!("the cells cannot be written as JSON: {error}")))?;
    file(&folder.join("strategies.json"), &(json + "\n"))?;
    file(&folder.join("strategies.csv"), &csv(&records))?;
    file(&folder.join("strategies.html"), &page::html(header, &records))
}

/// Prints the table of all cells that have ended.
///
/// # Errors
/// If cells have failed.
pub(super) fn tell(leader: &Leader<'_>) -> Result<()> {
    let records = leader.records();
    print(&text(&records))?;
    match records.iter().filter(|record| record.state == State::Failed).count() {
        0 => Ok(()),
        failed => Err(Failure::run(format!("{failed} of {} cells have failed", records.len()))),
    }
}

fn file(path: &Path, text: &str) -> Result<()> {
    let file = NewFile::create(path)?;
    let written = file.as_file().write_all(text.as_bytes());
    written.map_err(|error| file.cannot_write(&error))?;
    file.commit()
}

/// One line for each rank of a cell with times, and one for each other cell.
fn csv(records: &[Record]) -> String {
    let mut out = COLUMNS.join(",") + "\n";
    for record in records {
        let name = &record.name;
        let shape = name.shape.map(|extent| extent.to_string());
        let way = [&name.mask, &name.dtype, &name.strategy, &name.mesh].map(Clone::clone);
        let placement = name.placement.clone().unwrap_or_default();
        let state = [placement, record.state.name().to_owned(), record.why.clone().unwrap_or_default()];
        let of_cell: Vec<String> = shape.into_iter().chain(way).chain(state).collect();
        let predicted = record.predicted.as_ref();
        let predicted_s = predicted.map_or_else(String::new, |predicted| predicted.wall_s.to_string());
        let Some(measured) = &record.measured else {
            let empty = vec![String::new(); COLUMNS.len() - of_cell.len() - 1];
            push(&mut out, of_cell.into_iter().chain([predicted_s]).chain(empty));
            continue;
        };
        let Measured { median_s, min_s, max_s, runs, max_abs_error, tolerance, .. } = measured;
        for (place, rank) in measured.per_rank.iter().enumerate() {
            let of_rank = predicted.and_then(|predicted| predicted.per_rank.get(place));
            let predicted_rank = of_rank
                .map_or([None; 3], |rank| [Some(rank.compute_s), Some(rank.wait_s), Some(rank.copy_s)]);
            let cells = of_cell.iter().cloned().chain([predicted_s.clone()]);
            let of_runs = [*median_s, *min_s, *max_s].map(|seconds| seconds.to_string());
            let held = [runs.to_string(), max_abs_error.to_string(), tolerance.to_string()];
            let optional = |number: Option<f64>| number.map_or_else(String::new, |number| number.to_string());
            push(
                &mut out,
                cells
                    .chain(of_runs)
                    .chain(held)
                    .chain(rank_columns(rank))
                    .chain(predicted_rank.map(optional)),
            );
        }
    }
    out
}

fn rank_columns(rank: &RankMeasured) -> [String; 16] {
    let optional = |number: Option<u64>| number.map_or_else(String::new, |number| number.to_string());
    let RankMeasured { plan_s, load_s, compile_s, wall_s, compute_s, wait_s, copy_s, collect_s, .. } = rank;
    let [plan_s, load_s, compile_s, wall_s, compute_s, wait_s, copy_s, collect_s] =
        [plan_s, load_s, compile_s, wall_s, compute_s, wait_s, copy_s, collect_s].map(f64::to_string);
    [
        rank.rank.to_string(),
        rank.device.clone(),
        rank.tokens.to_string(),
        plan_s,
        load_s,
        compile_s,
        wall_s,
        compute_s,
        wait_s,
        copy_s,
        collect_s,
        rank.bytes_sent.to_string(),
        rank.messages_sent.to_string(),
        optional(rank.wire_bytes),
        rank.peak_bytes.to_string(),
        optional(rank.process_peak_bytes),
    ]
}

/// A line; fields with commas, quotes or line ends are in quotes.
fn push(out: &mut String, fields: impl Iterator<Item = String>) {
    let quoted = fields.map(|field| match field.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field,
    });
    out.push_str(&quoted.collect::<Vec<_>>().join(","));
    out.push('\n');
}

/// Of each case the cells with times, the fastest first; then why the others have none.
fn text(records: &[Record]) -> String {
    let mut out = String::new();
    for (case, mut cells) in by_case(records) {
        cells.sort_by(|a, b| median_s(a).total_cmp(&median_s(b)));
        let rows = cells.iter().filter_map(|record| {
            let measured = record.measured.as_ref()?;
            let ms = |seconds: f64| format!("{:.2}", seconds * 1e3);
            let predicted_s = record.predicted.as_ref().map(|predicted| predicted.wall_s);
            let links = measured.links();
            let wire = measured.per_rank.iter().filter_map(|rank| rank.wire_bytes).max();
            Some(vec![
                record.name.way(),
                ms(measured.median_s),
                format!("{} - {}", ms(measured.min_s), ms(measured.max_s)),
                ms(measured.compute_s()),
                predicted_s.map_or_else(String::new, ms),
                predicted_s.map_or_else(String::new, |s| format!("{:.2}", s / measured.median_s)),
                bytes(record.most_sent()),
                wire.map_or_else(String::new, bytes),
                links.map_or_else(String::new, |(most, _)| bytes(most)),
                links.map_or_else(String::new, |(_, [least, most])| match least == most {
                    true => format!("{least:.2}"),
                    false => format!("{least:.2} - {most:.2}"),
                }),
                bytes(record.most_memory()),
            ])
        });
        let rows: Vec<_> = rows.collect();
        if !rows.is_empty() {
            out.push_str(&format!("{case}\n{}\n", table(&HEADER, rows)));
        }
    }
    for record in records.iter().filter(|record| record.state == State::Failed) {
        out.push_str(&format!("failed: {}: {}\n", record.name, record.why.as_deref().unwrap_or_default()));
    }
    for (why, count) in refusals(records) {
        let cells = if count == 1 { "1 cell".to_owned() } else { format!("{count} cells") };
        out.push_str(&format!("refused: {cells}: {why}\n"));
    }
    out
}

const HEADER: [&str; 11] = [
    "strategy, mesh, placement",
    "median ms",
    "of runs",
    "compute ms",
    "predicted ms",
    "predicted / measured",
    "sent",
    "packets",
    "busiest link",
    "links / plan",
    "peak",
];

/// The columns of the CSV file. Times are in seconds.
const COLUMNS: [&str; 38] = [
    "batch",
    "tokens",
    "query_heads",
    "kv_heads",
    "head_dim",
    "mask",
    "dtype",
    "strategy",
    "mesh",
    "placement",
    "state",
    "why",
    "predicted_s",
    "median_s",
    "min_s",
    "max_s",
    "runs",
    "max_abs_error",
    "tolerance",
    "rank",
    "device",
    "rank_tokens",
    "plan_s",
    "load_s",
    "compile_s",
    "wall_s",
    "compute_s",
    "wait_s",
    "copy_s",
    "collect_s",
    "bytes_sent",
    "messages_sent",
    "wire_bytes",
    "peak_bytes",
    "process_peak_bytes",
    "predicted_compute_s",
    "predicted_wait_s",
    "predicted_copy_s",
];
