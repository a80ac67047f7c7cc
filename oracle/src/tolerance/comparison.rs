//! The distance between an answer and the oracle's answer, and the place of the largest error.

use std::fmt;

use super::slack::{RowSlack, counted};
use super::{Limit, SIGNAL_FRACTION, Vacuous};
use crate::oracle::{Dtype, OracleProblem, Row, RowId, Values};

/// The case, the inputs and the backend of a computation. The message of a failure has them, so
/// that it can be repeated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// The case, or another name of the inputs.
    pub case: String,
    /// The seed of the inputs.
    pub seed: u64,
    /// Backend and device, with mesh and strategy if there are several ranks.
    pub backend: String,
    /// The command that runs this again.
    pub rerun: String,
}

/// The right rows, with the slack of each.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// Rows of the oracle.
    pub rows: &'a [Row],
    /// Of each row ([`super::row_slacks`]), or empty: no row has any.
    pub slack: &'a [RowSlack],
}

impl<'a> From<&'a [Row]> for Expected<'a> {
    fn from(rows: &'a [Row]) -> Self {
        Self { rows, slack: &[] }
    }
}

impl<'a> From<&'a Vec<Row>> for Expected<'a> {
    fn from(rows: &'a Vec<Row>) -> Self {
        Self { rows, slack: &[] }
    }
}

/// One output value and its expected value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worst {
    /// The row.
    pub at: RowId,
    /// The component of the output vector; `None` for a log-sum-exp.
    pub dim: Option<usize>,
    /// The computed value.
    pub actual: f64,
    /// The value of the oracle.
    pub expected: f64,
    /// `|actual - expected|` beyond the slack. ∞ if one of them is NaN or infinite and the other is
    /// different.
    pub error: f64,
    /// Their distance in representable numbers of the output's type (f32 for a log-sum-exp).
    pub ulps: Option<u64>,
}

/// The distance between an answer and the oracle's answer over a set of rows.
///
/// All errors are beyond the slack of their element. NaN equals NaN, and an infinity equals itself.
/// Any other pair with a non-finite member has infinite error. A row that sees no key is exact by
/// definition. In such a row, all values except o = 0 and lse = -∞ have infinite error.
#[derive(Clone, Debug)]
#[must_use = "a comparison proves nothing until it is held to a limit"]
pub struct Comparison {
    /// Rows compared.
    pub rows: usize,
    /// The largest error of o.
    pub max_abs_error: f64,
    /// The place of this error. `None` if all of o is equal.
    pub worst: Option<Worst>,
    /// Root mean square of the error of o.
    pub rms_error: f64,
    /// Rows whose slack is a large part of their o: they prove nothing, and are no part of the
    /// signal.
    pub unproved: usize,
    /// Root mean square of the right o, over the other rows that see a key.
    pub rms_signal: f64,
    /// Frobenius norm of the error of o relative to the norm of the right o.
    pub relative_error: f64,
    /// The largest magnitude in the right o.
    pub max_abs_o: f64,
    /// The largest error of the log-sum-exp.
    pub max_lse_error: f64,
    /// The place of this error. `None` if all are equal.
    pub worst_lse: Option<Worst>,
    /// The largest finite magnitude among the right log-sum-exps.
    pub max_abs_lse: f64,
    /// The number of values of o and lse with infinite error.
    pub mismatched_nonfinite: usize,
    /// The number of finite values of the right o, in the rows that see a key and prove something.
    /// The norms are over these values.
    pub finite_values: usize,
    /// The output's storage type.
    pub dtype: Dtype,
    problem: String,
    context: Context,
}

/// Compares whole outputs with the oracle's rows: `o` `[batch, q_len, q_heads, head_dim]` and `lse`
/// `[batch, q_heads, q_len]`, both in linear order. Only the rows in `expected` are compared.
///
/// Panics if the length of an output does not match the problem.
pub fn compare<'a>(
    problem: &OracleProblem,
    o: Values<'_>,
    lse: Values<'_>,
    expected: impl Into<Expected<'a>>,
    context: &Context,
) -> Comparison {
    let expected = expected.into();
    assert_eq!(o.len(), problem.q_shape().iter().product::<usize>(), "elements of o for {problem}");
    assert_eq!(lse.len(), problem.lse_shape().iter().product::<usize>(), "elements of lse for {problem}");
    let actual: Vec<Row> = expected
        .rows
        .iter()
        .map(|row| {
            let mut vector = vec![0.0; problem.head_dim];
            o.read_into(problem.o_index(row.id), &mut vector);
            Row { id: row.id, o: vector, lse: lse.get(problem.lse_index(row.id)) }
        })
        .collect();
    compare_rows(problem, o.dtype(), &actual, expected, context)
}

/// Compares rows with the oracle's rows, one by one in the same order. `dtype` is the storage type
/// of the rows' o.
///
/// Panics if the two lists do not name the same rows.
pub fn compare_rows<'a>(
    problem: &OracleProblem,
    dtype: Dtype,
    actual: &[Row],
    expected: impl Into<Expected<'a>>,
    context: &Context,
) -> Comparison {
    let Expected { rows: expected, slack: slacks } = expected.into();
    assert!(slacks.is_empty() || slacks.len() == expected.len(), "the slack of every row, or none");
    assert_eq!(actual.len(), expected.len(), "rows to compare");
    let mut comparison = Comparison {
        rows: expected.len(),
        max_abs_error: 0.0,
        worst: None,
        rms_error: 0.0,
        unproved: 0,
        rms_signal: 0.0,
        relative_error: 0.0,
        max_abs_o: 0.0,
        max_lse_error: 0.0,
        worst_lse: None,
        max_abs_lse: 0.0,
        mismatched_nonfinite: 0,
        finite_values: 0,
        dtype,
        problem: problem.to_string(),
        context: context.clone(),
    };
    let (mut squared_error, mut squared_signal) = (0.0, 0.0);
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        assert_eq!(actual.id, expected.id, "the same row on both sides");
        assert_eq!(actual.o.len(), expected.o.len(), "the same vector length on both sides");
        let slack = slacks.get(index);
        let sees_a_key = sees_a_key(problem, expected);
        let proves = slack.is_none_or(|slack| norm(&slack.o) <= SIGNAL_FRACTION * norm(&expected.o));
        comparison.unproved += usize::from(!proves);
        for (dim, (&a, &e)) in actual.o.iter().zip(&expected.o).enumerate() {
            // 0 is the definition here and not a computed result. Any deviation means that state has leaked
            // into the row.
            let error = if sees_a_key || a == 0.0 { distance(a, e) } else { f64::INFINITY };
            let error = beyond(error, slack.map_or(0.0, |slack| counted(slack.o[dim], 1.0)));
            comparison.note(expected.id, Some(dim), a, e, error);
            squared_error += error * error;
            if sees_a_key && proves && e.is_finite() {
                squared_signal += e * e;
                comparison.finite_values += 1;
                comparison.max_abs_o = comparison.max_abs_o.max(e.abs());
            }
        }
        let error = distance(actual.lse, expected.lse);
        let error = beyond(error, slack.map_or(0.0, |slack| counted(slack.lse, 1.0)));
        comparison.note(expected.id, None, actual.lse, expected.lse, error);
        if expected.lse.is_finite() {
            comparison.max_abs_lse = comparison.max_abs_lse.max(expected.lse.abs());
        }
    }
    let values = comparison.finite_values.max(1) as f64;
    comparison.rms_signal = (squared_signal / values).sqrt();
    comparison.rms_error = (squared_error / values).sqrt();
    if comparison.rms_error > 0.0 {
        comparison.relative_error = comparison.rms_error / comparison.rms_signal;
    }
    comparison
}

/// Whether the right row sees a key: its log-sum-exp is over more than the sink of its head, if
/// there is one.
fn sees_a_key(problem: &OracleProblem, row: &Row) -> bool {
    let nothing = problem.sinks.get(row.id.head).copied().unwrap_or(f64::NEG_INFINITY);
    row.lse != nothing && row.lse != f64::NEG_INFINITY || row.o.iter().any(|o| *o != 0.0)
}

/// The norm of the finite numbers.
fn norm(numbers: &[f64]) -> f64 {
    numbers.iter().filter(|number| number.is_finite()).map(|number| number * number).sum::<f64>().sqrt()
}

pub(super) fn distance(actual: f64, expected: f64) -> f64 {
    if actual == expected || actual.is_nan() && expected.is_nan() {
        0.0
    } else if actual.is_finite() && expected.is_finite() {
        (actual - expected).abs()
    } else {
        f64::INFINITY
    }
}

/// The part of an error that the slack does not explain.
pub(super) fn beyond(error: f64, slack: f64) -> f64 {
    (error - slack).max(0.0)
}

impl Comparison {
    /// Whether this comparison is within the limit. Refuses a limit that is too wide to find a
    /// wrong answer.
    pub fn within(&self, limit: &Limit) -> Result<(), Box<Failure>> {
        if let Some(vacuous) = limit.vacuous_for(self) {
            return Err(self.failure(Cause::Vacuous(vacuous), limit));
        }
        let o = self.max_abs_error <= limit.o_abs() && self.relative_error <= limit.o_relative();
        if self.mismatched_nonfinite == 0 && o && self.max_lse_error <= limit.lse_abs() {
            return Ok(());
        }
        Err(self.failure(Cause::Exceeded, limit))
    }

    /// Panics with all details unless [`Comparison::within`] the limit.
    #[track_caller]
    pub fn assert_within(&self, limit: &Limit) {
        if let Err(failure) = self.within(limit) {
            panic!("{failure}");
        }
    }

    fn failure(&self, cause: Cause, limit: &Limit) -> Box<Failure> {
        Box::new(Failure { cause, limit: *limit, comparison: self.clone() })
    }

    fn note(&mut self, at: RowId, dim: Option<usize>, actual: f64, expected: f64, error: f64) {
        if error.is_infinite() {
            self.mismatched_nonfinite += 1;
        }
        let (dtype, max, worst) = match dim {
            Some(_) => (self.dtype, &mut self.max_abs_error, &mut self.worst),
            None => (Dtype::F32, &mut self.max_lse_error, &mut self.worst_lse),
        };
        if error > *max {
            *max = error;
            *worst = Some(Worst { at, dim, actual, expected, error, ulps: dtype.ulps(actual, expected) });
        }
    }
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RowId { batch, row, head } = self.at;
        write!(f, "{:.3e} at batch {batch}, row {row}, head {head}", self.error)?;
        if let Some(dim) = self.dim {
            write!(f, ", dim {dim}")?;
        }
        write!(f, ": got {:?}, expected {:?}", self.actual, self.expected)?;
        match self.ulps {
            Some(ulps) => write!(f, " ({ulps} ulp)"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let worst = |worst: &Option<Worst>| worst.map_or("none".to_owned(), |worst| worst.to_string());
        writeln!(f, "  o   error {}", worst(&self.worst))?;
        writeln!(f, "  lse error {}", worst(&self.worst_lse))?;
        writeln!(
            f,
            "  {} rows of {}, {} prove nothing: rms error {:.3e}, rms signal {:.3e}, relative {:.3e}; infinite errors: {}",
            self.rows,
            self.dtype,
            self.unproved,
            self.rms_error,
            self.rms_signal,
            self.relative_error,
            self.mismatched_nonfinite
        )?;
        writeln!(f, "  problem: {}", self.problem)?;
        let Context { case, seed, backend, rerun } = &self.context;
        writeln!(f, "  case: {case}, seed {seed}, backend: {backend}")?;
        write!(f, "  rerun: {rerun}")
    }
}

/// The reason why an answer is not accepted. Its `Display` has all details for an investigation.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The cause of the failure: the answer or the limit.
    pub cause: Cause,
    /// The limit of the comparison.
    pub limit: Limit,
    /// The measured errors.
    pub comparison: Comparison,
}

/// The cause of the failure: the answer or the limit.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Cause {
    /// The distance from the oracle's answer exceeds the limit.
    Exceeded,
    /// The limit is so wide that it proves nothing.
    Vacuous(Vacuous),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            Cause::Exceeded => f.write_str("the answer is wrong")?,
            Cause::Vacuous(vacuous) => write!(f, "the limit proves nothing: {vacuous}")?,
        }
        write!(f, "\n  limit: {}\n{}", self.limit, self.comparison)
    }
}

impl std::error::Error for Failure {}
