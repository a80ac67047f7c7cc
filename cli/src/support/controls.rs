//! Wrong results that the table must detect.

use clap::Parser;

use super::*;
use crate::commands::{Cli, Command};
use crate::tensors::results::HostGradients;

fn cell(row: Row, strategy: Strategy) -> Cell {
    let (dtype, placement, mesh) = (Dtype::F32, PlacementKind::Zigzag, strategy.example_mesh());
    Cell { row, pass: Pass::Forward, strategy, mesh, dtype, placement, target: Target::HERE }
}

#[test]
fn spoiled_gradients_of_any_head_and_token_are_reported_as_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let mut runner = Runner::default();
    let cell = Cell { pass: Pass::Backward, ..cell(Row::named("sinks"), Strategy::Unified) };
    let accepted = cell.validate(folder.path()).unwrap().unwrap();
    let mut reference = Reference::new(&accepted).unwrap();
    let gradients = runner.gradients(&accepted, Target::HERE).unwrap();
    let mut judged = |gradients: &HostGradients| reference.judge_gradients(gradients, &accepted).unwrap();
    assert!(matches!(judged(&gradients), CellState::Correct { .. }));
    let changed = |tensor: &bytes::Bytes, element: usize| -> bytes::Bytes {
        let mut numbers: Vec<f32> = bytemuck::pod_collect_to_vec(tensor);
        numbers[element] += 1e-3;
        bytemuck::cast_slice(&numbers).to_vec().into()
    };
    // Of the first token and head, and of the last.
    for last in [false, true] {
        for tensor in 0..4 {
            let mut spoiled = gradients.clone();
            let at = |tensor: &bytes::Bytes| if last { tensor.len() / 4 - 1 } else { 0 };
            match tensor {
                0 => spoiled.dq = changed(&gradients.dq, at(&gradients.dq)),
                1 => spoiled.dk = changed(&gradients.dk, at(&gradients.dk)),
                2 => spoiled.dv = changed(&gradients.dv, at(&gradients.dv)),
                _ => {
                    let sink = if last { spoiled.d_sinks_part.len() - 1 } else { 0 };
                    spoiled.d_sinks_part[sink] += 1e-2;
                }
            }
            let state = judged(&spoiled);
            assert!(matches!(state, CellState::Wrong { .. }), "tensor {tensor}, last {last}: {state:?}");
        }
    }
}

#[test]
fn a_spoiled_result_is_reported_as_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let mut runner = Runner::default();
    let cell = cell(ROWS[1], Strategy::Unified);
    let accepted = cell.validate(folder.path()).unwrap().unwrap();
    let mut reference = Reference::new(&accepted).unwrap();
    let backend = runner.backend(DeviceId::CPU).unwrap();
    let rows = runner.run(&accepted, Target::HERE, &reference.sample).unwrap();
    let mut judge = |rows| reference.judge(rows, &accepted, DeviceId::CPU, &backend).unwrap();
    let correct = judge(rows.clone());
    assert!(matches!(correct, CellState::Correct { .. }));

    let spoil = |how: &dyn Fn(&mut Vec<kyklos_oracle::oracle::Row>)| {
        let mut rows = rows.clone();
        how(&mut rows);
        rows
    };
    let value = spoil(&|rows| rows[700].o[3] += 1e-5);
    let lse = spoil(&|rows| rows[700].lse += 1e-4);
    let nan = spoil(&|rows| rows[3].o[0] = f64::NAN);
    let swapped = spoil(&|rows| {
        let other = rows[700].o.clone();
        rows[701].o = other;
    });
    let wrong = [lse, nan, swapped, value].map(judge);
    assert!(wrong.iter().all(|state| matches!(state, CellState::Wrong { .. })), "{wrong:?}");

    let states =
        [vec![correct, CellState::Refused("why".into()), CellState::Failed("why".into())], wrong.into()];
    let cells: Vec<(Cell, CellState)> = states.concat().into_iter().map(|state| (cell, state)).collect();
    let faults = faults(&cells, folder.path());
    assert_eq!(faults.len(), 5, "{faults:?}");
    let command = "kyklos attend --shape 1,260,6,2,16 --dtype f32 --mask causal --strategy unified --mesh 2x2 \
                   --placement zigzag --device cpu --transport in-process --verify";
    assert!(faults.iter().all(|fault| fault.lines().next() == Some(command)), "{faults:?}");
    assert!(matches!(Cli::try_parse_from(command.split(' ')).unwrap().command, Command::Attend(_)));
}

/// The result of one row is wrong for every other row with the same tensors: each option changes
/// the result, by the factor that negative controls need.
#[test]
fn every_option_changes_the_result_measurably() {
    let folder = tempfile::tempdir().unwrap();
    let mut runner = Runner::default();
    // The placement does not change the result, and rounding on the wire changes it little.
    let rows: Vec<Row> = ROWS.iter().copied().filter(|row| row.changes_the_answer()).collect();
    let mut seen = 0;
    for row in &rows {
        row.write((Dtype::F32, Pass::Forward), folder.path());
        let accepted = cell(*row, Strategy::Dense).validate(folder.path()).unwrap().unwrap();
        let mut reference = Reference::new(&accepted).unwrap();
        let backend = runner.backend(DeviceId::CPU).unwrap();
        for other in rows.iter().filter(|other| other.same_tensors(row) && other.name != row.name) {
            other.write((Dtype::F32, Pass::Forward), folder.path());
            let others = cell(*other, Strategy::Dense).validate(folder.path()).unwrap().unwrap();
            let answer = runner.run(&others, Target::HERE, &reference.sample).unwrap();
            match reference.judge(answer, &accepted, DeviceId::CPU, &backend).unwrap() {
                CellState::Wrong { error, tolerance, .. } => {
                    assert!(error > 100.0 * tolerance, "{} for {}: {error}", other.name, row.name);
                }
                state => panic!("{} passes for {}: {state:?}", other.name, row.name),
            }
            seen += 1;
        }
    }
    assert!(seen > 60, "{seen} pairs of rows");
}
