//! `docs/support.md`: what the validator accepts. Nothing runs.

use std::path::Path;

use kyklos::{Dtype, Mesh, PlacementKind, Strategy};

use super::cell::{Cell, Target};
use super::rows::{Pass, ROWS, Row};

/// Markdown: options by strategies, meshes by strategies; with every refusal as it is printed.
pub(super) fn document() -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut refusals = Vec::new();
    let meshes = Strategy::ALL.map(Strategy::example_mesh);
    let columns: Vec<String> =
        Strategy::ALL.iter().zip(&meshes).map(|(strategy, mesh)| format!("{strategy} {mesh}")).collect();
    let mut out = String::new();
    for (pass, head) in [(Pass::Forward, HEAD), (Pass::Backward, GRADIENTS)] {
        out.push_str(&format!("{head}{}", header("", &columns)));
        for row in ROWS {
            let mut states = Vec::new();
            for (strategy, mesh) in Strategy::ALL.into_iter().zip(&meshes) {
                states.push(accepted((*row, pass), strategy, *mesh, folder.path(), &mut refusals));
            }
            let named = match pass {
                Pass::Forward => format!("{}<br>{}", row.name, row.in_words()),
                Pass::Backward => row.name.to_owned(),
            };
            out.push_str(&line(&named, &states));
        }
    }
    out.push_str(MESHES);
    let names: Vec<String> = Strategy::ALL.iter().map(Strategy::to_string).collect();
    out.push_str(&header("mesh", &names));
    for mesh in ["1x1", "1x4", "4x1", "2x2", "8x1"] {
        let mut states = Vec::new();
        for strategy in Strategy::ALL {
            let (row, mesh) = ((ROWS[0], Pass::Forward), mesh.parse::<Mesh>().unwrap());
            states.push(accepted(row, strategy, mesh, folder.path(), &mut refusals));
        }
        out.push_str(&line(mesh, &states));
    }
    out.push('\n');
    for (index, refusal) in refusals.iter().enumerate() {
        out.push_str(&format!("[^{}]: {refusal}\n", index + 1));
    }
    out
}

/// The dtypes that are accepted with every placement, or the placements that are accepted with
/// every dtype. Of a backward pass also the strategy that runs it, if it is another one.
fn accepted(
    (row, pass): (Row, Pass),
    strategy: Strategy,
    mesh: Mesh,
    folder: &Path,
    refusals: &mut Vec<String>,
) -> String {
    let (mut taken, mut notes) = (Vec::new(), Vec::new());
    let mut by = strategy;
    let mut placements = PlacementKind::ALL.to_vec();
    for dtype in Dtype::ALL {
        row.write((dtype, pass), folder);
        let said = notes.len();
        for placement in PlacementKind::ALL {
            let cell = Cell { row, pass, strategy, mesh, dtype, placement, target: Target::HERE };
            match cell.validate(folder).unwrap() {
                Ok(accepted) => by = accepted.backward.map_or(by, |plans| plans.set().strategy),
                Err(refusal) => {
                    notes.push(refusal);
                    placements.retain(|other| *other != placement);
                }
            }
        }
        if notes.len() == said {
            taken.push(dtype.name());
        }
    }
    let by = if by == strategy { String::new() } else { format!(" by {by}") };
    if notes.is_empty() {
        return format!("yes{by}");
    }
    let mut said = Vec::new();
    for note in notes {
        place_in(&mut said, refused(note, refusals));
    }
    let refused = format!("no{}", said.concat());
    let names: Vec<&str> = placements.iter().map(|placement| placement.name()).collect();
    let taken = if taken.is_empty() { names } else { taken };
    if taken.is_empty() { refused } else { format!("{}{by}, else {refused}", taken.join(", ")) }
}

/// The footnote of a refusal. Refusals of other strategies or meshes for the same reason share one.
fn refused(sentence: String, refusals: &mut Vec<String>) -> String {
    let reason = |sentence: &str| {
        let alike = sentence.starts_with("strategy ");
        sentence.split_once(": ").filter(|_| alike).map(|(_, remedy)| remedy.to_owned())
    };
    let same =
        refusals.iter().position(|other| reason(other).is_some() && reason(other) == reason(&sentence));
    format!("[^{}]", same.unwrap_or_else(|| place_in(refusals, sentence)) + 1)
}

/// The index of `item` in `list`; adds it if it is missing.
fn place_in(list: &mut Vec<String>, item: String) -> usize {
    list.iter().position(|other| *other == item).unwrap_or_else(|| {
        list.push(item);
        list.len() - 1
    })
}

fn header(first: &str, columns: &[String]) -> String {
    format!("{}|---|{}\n", line(first, columns), "---|".repeat(columns.len()))
}

fn line(first: &str, cells: &[String]) -> String {
    format!("| {first} | {} |\n", cells.join(" | "))
}

const HEAD: &str = "# Supported combinations

Each command asks the validator before it runs anything; this page is what the validator says. It is compared with the validator by
`cargo test --release -p kyklos-cli --lib support`, and with `KYKLOS_BLESS=1` rewritten. The same tests check that accepted combinations are
correct: their results are compared with the f64 oracle, of a sample, and with `KYKLOS_TESTS=all` of every combination, on the CPU
and on a wgpu device, in-process and over QUIC. What the most common errors mean: [errors](errors.md).

## Options and strategies

Each strategy is on one mesh that it accepts, with four ranks, except for dense. `yes` means f32, f16 and bf16 with contiguous,
zigzag, striped and per-document placement. Otherwise a cell lists the accepted dtypes or placements, and a footnote with the
refusal of the others. The problem is `--shape 1,260,6,2,16` unless the row names another one. Devices and transports make no
difference here.

";

const GRADIENTS: &str = "
## Gradients

The same rows and strategies with `--grad`: the gradients of q, k, v and sinks. A strategy without a backward pass of its own
is named with the strategy that computes the gradients of its forward pass: the default of the mesh, on the same
tokens.

";

const MESHES: &str = "
## Meshes

The problem of the first row, which has 6 query heads. A strategy that does not fit a mesh is refused; the footnote shows the
first of these messages.

";
