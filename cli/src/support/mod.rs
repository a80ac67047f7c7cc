//! The table of supported combinations: small problems with every strategy, mask, option, dtype and
//! placement, in both passes, on devices and transports. Each is correct or refused, and
//! `docs/support.md` is what the validator says of them.
//!
//! `cargo test --release -p kyklos-cli --lib support` runs a sample on the CPU. With
//! `KYKLOS_TESTS=all` it runs everything, on wgpu too.

#[path = "../../../tests/amount.rs"]
mod amount;
mod cell;
mod controls;
mod holds;
mod page;
mod rows;
mod run;

use std::path::Path;

use kyklos::backend::Backend;
use kyklos::{Dtype, PlacementKind, Strategy};

use crate::devices::{self, BackendKind, DeviceId, DeviceRequest};
use crate::failure::Result;
use crate::options::TransportName;
use amount::amount;
use cell::{Cell, CellState, Target};
use rows::{Pass, ROWS, Row};
use run::{Reference, Runner};

/// The values to combine, with both passes.
struct Part {
    rows: Vec<Row>,
    strategies: Vec<Strategy>,
    dtypes: Vec<Dtype>,
    placements: Vec<PlacementKind>,
    targets: Vec<Target>,
}

#[test]
fn every_strategy_and_row_is_correct_or_refused() {
    let part = Part {
        rows: ROWS.to_vec(),
        strategies: Strategy::ALL.to_vec(),
        dtypes: vec![Dtype::F32],
        placements: vec![PlacementKind::Zigzag],
        targets: vec![Target::HERE],
    };
    let cells = part.hold();
    assert_eq!(cells.len(), 2 * ROWS.len() * Strategy::ALL.len());
    let mut refused = 0;
    let mut right = 0;
    for (cell, state) in &cells {
        match state {
            CellState::Correct { error, tolerance } => {
                let most = if cell.row.name == "wire int8" { 0.1 } else { 0.01 };
                let most = if cell.pass == Pass::Backward { 0.1 } else { most };
                right += u32::from(cell.pass == Pass::Backward);
                assert!(error <= tolerance && *tolerance < most, "{cell:?}: {error} {tolerance}")
            }
            CellState::Refused(text)
                if cell.pass == Pass::Backward && text.starts_with("a backward pass ") => {}
            CellState::Refused(text) => {
                refused += u32::from(cell.pass == Pass::Forward);
                let expected = match cell.row.name {
                    "wire f16" => "f16 on the wire",
                    "wire int8" => "int8 on the wire",
                    "fixed order" => "a fixed order ",
                    _ => panic!("{cell:?}: {text}"),
                };
                assert!(text.starts_with(expected), "{cell:?}: {text}");
            }
            fault => panic!("{cell:?}: {fault:?}"),
        }
    }
    // Refused: other wire formats where a strategy sends no keys or values between shards; a fixed
    // order where zigzag shards are not whole tiles, that is with more than one shard.
    assert_eq!(refused as usize, 2 * 4 + (Strategy::ALL.len() - 2));
    // All rows but those of replicated keys, int8 and a fixed order, and f16 on the wire of four
    // strategies.
    assert!(right as usize >= (ROWS.len() - 5) * Strategy::ALL.len() - 4, "{right}");
}

#[test]
fn every_combination_is_correct_or_refused() {
    let part: fn() -> Part = amount(Part::sample, Part::all);
    let (sample, mut correct) = (Part::sample(), 0);
    for (cell, state) in part().hold() {
        correct += u32::from(matches!(state, CellState::Correct { .. }));
        // Strategies of the sample send no keys or values between shards.
        if cell.row.name == "wire f16"
            && cell.dtype == Dtype::F32
            && sample.strategies.contains(&cell.strategy)
        {
            assert!(matches!(state, CellState::Refused(_)), "{cell:?}: {state:?}");
        }
    }
    assert!(correct >= 24, "{correct}");
}

#[test]
fn the_page_is_what_the_validator_says() {
    holds::holds("docs/support.md", &page::document());
}

/// The CPU, and a wgpu device where this machine has one. `KYKLOS_REQUIRE_GPU=1` says that it has.
fn devices() -> Vec<DeviceId> {
    let mut devices = vec![DeviceId::CPU];
    match devices::choose(&[DeviceRequest::Of(BackendKind::Wgpu, None)], 0) {
        Ok(device) => devices.push(device),
        Err(failure) => {
            assert_ne!(std::env::var("KYKLOS_REQUIRE_GPU").as_deref(), Ok("1"), "{}", failure.text);
            eprintln!("not run: {}", failure.text);
        }
    }
    devices
}

/// These devices with every transport.
fn targets(devices: &[DeviceId]) -> Vec<Target> {
    let transports = [TransportName::InProcess, TransportName::Quic];
    let on = |&device: &DeviceId| transports.map(|transport| Target { device, transport });
    devices.iter().flat_map(on).collect()
}

impl Part {
    fn sample() -> Self {
        Self {
            rows: ["causal", "bias for each head", "wire f16"].map(Row::named).to_vec(),
            strategies: vec![Strategy::Dense, Strategy::Ulysses, Strategy::PassQ],
            dtypes: vec![Dtype::F32],
            placements: vec![PlacementKind::Striped],
            targets: targets(&[DeviceId::CPU]),
        }
    }

    fn all() -> Self {
        Self {
            rows: ROWS.to_vec(),
            strategies: Strategy::ALL.to_vec(),
            dtypes: Dtype::ALL.to_vec(),
            placements: PlacementKind::ALL.to_vec(),
            targets: targets(&devices()),
        }
    }

    /// All cells with their results. Fails if one is neither correct nor refused, and then keeps
    /// the input files.
    fn hold(&self) -> Vec<(Cell, CellState)> {
        let folder = tempfile::tempdir().unwrap();
        let cells = self.run(folder.path());
        let faults = faults(&cells, folder.path());
        if !faults.is_empty() {
            let _ = folder.keep();
            let (bad, all) = (faults.len(), cells.len());
            panic!("{bad} of {all} cells are neither correct nor refused\n\n{}", faults.join("\n\n"));
        }
        cells
    }

    fn run(&self, folder: &Path) -> Vec<(Cell, CellState)> {
        let mut runner = Runner::default();
        let mut cells = Vec::new();
        for (row, pass) in
            Pass::ALL.into_iter().flat_map(|pass| self.rows.iter().map(move |row| (*row, pass)))
        {
            for &dtype in &self.dtypes {
                row.write((dtype, pass), folder);
                // Of all cells of a row and dtype.
                let mut reference = None;
                for &strategy in &self.strategies {
                    let mesh = strategy.example_mesh();
                    for &placement in &self.placements {
                        for &target in &self.targets {
                            let cell = Cell { row, pass, strategy, mesh, dtype, placement, target };
                            let state = run_cell(&cell, folder, &mut runner, &mut reference);
                            let state = state.unwrap_or_else(|failure| CellState::Failed(failure.text));
                            cells.push((cell, state));
                        }
                    }
                }
            }
        }
        cells
    }
}

/// Of each cell that is neither correct nor refused: the command line that repeats it, and what is
/// wrong.
fn faults(cells: &[(Cell, CellState)], folder: &Path) -> Vec<String> {
    let fault = |(cell, state): &(Cell, CellState)| match state {
        CellState::Correct { .. } | CellState::Refused(_) => None,
        CellState::Wrong { why, .. } | CellState::Failed(why) => {
            Some(format!("{}\n  {why}", cell.command().replace("DIR", &folder.to_string_lossy())))
        }
    };
    cells.iter().filter_map(fault).collect()
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
    // The owner of keys decides which keys share a scale on the wire: a new reference for each plan
    // set.
    if accepted.request.problem.wire.rounds() {
        *reference = None;
    }
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
