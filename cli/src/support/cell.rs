//! One cell of the table and its result.

use std::path::Path;
use std::sync::Arc;

use kyklos::plan::ProvedPlans;
use kyklos::{Dtype, Mesh, PlacementKind, Strategy};

use super::rows::{Pass, Row};
use crate::commands::attend::AttendArgs;
use crate::devices::DeviceId;
use crate::failure::{Failure, Result};
use crate::options::{TransportName, one_line};
use crate::request::Request;

/// One combination.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) row: Row,
    pub(super) pass: Pass,
    pub(super) strategy: Strategy,
    pub(super) mesh: Mesh,
    pub(super) dtype: Dtype,
    pub(super) placement: PlacementKind,
    pub(super) target: Target,
}

/// Where a cell runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Target {
    pub(super) device: DeviceId,
    pub(super) transport: TransportName,
}

/// The result of a cell. The last two are faults.
#[derive(Clone, Debug)]
pub(super) enum CellState {
    /// The result agrees with the oracle.
    Correct { error: f64, tolerance: f64 },
    /// The validator refused the cell with this message, before anything ran.
    Refused(String),
    /// The result is wrong.
    Wrong { error: f64, tolerance: f64, why: String },
    /// The run failed.
    Failed(String),
}

/// A request that can run.
pub(super) struct Accepted {
    pub(super) request: Request,
    pub(super) plans: Arc<ProvedPlans>,
    /// Of the backward pass.
    pub(super) backward: Option<Arc<ProvedPlans>>,
}

impl Target {
    /// The CPU, within this process.
    pub(super) const HERE: Self = Self { device: DeviceId::CPU, transport: TransportName::InProcess };
}

impl CellState {
    /// From a comparison.
    pub(super) fn of(error: f64, tolerance: f64, failure: Option<String>) -> Self {
        match failure {
            None => Self::Correct { error, tolerance },
            Some(why) => Self::Wrong { error, tolerance, why },
        }
    }
}

impl Cell {
    /// The command line that repeats this cell, with input files in `DIR`.
    pub(super) fn command(&self) -> String {
        let Self { row, pass, strategy, mesh, dtype, placement, target: Target { device, transport } } = self;
        let (options, transport) = (row.options((*dtype, *pass), mesh.size()), transport.name());
        let grad = if *pass == Pass::Backward { " --grad" } else { "" };
        format!(
            "kyklos attend {options} --strategy {strategy} --mesh {mesh} --placement {placement} \
             --device {device} --transport {transport}{grad} --verify"
        )
    }

    /// Asks the validator in the same way as `attend`: returns proved plans, or the refusal.
    ///
    /// # Errors
    /// Other than a refusal: the row cannot be read, or a plan fails its proof.
    pub(super) fn validate(&self, folder: &Path) -> Result<Result<Accepted, String>> {
        let (command, folder) = (self.command(), folder.to_string_lossy());
        let words = command.split(' ').skip(1).map(|word| word.replace("DIR", &folder).into());
        let args = AttendArgs::of_words(words).map_err(|error| Failure::run(one_line(&error)))?;
        let planned = Request::new(&args.problem, args.seed, None).and_then(|request| {
            let (plans, backward) = (Arc::new(request.plan()?), request.plan_backward()?.map(Arc::new));
            Ok(Accepted { plans, backward, request })
        });
        match planned {
            Ok(accepted) => Ok(Ok(accepted)),
            Err(refusal) if refusal.exit == 2 => Ok(Err(refusal.text)),
            Err(failure) => Err(failure),
        }
    }
}
