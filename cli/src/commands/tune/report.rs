//! The report of a tuning run.

use std::path::PathBuf;

use kyklos::backend::Backend;
use kyklos::backend::wgpu::{AttendVariant, ShapeBucket, WgpuBackend};
use kyklos::plan::table;
use serde::Serialize;

use super::args::TuneArgs;
use super::case::Case;
use super::choose::{Choice, Outcome, choose};
use super::rounds::Measured;
use crate::devices::{BackendKind, DeviceId};
use crate::failure::{Failure, Result};
use crate::median::median;

/// The object of `--json`.
#[derive(Serialize)]
pub(super) struct Report {
    device: String,
    name: String,
    driver: String,
    /// The value of `--kernel`.
    kernel: String,
    dry_run: bool,
    pub(super) cases: Vec<CaseReport>,
    /// The file, if choices were kept.
    pub(super) kept_in: Option<PathBuf>,
}

/// One shape in one dtype.
#[derive(Serialize)]
pub(super) struct CaseReport {
    shape: [u32; 5],
    dtype: String,
    bucket: ShapeBucket,
    /// `timestamps`, the device's own, or `wall`.
    clock: &'static str,
    candidates: Vec<CandidateReport>,
    /// Name of the winner.
    winner: Option<String>,
    #[serde(skip)]
    chosen: Option<(usize, AttendVariant)>,
    /// Whether there are kernels for matrix units among the candidates, and the built-in one is
    /// another.
    #[serde(skip)]
    compared: bool,
}

/// One variant.
#[derive(Serialize)]
struct CandidateReport {
    variant: String,
    rounds: usize,
    median_ms: Option<f64>,
    min_ms: Option<f64>,
    max_ms: Option<f64>,
    max_abs_error: Option<f64>,
    tolerance: Option<f64>,
    wrong: bool,
    why: String,
}

impl Report {
    pub(super) fn new(index: usize, backend: &WgpuBackend, args: &TuneArgs) -> Self {
        let info = backend.info();
        Self {
            device: DeviceId { kind: BackendKind::Wgpu, index }.to_string(),
            name: info.name.clone(),
            driver: info.driver.clone(),
            kernel: args.kernel.to_string(),
            dry_run: args.dry_run,
            cases: Vec::new(),
            kept_in: None,
        }
    }

    pub(super) fn json(&self) -> Result<String> {
        serde_json::to_string_pretty(self)
            .map(|json| json + "\n")
            .map_err(|error| Failure::run(format!("cannot print the choices: {error}")))
    }

    pub(super) fn text(&self) -> String {
        let header = [
            "shape",
            "dtype",
            "candidate",
            "median ms",
            "min ms",
            "max ms",
            "rounds",
            "error",
            "tolerance",
            "",
        ];
        let rows = self.cases.iter().flat_map(CaseReport::rows).collect();
        let clocks = if self.cases.iter().all(|case| case.clock == TIMESTAMPS) {
            "times by the device's clock"
        } else {
            "times by the wall clock"
        };
        let displaced = self.cases.iter().filter(|case| case.displaces()).count();
        let mut out = format!(
            "{} {} ({}), kernel {}, {clocks}\n\n{}\n",
            self.device,
            self.name,
            self.driver,
            self.kernel,
            table(&header, rows)
        );
        out.push_str(&match displaced {
            0 => "the built-in choices stay".to_owned(),
            1 => "1 built-in choice is displaced".to_owned(),
            n => format!("{n} built-in choices are displaced"),
        });
        out.push_str(&match &self.kept_in {
            Some(path) => format!("; kept in {}\n", path.display()),
            None if self.dry_run => "; dry run: nothing is kept\n".to_owned(),
            None => "; nothing is kept\n".to_owned(),
        });
        out
    }
}

impl CaseReport {
    pub(super) fn new(case: &Case, measured: Measured) -> Self {
        let outcomes: Vec<Outcome> =
            measured.candidates.iter().map(|candidate| candidate.outcome.clone()).collect();
        let Choice { winner, why } = choose(&outcomes);
        let chosen = winner.map(|index| (index, measured.candidates[index].variant));
        let is_matrix =
            |index: usize| matches!(measured.candidates[index].variant, AttendVariant::Cooperative(_));
        let candidates = measured.candidates.iter().zip(why).map(|(candidate, why)| {
            let times = match &candidate.outcome {
                Outcome::Right(times) => &times[..],
                _ => &[],
            };
            let of = |ms: f64| (!times.is_empty()).then_some(ms);
            CandidateReport {
                variant: candidate.variant.name(),
                rounds: times.len(),
                median_ms: of(median(times.iter().copied())),
                min_ms: of(times.iter().copied().fold(f64::INFINITY, f64::min)),
                max_ms: of(times.iter().copied().fold(0.0, f64::max)),
                max_abs_error: candidate.verdict.as_ref().map(|verdict| verdict.max_abs_error),
                tolerance: candidate.verdict.as_ref().map(|verdict| verdict.tolerance),
                wrong: matches!(candidate.outcome, Outcome::Wrong(_)),
                why,
            }
        });
        Self {
            shape: case.shape,
            dtype: case.problem.dtype.to_string(),
            bucket: case.key.bucket,
            clock: if measured.timestamps { TIMESTAMPS } else { "wall" },
            candidates: candidates.collect(),
            winner: chosen.map(|(_, variant)| variant.name()),
            chosen,
            compared: is_matrix(0) != (0..measured.candidates.len()).any(is_matrix),
        }
    }

    /// The winner.
    pub(super) fn chosen(&self) -> Option<AttendVariant> {
        self.chosen.map(|(_, variant)| variant)
    }

    /// Whether the winner differs from the built-in choice.
    fn displaces(&self) -> bool {
        self.chosen.is_some_and(|(index, _)| index > 0)
    }

    /// Whether a run without this choice may use another kernel: also where the device would
    /// compare the built-in one with that for matrix units.
    pub(super) fn is_needed(&self) -> bool {
        self.displaces() || self.compared
    }

    /// Number of candidates with wrong results.
    pub(super) fn wrong(&self) -> usize {
        self.candidates.iter().filter(|candidate| candidate.wrong).count()
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let shape = self.shape.map(|n| n.to_string()).join(",");
        let row = |candidate: &CandidateReport| {
            let ms = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.2}"));
            let error =
                |error: Option<f64>| error.map_or_else(|| "-".to_owned(), |error| format!("{error:.1e}"));
            vec![
                shape.clone(),
                self.dtype.clone(),
                candidate.variant.clone(),
                ms(candidate.median_ms),
                ms(candidate.min_ms),
                ms(candidate.max_ms),
                candidate.rounds.to_string(),
                error(candidate.max_abs_error),
                error(candidate.tolerance),
                candidate.why.clone(),
            ]
        };
        self.candidates.iter().map(row).collect()
    }
}

const TIMESTAMPS: &str = "timestamps";
