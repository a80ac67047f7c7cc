//! `kyklos support`: runs every strategy, mask, option, dtype and placement on every device and transport of this machine.

mod cell;
mod matrix;
mod pass;
mod rows;
mod run;
mod table;
#[cfg(test)]
mod tests;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use kyklos::backend::Backend;
use kyklos::{Dtype, PlacementKind, Strategy};

use crate::devices::{self, BackendKind, DeviceId, DeviceRequest};
use crate::failure::{Failure, Result, note, print};
use crate::options::{StrategyName, TransportName};
use cell::{Cell, CellState, Report, Target};
use pass::Pass;
use rows::{ROWS, Row};
use run::{Reference, Runner};
use table::Table;

/// The part of the table to run. Without options: all of it.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SupportArgs {
    /// Only these strategies
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    strategy: Vec<StrategyName>,
    /// Only rows whose name starts with this; repeatable
    #[arg(long, value_name = "NAME")]
    row: Vec<String>,
    /// Only these passes; backward is attention and then the gradients
    #[arg(long, value_enum, value_delimiter = ',')]
    pass: Vec<Pass>,
    /// Only these dtypes
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    dtype: Vec<Dtype>,
    /// Only these placements
    #[arg(long, value_name = "KIND,…", value_delimiter = ',')]
    placement: Vec<PlacementKind>,
    #[arg(
        long,
        value_name = "D,D,…",
        value_delimiter = ',',
        help = format!("Only these devices; a missing one is then an error: {}", devices::names())
    )]
    device: Vec<DeviceRequest>,
    /// Only these transports
    #[arg(long, value_enum, value_delimiter = ',')]
    transport: Vec<TransportName>,
    /// Keep the input files in this folder, so that the printed command lines can repeat a cell
    #[arg(long, value_name = "DIR")]
    inputs: Option<PathBuf>,
    /// Print docs/support.md instead: what the validator accepts. Runs nothing and needs no device
    #[arg(long, conflicts_with_all = ["strategy", "row", "pass", "dtype", "placement", "device", "transport", "inputs", "json"])]
    matrix: bool,
    /// Print one JSON object with every cell
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn support(args: &SupportArgs) -> Result<()> {
    if args.matrix {
        return print(&matrix::document()?);
    }
    let table = fill(args)?;
    print(&if args.json { table.json()? } else { table.text() })?;
    let bad = table.reports.iter().filter(|report| report.state.is_bad()).count();
    match bad {
        0 => Ok(()),
        _ => Err(Failure::run(format!(
            "{bad} of {} cells are neither correct nor refused",
            table.reports.len()
        ))),
    }
}

/// Runs the selected part of the table.
fn fill(args: &SupportArgs) -> Result<Table> {
    let (devices, not_run) = devices(&args.device)?;
    let mut axes = Axes::new(args)?;
    axes.targets = devices
        .iter()
        .flat_map(|device| {
            axes.transports.iter().map(|transport| Target { device: *device, transport: *transport })
        })
        .collect();
    let (_doomed, folder) = match &args.inputs {
        Some(folder) => {
            std::fs::create_dir_all(folder).map_err(|error| Failure::file("make", folder, &error))?;
            (None, folder.clone())
        }
        None => {
            let made = tempfile::tempdir()
                .map_err(|error| Failure::run(format!("no folder for inputs: {error}")))?;
            let path = made.path().to_owned();
            (Some(made), path)
        }
    };
    let mut runner = Runner::default();
    let mut names = Vec::new();
    for device in devices {
        let backend = runner.backend(device)?;
        names.push(format!("{device}: {}", backend.info().name));
    }
    let bar = progress(axes.cells());
    let mut reports = Vec::with_capacity(axes.cells());
    let passes = || axes.passes.iter().flat_map(|pass| axes.rows.iter().map(move |row| (*row, *pass)));
    for (row, pass) in passes() {
        for dtype in &axes.dtypes {
            row.write((*dtype, pass), &folder)?;
            axes.cells_of((row, pass), *dtype, &folder, &mut runner, |report| {
                if let Some(bar) = &bar {
                    bar.set_message(format!("{} {}, {dtype}", pass.name(), row.name));
                    bar.inc(1);
                }
                reports.push(report);
            })?;
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok(Table { reports, devices: names, not_run })
}

/// The values to combine.
struct Axes {
    rows: Vec<Row>,
    passes: Vec<Pass>,
    strategies: Vec<Strategy>,
    dtypes: Vec<Dtype>,
    placements: Vec<PlacementKind>,
    transports: Vec<TransportName>,
    targets: Vec<Target>,
}

impl Axes {
    fn new(args: &SupportArgs) -> Result<Self> {
        let named = |row: &&Row| {
            args.row.is_empty() || args.row.iter().any(|name| row.name.starts_with(name.as_str()))
        };
        let rows: Vec<Row> = ROWS.iter().filter(named).copied().collect();
        if rows.is_empty() {
            let names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
            return Err(Failure::request(
                format!("no row is called {}", args.row.join(" or ")),
                format!("name the beginning of one of: {}", names.join("; ")),
            ));
        }
        let strategies: Vec<Strategy> = args.strategy.iter().map(|name| name.0).collect();
        Ok(Self {
            rows,
            passes: or_all(&args.pass, &Pass::ALL),
            strategies: or_all(&strategies, &Strategy::ALL),
            dtypes: or_all(&args.dtype, &Dtype::ALL),
            placements: or_all(&args.placement, &PlacementKind::ALL),
            transports: or_all(&args.transport, &[TransportName::InProcess, TransportName::Quic]),
            targets: Vec::new(),
        })
    }

    fn cells(&self) -> usize {
        self.rows.len()
            * self.passes.len()
            * self.strategies.len()
            * self.dtypes.len()
            * self.placements.len()
            * self.targets.len()
    }

    /// Runs all cells of a row and dtype, which share the result of the oracle.
    fn cells_of(
        &self,
        row: (Row, Pass),
        dtype: Dtype,
        folder: &Path,
        runner: &mut Runner,
        mut each: impl FnMut(Report),
    ) -> Result<()> {
        let mut reference = None;
        for strategy in &self.strategies {
            for placement in &self.placements {
                for target in &self.targets {
                    let cell = Cell::new(row, *strategy, dtype, *placement, *target);
                    let state = run_cell(&cell, folder, runner, &mut reference)
                        .unwrap_or_else(|failure| CellState::Failed(failure.text));
                    each(cell.report(state, folder));
                }
            }
        }
        Ok(())
    }
}

/// Runs a cell. An error is a cell that failed.
fn run_cell(
    cell: &Cell,
    folder: &Path,
    runner: &mut Runner,
    reference: &mut Option<Reference>,
) -> Result<CellState> {
    let accepted = match cell.validate(folder)? {
        Ok(accepted) => accepted,
        Err(refusal) => return Ok(CellState::Refused(refusal)),
    };
    let reference = match reference {
        Some(reference) => reference,
        None => reference.insert(Reference::new(&accepted)?),
    };
    let backend = runner.backend(cell.target.device)?;
    if accepted.backward.is_some() {
        let problem = &accepted.request.problem;
        if let Err(refusal) = backend.supports_backward(problem.dtype, problem.head_dim as usize) {
            return Ok(CellState::Refused(refusal.to_string()));
        }
        let gradients = runner.gradients(&accepted, cell.target)?;
        return reference.judge_gradients(&gradients, &accepted);
    }
    let rows = runner.run(&accepted, cell.target, &reference.sample)?;
    reference.judge(rows, &accepted, cell.target.device, &backend)
}

/// The selected devices, else one of every kind that this machine has; and the kinds that are missing.
fn devices(requests: &[DeviceRequest]) -> Result<(Vec<DeviceId>, Vec<String>)> {
    let kinds: Vec<DeviceRequest> = BackendKind::ALL
        .iter()
        .filter(|kind| kind.is_in_support_table())
        .map(|kind| DeviceRequest::Of(*kind, None))
        .collect();
    let mut devices = Vec::new();
    let mut not_run = Vec::new();
    for request in or_all(requests, &kinds) {
        match devices::choose(&[request], 0) {
            Ok(device) if devices.contains(&device) => {}
            Ok(device) => devices.push(device),
            Err(failure) if requests.is_empty() => not_run.push(failure.text),
            Err(failure) => return Err(failure),
        }
    }
    for absent in &not_run {
        note(&format!("note: not run: {absent}"));
    }
    Ok((devices, not_run))
}

fn or_all<T: Copy>(chosen: &[T], all: &[T]) -> Vec<T> {
    if chosen.is_empty() { all.to_vec() } else { chosen.to_vec() }
}

fn progress(cells: usize) -> Option<ProgressBar> {
    std::io::stderr().is_terminal().then(|| {
        let bar = ProgressBar::new(cells as u64);
        if let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} cells, {elapsed}  {wide_msg}") {
            bar.set_style(style);
        }
        bar
    })
}
