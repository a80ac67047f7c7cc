//! What the validator accepts, as a document. Nothing runs.

use std::path::Path;

use kyklos::{Dtype, Mesh, PlacementKind, Strategy};

use super::cell::{Cell, Place};
use super::rows::{ROWS, Row, mesh_of};
use super::table::place_in;
use crate::devices::{BackendKind, DeviceId};
use crate::failure::{Failure, Result};
use crate::options::TransportName;

/// Markdown: options by strategies, meshes by strategies, devices; with every refusal as it is printed.
pub(crate) fn document() -> Result<String> {
    let folder =
        tempfile::tempdir().map_err(|error| Failure::run(format!("no folder for inputs: {error}")))?;
    let mut refusals = Vec::new();
    let meshes = Strategy::ALL.into_iter().map(mesh_of).collect::<Result<Vec<_>>>()?;
    let columns: Vec<String> =
        Strategy::ALL.iter().zip(&meshes).map(|(strategy, mesh)| format!("{strategy} {mesh}")).collect();
    let mut out = format!("{HEAD}{}", header("", &columns));
    for row in ROWS {
        let mut states = Vec::new();
        for (strategy, mesh) in Strategy::ALL.into_iter().zip(&meshes) {
            states.push(accepted(*row, strategy, *mesh, folder.path(), &mut refusals)?);
        }
        out.push_str(&line(&format!("{}<br>{}", row.name, row.in_words()), &states));
    }
    out.push_str(MESHES);
    let names: Vec<String> = Strategy::ALL.iter().map(Strategy::to_string).collect();
    out.push_str(&header("mesh", &names));
    for mesh in ["1x1", "1x4", "4x1", "2x2", "8x1"] {
        let mut states = Vec::new();
        for strategy in Strategy::ALL {
            states.push(accepted(ROWS[0], strategy, mesh.parse::<Mesh>()?, folder.path(), &mut refusals)?);
        }
        out.push_str(&line(mesh, &states));
    }
    out.push_str(DEVICES);
    for kind in BackendKind::ALL {
        out.push_str(&line(kind.name(), &["yes".to_owned()]));
    }
    out.push('\n');
    for (index, refusal) in refusals.iter().enumerate() {
        out.push_str(&format!("[^{}]: {refusal}\n", index + 1));
    }
    Ok(out)
}

/// For which dtypes a combination is accepted over every placement, or over which placements for every dtype.
fn accepted(
    row: Row,
    strategy: Strategy,
    mesh: Mesh,
    folder: &Path,
    refusals: &mut Vec<String>,
) -> Result<String> {
    let (mut taken, mut notes) = (Vec::new(), Vec::new());
    let mut placements = PlacementKind::ALL.to_vec();
    for dtype in Dtype::ALL {
        row.write(dtype, folder)?;
        let said = notes.len();
        for placement in PlacementKind::ALL {
            let place = Place { device: DeviceId::CPU, transport: TransportName::InProcess };
            let cell = Cell { row, strategy, mesh, dtype, placement, place };
            if let Err(refusal) = cell.validate(folder)? {
                notes.push(refusal);
                placements.retain(|other| *other != placement);
            }
        }
        if notes.len() == said {
            taken.push(dtype.name());
        }
    }
    if notes.is_empty() {
        return Ok("yes".to_owned());
    }
    let mut said = Vec::new();
    for note in notes {
        place_in(&mut said, refused(note, refusals));
    }
    let refused = format!("no{}", said.concat());
    let names: Vec<&str> = placements.iter().map(|placement| placement.name()).collect();
    let taken = if taken.is_empty() { names } else { taken };
    Ok(if taken.is_empty() { refused } else { format!("{}, else {refused}", taken.join(", ")) })
}

/// The mark of a sentence, or of one that refuses another strategy or mesh for the same reason.
fn refused(sentence: String, refusals: &mut Vec<String>) -> String {
    let reason = |sentence: &str| {
        let alike = sentence.starts_with("strategy ");
        sentence.split_once(": ").filter(|_| alike).map(|(_, remedy)| remedy.to_owned())
    };
    let same =
        refusals.iter().position(|other| reason(other).is_some() && reason(other) == reason(&sentence));
    format!("[^{}]", same.unwrap_or_else(|| place_in(refusals, sentence)) + 1)
}

fn header(first: &str, columns: &[String]) -> String {
    format!("{}|---|{}\n", line(first, columns), "---|".repeat(columns.len()))
}

fn line(first: &str, cells: &[String]) -> String {
    format!("| {first} | {} |\n", cells.join(" | "))
}

const HEAD: &str = "# What goes with what

`kyklos support --matrix` prints this page from the validator that every command asks before anything runs; a test holds the
page to it, and `KYKLOS_BLESS=1` rewrites it. That what is accepted is also right is what `kyklos support` finds out: it runs all
of this on every device of the machine, in-process and over QUIC, and holds each result to the f64 oracle. Tables of such
runs are in `docs/results/`. What refusals mean and what to do about them: [errors](errors.md).

## Options and strategies

Every strategy on one mesh that it takes, four ranks except for dense. yes: f32, f16 and bf16, over contiguous, zigzag, striped and
per-document shards; else the dtypes or placements that are taken, and why the others are not. The problem, unless the row says otherwise, is `--shape 1,260,6,2,16`. Devices and transports make no difference here.

";

const MESHES: &str = "
## Meshes

The first row's problem, which has 6 query heads. A strategy that a mesh contradicts is refused by its own name; the note shows
the first of these sentences.

";

const DEVICES: &str = "
## Devices

Which of them a machine has is not the validator's to know; `kyklos devices` lists them.

| `--device` | part of this build |
|---|---|
";
