//! The limits of the errors of an answer. No other module computes a tolerance.
//!
//! # The rule
//!
//! All errors are against the f64 oracle on inputs that are already rounded to the storage type. An
//! error is what exceeds the slack of its element: how far a right result may be off because f32
//! rounds the logits ([`RowSlack`]).
//!
//! | result | compared with | limit of `max abs error` |
//! |---|---|---|
//! | a parallel result | the same problem on one device | `2 · E_dense + a` |
//! | a single-device kernel | f32 arithmetic without any care | `2 · E_naive + rounding of the output + a` |
//! | rows without an oracle (too expensive) | f32 on the same device | the same, plus the error of that f32 elsewhere |
//!
//! with `a` = 1e-6 for f32 and 2e-3 for f16 and bf16, for any number of ranks. Errors are measured
//! and not predicted, because they depend on length, head dimension and size of the scores. The
//! factor 2 allows for another order of the same sums.
//!
//! **lse** is f32 for every storage type, computed from f32 scores. So its `a` is always 1e-6, plus
//! one f32 spacing at the largest |lse|. From 16 on, 1e-6 alone is less than half a spacing, and a
//! difference in the last bit is not a fault.
//!
//! # The relative norm
//!
//! The largest error alone is a weak bound if the output is small. The attention of n normal keys
//! and values is about √(e/n), and at 64k keys `a` = 2e-3 is a third of it. So the Frobenius norm
//! of the error relative to the norm of the answer is also bounded, in the same form:
//! `2 · R_dense + a`, and `2 · R_naive + u + a` for a kernel. u is the unit roundoff of the output
//! type.
//!
//! Acceptance rules often have a flat 1e-6 for f32. This is right for some kernels, but not as a
//! general rule. One accumulator rounds at each of n steps. The sum of these errors is about half
//! of u·√n relative to the sum, u = 2⁻²⁴. Tiles reduce √n to about √(tile + n/tile). Where values
//! have one sign, the error of one accumulator even grows with n: 6e-3 at 4 million keys. So plain
//! f32 arithmetic sums 1024 keys at a time here. Measured by this module's tests, scores of order
//! one:
//!
//! | keys | 64 | 1 024 | 16 384 | 131 072 |
//! |---|---|---|---|---|
//! | one accumulator | 3.3e-7 | 1.2e-6 | 3.4e-6 | 1.3e-5 |
//! | tiles of 64 keys | 3.3e-7 | 2.5e-7 | 4.1e-7 | 8.8e-7 |
//!
//! Scores of size s have an error of about u·s themselves, and the weights inherit it. At thirty
//! times the usual scale, 64 keys already give 2.3e-6 (head dim 256). More careful sums do not
//! remove this error; the slack allows for it. For bf16 the rounding of the output alone has a
//! relative norm of 1.7e-3. So a flat 2e-3 would allow almost no error for a kernel that also
//! rounds its weights. For these reasons 1e-6 and 2e-3 are only the additive part.
//!
//! # Limitations
//!
//! A limit above half the rms of the answer is refused as [`Cause::Vacuous`], because wrong values
//! of the right size would pass. For f16 and bf16 with normal inputs this occurs somewhat beyond
//! 10⁵ visible keys. Neither bound finds a fault that is smaller than the bound. So each feature
//! needs inputs that show it, and [`discriminates`] checks them.

mod comparison;
mod gradients;
mod naive;
mod slack;

use std::fmt;

pub use comparison::{Cause, Comparison, Context, Expected, Failure, Worst, compare, compare_rows};
pub use gradients::{GradientComparison, GradientLimit, NaiveGradients, naive_f32_gradients};
pub use naive::naive_f32_rows;
pub use slack::{RowSlack, row_slacks};

use crate::oracle::Dtype;

/// `a`: the addition to a measured error.
const fn additive(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 1e-6,
        Dtype::F16 | Dtype::Bf16 => 2e-3,
    }
}

/// The minimum error of an answer without the feature, in tolerances.
const fn control_factor(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 100.0,
        Dtype::F16 | Dtype::Bf16 => 10.0,
    }
}

/// The largest limit, as a part of the signal. A larger limit would accept a different answer.
const SIGNAL_FRACTION: f64 = 0.5;

/// lse is a logarithm. 0.01 is one per cent of the total weight. No sum in f32 of logits up to 10⁴
/// has an error of this size.
const LSE_CEILING: f64 = 0.01;

/// Larger logits have larger roundings: a sum of products in f32, of numbers several times as
/// large, is off by some spacings.
fn lse_ceiling(max_abs_lse: f64) -> f64 {
    LSE_CEILING.max(32.0 * Dtype::F32.unit_roundoff() * max_abs_lse)
}

/// With 8-bit keys a logit of order one has an error of about 0.006. A row of one key shows this
/// error. Of some thousand such rows, the worst has four times this error, and a limit is twice the
/// worst error.
const COARSE_LSE_CEILING: f64 = 0.1;

/// The bounds for an answer. Only the rules of this module make them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    o_abs: f64,
    o_relative: f64,
    lse_abs: f64,
    lse_ceiling: f64,
    rule: &'static str,
}

impl Limit {
    /// The limit of a parallel result. Several devices have also computed its rows alone, and each
    /// is compared with the same oracle rows. The limit is twice the worst of their errors,
    /// plus `a`.
    ///
    /// Panics without a dense comparison.
    pub fn parallel(dtype: Dtype, dense: &[&Comparison]) -> Self {
        assert!(!dense.is_empty(), "a parallel result is held to at least one single-device result");
        let largest = |of: fn(&Comparison) -> f64| dense.iter().map(|&c| of(c)).fold(0.0, f64::max);
        Self {
            o_abs: 2.0 * largest(|c| c.max_abs_error) + additive(dtype),
            o_relative: 2.0 * largest(|c| c.relative_error) + additive(dtype),
            lse_abs: lse_limit(largest(|c| c.max_lse_error), largest(|c| c.max_abs_lse)),
            lse_ceiling: lse_ceiling(largest(|c| c.max_abs_lse)),
            rule: "2 x single device + a",
        }
    }

    /// This limit for 8-bit keys: a larger measured error is still accepted as a meaningful limit.
    pub fn of_coarse_keys(self) -> Self {
        Self { lse_ceiling: self.lse_ceiling.max(COARSE_LSE_CEILING), ..self }
    }

    /// The limit of a single-device kernel that stores its output as `dtype`, from the comparison
    /// of [`naive_f32_rows`] with the oracle on the same rows.
    pub fn dense(dtype: Dtype, naive: &Comparison) -> Self {
        let u = dtype.unit_roundoff();
        Self {
            o_abs: 2.0 * naive.max_abs_error + u * naive.max_abs_o + additive(dtype),
            o_relative: 2.0 * naive.relative_error + u + additive(dtype),
            lse_abs: lse_limit(naive.max_lse_error, naive.max_abs_lse),
            lse_ceiling: lse_ceiling(naive.max_abs_lse),
            rule: "2 x naive f32 + rounding of the output + a",
        }
    }

    /// This limit for kernels whose log-sum-exp may have this error beside that of f32 arithmetic.
    pub fn with_log_sum_exp_error(self, error: f64) -> Self {
        Self { lse_abs: self.lse_abs + error, ..self }
    }

    /// This limit for kernels that round the output of each block of keys, by the part `error` of
    /// its size. Weights of blocks sum to one, so it is no more in the whole output.
    pub fn with_rounded_blocks(self, error: f64, max_abs_o: f64) -> Self {
        Self { o_abs: self.o_abs + error * max_abs_o, o_relative: self.o_relative + error, ..self }
    }

    /// The limit of rows without an oracle. `rows` compares them with the f32 result of the same
    /// device. The errors come from rows with an oracle: the error of plain f32 arithmetic
    /// (`naive`) and the error of the device's f32 result (`wide`), which may be wrong itself.
    /// The magnitudes come from `rows`. If magnitudes decrease over the rows, as under a causal
    /// mask, compare the rows in bands of similar magnitude.
    pub fn beside(dtype: Dtype, naive: &Comparison, wide: &Comparison, rows: &Comparison) -> Self {
        let u = dtype.unit_roundoff();
        Self {
            o_abs: 2.0 * naive.max_abs_error + wide.max_abs_error + u * rows.max_abs_o + additive(dtype),
            o_relative: 2.0 * naive.relative_error + wide.relative_error + u + additive(dtype),
            lse_abs: lse_limit(naive.max_lse_error, rows.max_abs_lse) + wide.max_lse_error,
            lse_ceiling: lse_ceiling(rows.max_abs_lse),
            rule: "2 x naive f32 + f32 on the device + rounding of the output + a",
        }
    }

    /// The largest accepted error of o.
    pub fn o_abs(&self) -> f64 {
        self.o_abs
    }

    /// The largest accepted Frobenius norm of the error of o, relative to the norm of the answer.
    pub fn o_relative(&self) -> f64 {
        self.o_relative
    }

    /// The largest accepted error of a log-sum-exp.
    pub fn lse_abs(&self) -> f64 {
        self.lse_abs
    }

    /// The reason why this limit proves nothing about the compared answer. `None` if it proves
    /// something.
    fn vacuous_for(&self, comparison: &Comparison) -> Option<Vacuous> {
        let signal = comparison.rms_signal;
        if comparison.unproved > 0 && comparison.finite_values == 0 {
            return Some(Vacuous::Ties { rows: comparison.unproved });
        }
        // Rows without a visible key, and NaN, are always exact. If there are no other values, no limit is
        // used.
        if comparison.finite_values > 0 && self.o_abs > SIGNAL_FRACTION * signal {
            return Some(Vacuous::Output { limit: self.o_abs, rms_signal: signal });
        }
        if self.o_relative > SIGNAL_FRACTION {
            return Some(Vacuous::Relative { limit: self.o_relative });
        }
        (self.lse_abs > self.lse_ceiling).then_some(Vacuous::Lse { limit: self.lse_abs })
    }
}

fn lse_limit(reference_error: f64, max_abs_lse: f64) -> f64 {
    2.0 * reference_error + additive(Dtype::F32) + 2.0 * Dtype::F32.unit_roundoff() * max_abs_lse
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { o_abs, o_relative, lse_abs, rule, .. } = self;
        write!(f, "o {o_abs:.3e}, relative {o_relative:.3e}, lse {lse_abs:.3e} ({rule})")
    }
}

/// A limit that is too wide to separate right answers from wrong answers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Vacuous {
    /// In every row, logits tie within their rounding, so that the right output is not defined in
    /// f32.
    Ties {
        /// How many rows.
        rows: usize,
    },
    /// The limit of o is more than half the rms of the answer.
    Output {
        /// The limit.
        limit: f64,
        /// The rms of the right answer.
        rms_signal: f64,
    },
    /// The limit of the relative norm is more than a half.
    Relative {
        /// The limit.
        limit: f64,
    },
    /// The limit of the log-sum-exp allows more than one per cent of the weight.
    Lse {
        /// The limit.
        limit: f64,
    },
}

impl fmt::Display for Vacuous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ties { rows } => {
                write!(
                    f,
                    "in each of {rows} rows, large logits tie within their rounding in f32; take a smaller scale"
                )
            }
            Self::Output { limit, rms_signal } => write!(
                f,
                "{limit:.3e} for o, whose rms is {rms_signal:.3e}; take fewer visible keys, larger values or f32"
            ),
            Self::Relative { limit } => {
                write!(
                    f,
                    "{limit:.3e} for the relative norm of o; the result it derives from is wrong itself"
                )
            }
            Self::Lse { limit } => {
                write!(f, "{limit:.3e} for lse; the result it derives from is wrong itself")
            }
        }
    }
}

/// The negative-control rule. Without the feature, the error must be more than 100 times (f16,
/// bf16: 10 times) the tolerance `2 · with_feature_error + a`. Otherwise the inputs cannot show the
/// feature.
///
/// Errors are `max_abs_error` of two comparisons with the same oracle rows. Returns the error
/// divided by the tolerance, or ∞ if NaN shows the feature.
pub fn discriminates(
    with_feature_error: f64,
    without_feature_error: f64,
    dtype: Dtype,
) -> Result<f64, Indistinct> {
    let tolerance = 2.0 * with_feature_error + additive(dtype);
    let ratio = without_feature_error / tolerance;
    let required = control_factor(dtype);
    // This form of the condition does not accept a NaN or an infinite tolerance.
    if tolerance.is_finite() && ratio > required {
        Ok(ratio)
    } else {
        Err(Indistinct { ratio, required, tolerance })
    }
}

/// The inputs do not show the feature under test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Indistinct {
    /// Error without the feature, in tolerances.
    pub ratio: f64,
    /// The ratio must exceed this number.
    pub required: f64,
    /// The tolerance.
    pub tolerance: f64,
}

impl fmt::Display for Indistinct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ratio, required, tolerance } = self;
        write!(
            f,
            "without the feature the error is {ratio:.3} x the tolerance {tolerance:.3e}, not more than {required} x: \
             take inputs that depend on it"
        )
    }
}

impl std::error::Error for Indistinct {}

#[cfg(test)]
mod tests;
