//! One cell of the table: what it is, and what became of it.

use std::path::Path;

use kyklos::{Dtype, Mesh, PlacementKind, Strategy};
use serde::Serialize;

use super::rows::Row;
use crate::commands::attend::AttendArgs;
use crate::devices::DeviceId;
use crate::failure::{Failure, Result};
use crate::options::{TransportName, one_line};
use crate::request::Request;
use crate::run::plans::Plans;
use crate::verify::Verdict;

/// A combination.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    pub(crate) row: Row,
    pub(crate) strategy: Strategy,
    pub(crate) mesh: Mesh,
    pub(crate) dtype: Dtype,
    pub(crate) placement: PlacementKind,
    pub(crate) place: Place,
}

/// Where a cell runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) device: DeviceId,
    pub(crate) transport: TransportName,
}

/// What became of a cell. Nobody wants to see the last two.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum State {
    /// It agrees with the oracle.
    Correct { error: f64, tolerance: f64 },
    /// The validator refused it, with this sentence, before anything ran.
    Refused(String),
    /// It ran, and the result is wrong.
    Wrong { error: f64, tolerance: f64, why: String },
    /// It did not run to its end.
    Failed(String),
}

impl State {
    /// What a comparison says.
    pub(crate) fn of(verdict: Verdict) -> Self {
        let Verdict { max_abs_error: error, tolerance, failure, .. } = verdict;
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

/// What can run.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) request: Request,
    pub(crate) plans: Plans,
}

impl Cell {
    /// On the mesh that the strategy is tried on.
    pub(crate) fn new(
        row: Row,
        strategy: Strategy,
        dtype: Dtype,
        placement: PlacementKind,
        place: Place,
    ) -> Self {
        Self { row, strategy, mesh: strategy.example_mesh(), dtype, placement, place }
    }

    /// The arguments of the program that repeat this cell, with input files in `folder`.
    pub(crate) fn arguments(&self, folder: &Path) -> Vec<String> {
        let mut arguments = vec!["attend".to_owned()];
        arguments.extend(self.row.options(self.dtype, self.mesh.world(), folder));
        let chosen = [
            ("--strategy", self.strategy.to_string()),
            ("--mesh", self.mesh.to_string()),
            ("--placement", self.placement.to_string()),
            ("--device", self.place.device.to_string()),
            ("--transport", self.place.transport.name().to_owned()),
        ];
        arguments.extend(chosen.into_iter().flat_map(|(name, value)| [name.to_owned(), value]));
        arguments.push("--verify".to_owned());
        arguments
    }

    /// What the validator says, by the same way as `attend`: plans that are proved, or the sentence that refuses.
    ///
    /// # Errors
    /// What is no refusal: the row cannot be read, or a plan fails its proof.
    pub(crate) fn validate(&self, folder: &Path) -> Result<Result<Box<Accepted>, String>> {
        let words = self.arguments(folder).into_iter().map(Into::into);
        let args = AttendArgs::of_words(words).map_err(|error| Failure::run(one_line(&error)))?;
        let planned = Request::new(&args.problem, args.seed, None)
            .and_then(|request| Ok(Accepted { plans: Plans::proved(request.plan()?, &[]), request }));
        match planned {
            Ok(accepted) => Ok(Ok(Box::new(accepted))),
            Err(refusal) if refusal.exit == 2 => Ok(Err(refusal.text)),
            Err(failure) => Err(failure),
        }
    }

    /// The cell with what became of it.
    pub(crate) fn report(&self, state: State, folder: &Path) -> Report {
        Report { cell: *self, state, command: format!("kyklos {}", self.arguments(folder).join(" ")) }
    }
}

/// A cell and what became of it.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) cell: Cell,
    pub(crate) state: State,
    /// Repeats it.
    pub(crate) command: String,
}

impl Serialize for Report {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Line<'a> {
            strategy: Strategy,
            mesh: String,
            row: &'a str,
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
        let Cell { row, strategy, mesh, dtype, placement, place } = self.cell;
        let (numbers, message) = match &self.state {
            State::Correct { error, tolerance } => (Some((*error, *tolerance)), None),
            State::Wrong { error, tolerance, why } => (Some((*error, *tolerance)), Some(why.as_str())),
            State::Refused(text) | State::Failed(text) => (None, Some(text.as_str())),
        };
        Line {
            strategy,
            mesh: mesh.to_string(),
            row: row.name,
            dtype: dtype.name(),
            placement: placement.to_string(),
            device: place.device.to_string(),
            transport: place.transport.name(),
            state: self.state.name(),
            max_abs_error: numbers.map(|(error, _)| error),
            tolerance: numbers.map(|(_, tolerance)| tolerance),
            message,
            command: &self.command,
        }
        .serialize(serializer)
    }
}
