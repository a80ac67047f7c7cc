//! One cell of the table and its result.

use std::path::Path;

use kyklos::plan::ProvedPlans;
use kyklos::{Dtype, Mesh, PlacementKind, Strategy};
use serde::Serialize;
use std::sync::Arc;

use super::pass::Pass;
use super::rows::Row;
use crate::commands::attend::AttendArgs;
use crate::devices::DeviceId;
use crate::failure::{Failure, Result};
use crate::options::{TransportName, one_line};
use crate::request::Request;
use crate::verify::{GradientVerdict, Verdict};

/// One combination.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    pub(crate) row: Row,
    pub(crate) pass: Pass,
    pub(crate) strategy: Strategy,
    pub(crate) mesh: Mesh,
    pub(crate) dtype: Dtype,
    pub(crate) placement: PlacementKind,
    pub(crate) target: Target,
}

/// Where a cell runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    pub(crate) device: DeviceId,
    pub(crate) transport: TransportName,
}

/// The result of a cell. The last two are faults.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CellState {
    /// The result agrees with the oracle.
    Correct { error: f64, tolerance: f64 },
    /// The validator refused the cell with this message, before anything ran.
    Refused(String),
    /// The result is wrong.
    Wrong { error: f64, tolerance: f64, why: String },
    /// The run failed.
    Failed(String),
}

impl CellState {
    /// From a comparison.
    pub(crate) fn of(verdict: Verdict) -> Self {
        let Verdict { max_abs_error: error, tolerance, failure, .. } = verdict;
        match failure {
            None => Self::Correct { error, tolerance },
            Some(why) => Self::Wrong { error, tolerance, why },
        }
    }

    /// From a comparison of the gradients of one head.
    pub(crate) fn of_gradients(verdict: GradientVerdict) -> Self {
        let GradientVerdict { max_abs_error: error, tolerance, failure } = verdict;
        match failure {
            None => Self::Correct { error, tolerance },
            Some(why) => Self::Wrong { error, tolerance, why },
        }
    }

    pub(crate) fn is_bad(&self) -> bool {
        matches!(self, Self::Wrong { .. } | Self::Failed(_))
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Correct { .. } => "correct",
            Self::Refused(_) => "refused",
            Self::Wrong { .. } => "WRONG",
            Self::Failed(_) => "FAILED",
        }
    }
}

/// A request that can run.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) request: Request,
    pub(crate) plans: Arc<ProvedPlans>,
    /// Of the backward pass.
    pub(crate) backward: Option<Arc<ProvedPlans>>,
}

impl Cell {
    /// A cell on the test mesh of its strategy.
    pub(crate) fn new(
        (row, pass): (Row, Pass),
        strategy: Strategy,
        dtype: Dtype,
        placement: PlacementKind,
        target: Target,
    ) -> Self {
        Self { row, pass, strategy, mesh: strategy.example_mesh(), dtype, placement, target }
    }

    /// Arguments of the program that repeat this cell, with input files in `folder`.
    pub(crate) fn arguments(&self, folder: &Path) -> Vec<String> {
        let mut arguments = vec!["attend".to_owned()];
        arguments.extend(self.row.options((self.dtype, self.pass), self.mesh.world(), folder));
        let chosen = [
            ("--strategy", self.strategy.to_string()),
            ("--mesh", self.mesh.to_string()),
            ("--placement", self.placement.to_string()),
            ("--device", self.target.device.to_string()),
            ("--transport", self.target.transport.name().to_owned()),
        ];
        arguments.extend(chosen.into_iter().flat_map(|(name, value)| [name.to_owned(), value]));
        if self.pass == Pass::Backward {
            arguments.push("--grad".to_owned());
        }
        arguments.push("--verify".to_owned());
        arguments
    }

    /// Asks the validator in the same way as `attend`: returns proved plans, or the refusal.
    ///
    /// # Errors
    /// Other than a refusal: the row cannot be read, or a plan fails its proof.
    pub(crate) fn validate(&self, folder: &Path) -> Result<Result<Box<Accepted>, String>> {
        let words = self.arguments(folder).into_iter().map(Into::into);
        let args = AttendArgs::of_words(words).map_err(|error| Failure::run(one_line(&error)))?;
        let planned = Request::new(&args.problem, args.seed, None).and_then(|request| {
            let (plans, backward) = (Arc::new(request.plan()?), request.plan_backward()?.map(Arc::new));
            Ok(Accepted { plans, backward, request })
        });
        match planned {
            Ok(accepted) => Ok(Ok(Box::new(accepted))),
            Err(refusal) if refusal.exit == 2 => Ok(Err(refusal.text)),
            Err(failure) => Err(failure),
        }
    }

    /// The cell with its result.
    pub(crate) fn report(&self, state: CellState, folder: &Path) -> Report {
        Report { cell: *self, state, command: format!("kyklos {}", self.arguments(folder).join(" ")) }
    }
}

/// A cell and its result.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) cell: Cell,
    pub(crate) state: CellState,
    /// The command line that repeats the cell.
    pub(crate) command: String,
}

impl Serialize for Report {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Line<'a> {
            strategy: Strategy,
            mesh: String,
            row: &'a str,
            pass: &'a str,
            dtype: &'a str,
            placement: String,
            device: String,
            transport: &'a str,
            state: &'a str,
            max_abs_error: Option<f64>,
            tolerance: Option<f64>,
            message: Option<&'a str>,
            command: &'a str,
        }
        let Cell { row, pass, strategy, mesh, dtype, placement, target } = self.cell;
        let (numbers, message) = match &self.state {
            CellState::Correct { error, tolerance } => (Some((*error, *tolerance)), None),
            CellState::Wrong { error, tolerance, why } => (Some((*error, *tolerance)), Some(why.as_str())),
            CellState::Refused(text) | CellState::Failed(text) => (None, Some(text.as_str())),
        };
        Line {
            strategy,
            mesh: mesh.to_string(),
            row: row.name,
            pass: pass.name(),
            dtype: dtype.name(),
            placement: placement.to_string(),
            device: target.device.to_string(),
            transport: target.transport.name(),
            state: self.state.name(),
            max_abs_error: numbers.map(|(error, _)| error),
            tolerance: numbers.map(|(_, tolerance)| tolerance),
            message,
            command: &self.command,
        }
        .serialize(serializer)
    }
}
