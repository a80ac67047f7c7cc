//! A sample of the table, and wrong results that it must detect.

use super::rows::ROWS;
use super::*;

fn sample() -> SupportArgs {
    SupportArgs {
        dtype: vec![Dtype::F32],
        placement: vec![PlacementKind::Zigzag],
        device: vec![DeviceRequest::Of(BackendKind::Cpu, None)],
        transport: vec![TransportName::InProcess],
        ..SupportArgs::default()
    }
}

const HERE: Target = Target { device: DeviceId::CPU, transport: TransportName::InProcess };

fn cell(row: Row, strategy: Strategy) -> Cell {
    Cell::new((row, Pass::Forward), strategy, Dtype::F32, PlacementKind::Zigzag, HERE)
}

#[test]
fn every_strategy_and_row_is_correct_or_refused() {
    let table = fill(&sample()).unwrap();
    assert_eq!(table.reports.len(), 2 * ROWS.len() * Strategy::ALL.len());
    let mut refused = 0;
    let mut right = 0;
    for Report { cell, state, command } in &table.reports {
        match state {
            CellState::Correct { error, tolerance } => {
                let most = if cell.row.name == "wire int8" { 0.1 } else { 0.01 };
                let most = if cell.pass == Pass::Backward { 0.1 } else { most };
                right += u32::from(cell.pass == Pass::Backward);
                assert!(error <= tolerance && *tolerance < most, "{command}: {error} {tolerance}")
            }
            CellState::Refused(text)
                if cell.pass == Pass::Backward && text.starts_with("a backward pass ") => {}
            CellState::Refused(text) => {
                refused += u32::from(cell.pass == Pass::Forward);
                let expected = match cell.row.name {
                    "wire f16" => "f16 on the wire",
                    "wire int8" => "int8 on the wire",
                    "fixed order" => "a fixed order ",
                    _ => panic!("{command}: {text}"),
                };
                assert!(text.starts_with(expected), "{command}: {text}");
            }
            CellState::Wrong { why, .. } | CellState::Failed(why) => panic!("{command}: {why}"),
        }
    }
    // Refused: other wire formats where a strategy sends no keys or values between shards; a fixed order where zigzag
    // shards are not whole tiles, that is with more than one shard.
    assert_eq!(refused as usize, 2 * 4 + (Strategy::ALL.len() - 2));
    // All rows but those of replicated keys, int8 and a fixed order, and f16 on the wire of four strategies.
    assert!(right as usize >= (ROWS.len() - 5) * Strategy::ALL.len() - 4, "{right}");
}

#[test]
fn spoiled_gradients_of_any_head_and_token_are_reported_as_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let mut runner = Runner::default();
    let row = *ROWS.iter().find(|row| row.name == "sinks").unwrap();
    let cell = Cell::new((row, Pass::Backward), Strategy::Unified, Dtype::F32, PlacementKind::Zigzag, HERE);
    let accepted = cell.validate(folder.path()).unwrap().unwrap();
    let mut reference = Reference::new(&accepted).unwrap();
    let gradients = runner.gradients(&accepted, HERE).unwrap();
    let mut judged = |gradients: &crate::run::call::HostGradients| {
        reference.judge_gradients(gradients, &accepted).unwrap()
    };
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
            assert!(state.is_bad(), "tensor {tensor}, last {last}: {state:?}");
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
    let rows = runner.run(&accepted, HERE, &reference.sample).unwrap();
    let mut judge = |rows| reference.judge(rows, &accepted, DeviceId::CPU, &backend).unwrap();
    assert!(matches!(judge(rows.clone()), CellState::Correct { .. }));

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
    for rows in [lse, nan, swapped, value] {
        let state = judge(rows);
        assert!(matches!(state, CellState::Wrong { .. }), "{state:?}");
        let table = Table {
            reports: vec![cell.report(state, folder.path())],
            devices: Vec::new(),
            not_run: Vec::new(),
        };
        let text = table.text();
        assert!(
            text.contains("1 WRONG") && text.contains("0 correct, 0 refused, 1 wrong, 0 failed"),
            "{text}"
        );
        assert!(
            text.contains("kyklos attend --shape 1,260,6,2,16 --dtype f32 --mask causal --strategy unified")
        );
    }
}

/// The result of one row is wrong for every other row with the same tensors: each option changes the result, by the factor
/// that negative controls need.
#[test]
fn every_option_changes_the_result_measurably() {
    let folder = tempfile::tempdir().unwrap();
    let mut runner = Runner::default();
    // The placement does not change the result, and rounding on the wire changes it little.
    let rows: Vec<Row> = ROWS.iter().copied().filter(|row| row.changes_the_answer()).collect();
    let mut seen = 0;
    for row in &rows {
        row.write((Dtype::F32, Pass::Forward), folder.path()).unwrap();
        let accepted = cell(*row, Strategy::Dense).validate(folder.path()).unwrap().unwrap();
        let mut reference = Reference::new(&accepted).unwrap();
        let backend = runner.backend(DeviceId::CPU).unwrap();
        for other in rows.iter().filter(|other| other.same_tensors(row) && other.name != row.name) {
            other.write((Dtype::F32, Pass::Forward), folder.path()).unwrap();
            let others = cell(*other, Strategy::Dense).validate(folder.path()).unwrap().unwrap();
            let answer = runner.run(&others, HERE, &reference.sample).unwrap();
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
