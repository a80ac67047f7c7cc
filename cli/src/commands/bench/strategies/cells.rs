//! The cells of the bench: every strategy on every mesh in every placement, for every case.

use std::fmt;
use std::sync::Arc;

use kyklos::simulate::{Candidate, PlanQuery, candidates};
use kyklos::{AttentionProblem, Mesh, PlacementKind, PlanError, Split, Strategy};
use serde::{Deserialize, Serialize};

use super::args::{StrategiesArgs, TokenShape};
use crate::failure::Result;
use crate::hints;
use crate::options::StrategyName;

/// A shape, mask and dtype.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) problem: AttentionProblem,
    pub(super) shape: [u32; 5],
    pub(super) mask: String,
}

/// One way to run a case.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    /// Its place in the list of cases.
    pub(super) case: usize,
    pub(super) name: CellName,
    pub(super) way: Way,
}

/// How a cell runs.
#[derive(Clone, Debug)]
pub(super) enum Way {
    Run(Candidate),
    /// Why it does not.
    Refused(String),
}

/// What tells a cell from all others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct CellName {
    /// Batch, tokens, query heads, KV heads, head dim.
    pub(super) shape: [u32; 5],
    pub(super) mask: String,
    pub(super) dtype: String,
    pub(super) mesh: String,
    pub(super) strategy: String,
    /// None: in any placement.
    pub(super) placement: Option<String>,
}

impl CellName {
    /// Shape, mask and dtype.
    pub(super) fn case(&self) -> String {
        let shape: Vec<String> = self.shape.iter().map(u32::to_string).collect();
        format!("{} {} {}", shape.join(","), self.mask, self.dtype)
    }

    /// Strategy, mesh and placement.
    pub(super) fn way(&self) -> String {
        let placement = self.placement.as_deref().map_or_else(String::new, |kind| format!(" {kind}"));
        format!("{} {}{placement}", self.strategy, self.mesh)
    }
}

impl fmt::Display for CellName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.case(), self.way())
    }
}

/// All cases, in the order in which they run.
pub(super) fn cases(args: &StrategiesArgs) -> Result<Vec<Arc<Case>>> {
    let mut cases = Vec::new();
    for TokenShape([tokens, heads, kv_heads, dim]) in &args.shape {
        for mask in &args.mask {
            for dtype in &args.dtype {
                for batch in &args.batch {
                    let shape = [batch.get(), *tokens, *heads, *kv_heads, *dim];
                    let problem = AttentionProblem::new(shape, *dtype, mask.clone())?;
                    cases.push(Arc::new(Case { problem, shape, mask: mask.to_string() }));
                }
            }
        }
    }
    Ok(cases)
}

/// All cells of `cases` on `ranks` ranks: also those that cannot run, with the reason.
pub(super) fn cells(args: &StrategiesArgs, cases: &[Arc<Case>], ranks: u32) -> Result<Vec<Cell>> {
    let wanted = PlanQuery {
        ranks,
        mesh: None,
        strategy: None,
        placement: None,
        split: Split::Even,
        gradients: false,
    };
    let meshes = (1..=ranks).rev().filter(|ulysses| ranks.is_multiple_of(*ulysses));
    let meshes =
        meshes.map(|ulysses| Mesh::new(ulysses, ranks / ulysses)).collect::<Result<Vec<_>, PlanError>>()?;
    let mut cells = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let possible = candidates(&case.problem, &wanted)?;
        for mesh in meshes.iter().filter(|mesh| args.mesh.is_empty() || args.mesh.contains(mesh)) {
            for strategy in Strategy::ALL {
                if args.strategy.is_empty() || args.strategy.contains(&StrategyName(strategy)) {
                    let ways = ways(args, case, &possible, (strategy, *mesh));
                    cells.extend(ways.into_iter().map(|(placement, way)| {
                        let name = name(case, strategy, *mesh, placement);
                        Cell { case: number, name, way }
                    }));
                }
            }
        }
    }
    Ok(cells)
}

/// The placements of a strategy on a mesh, and how each of them runs.
fn ways(
    args: &StrategiesArgs,
    case: &Case,
    possible: &[Candidate],
    (strategy, mesh): (Strategy, Mesh),
) -> Vec<(Option<PlacementKind>, Way)> {
    let fits = strategy.accepts(mesh).and_then(|()| mesh.fits(&case.problem));
    if let Err(error) = fits {
        return vec![(None, Way::Refused(hints::of_plan(&error)))];
    }
    let here: Vec<&Candidate> = possible
        .iter()
        .filter(|candidate| (candidate.strategy, candidate.mesh) == (strategy, mesh))
        .collect();
    if here.is_empty() {
        let why = "makes the same plans as another strategy on this mesh";
        return vec![(None, Way::Refused(why.to_owned()))];
    }
    let wanted = PlacementKind::ALL
        .into_iter()
        .filter(|kind| args.placement.is_empty() || args.placement.contains(kind));
    wanted
        .map(|kind| {
            let way = match here.iter().find(|candidate| candidate.placement == kind) {
                Some(candidate) => Way::Run(**candidate),
                None => Way::Refused(format!("deals tokens that cost the same as {}", here[0].placement)),
            };
            (Some(kind), way)
        })
        .collect()
}

fn name(case: &Case, strategy: Strategy, mesh: Mesh, placement: Option<PlacementKind>) -> CellName {
    CellName {
        shape: case.shape,
        mask: case.mask.clone(),
        dtype: case.problem.dtype.to_string(),
        mesh: mesh.to_string(),
        strategy: strategy.to_string(),
        placement: placement.map(|kind| kind.to_string()),
    }
}
