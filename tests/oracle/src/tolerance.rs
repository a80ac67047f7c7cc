//! How wrong an answer may be. No tolerance is computed anywhere else.
//!
//! # The rule
//!
//! All errors are against the f64 oracle on inputs that are already rounded to the storage type.
//!
//! | what is held | to | limit of `max abs error` |
//! |---|---|---|
//! | a parallel result | the same problem on one device | `2 · E_dense + a` |
//! | a single-device kernel | f32 arithmetic without any care | `2 · E_naive + rounding of the output + a` |
//! | rows that the oracle has no time for | f32 on the same device | the same, plus what that is off elsewhere |
//!
//! with `a` = 1e-6 for f32 and 2e-3 for f16 and bf16, at any world size. Errors are measured and not predicted,
//! because they depend on length, head dimension and size of the scores; the factor 2 is for another order of the
//! same sums.
//!
//! **lse** is f32 whatever the storage type, computed from f32 scores, so its `a` is always 1e-6, plus one f32
//! spacing at the largest |lse|: from 16 on, 1e-6 alone is less than half a spacing, and an unlucky last bit is no
//! fault.
//!
//! # The relative norm
//!
//! The largest error alone is weak where the output is small: the attention of n normal keys and values is about
//! √(e/n), and at 64k keys `a` = 2e-3 is a third of it. So the Frobenius norm of the error relative to that of the
//! answer is bounded as well, in the same form: `2 · R_dense + a`, and `2 · R_naive + u + a` for a kernel, where u
//! is the unit roundoff of the output type.
//!
//! A flat 1e-6 for f32, as acceptance rules tend to have it, is right for some kernels and wrong as a law. One
//! accumulator rounds at every one of n steps, which adds up to about half of u·√n relative to the sum, u = 2⁻²⁴;
//! tiles bring √n down to about √(tile + n/tile). Measured by this module's tests, scores of order one:
//!
//! | keys | 64 | 1 024 | 16 384 | 131 072 |
//! |---|---|---|---|---|
//! | one accumulator | 3.3e-7 | 1.2e-6 | 3.4e-6 | 1.3e-5 |
//! | tiles of 64 keys | 3.3e-7 | 2.5e-7 | 4.1e-7 | 8.8e-7 |
//!
//! Scores of size s are themselves wrong by about u·s, which goes into the weights: at thirty times the usual
//! scale 64 keys already give 2.3e-6 (head dim 256), and no care in summing repairs that. For bf16 the rounding of
//! the output alone has a relative norm of 1.7e-3, so that a flat 2e-3 would leave next to nothing for a kernel
//! that also rounds its weights. Hence 1e-6 and 2e-3 are only the additive part.
//!
//! # What this cannot see
//!
//! A limit above half the rms of the answer is refused as [`Cause::Vacuous`]: garbage of the right size would pass.
//! f16 and bf16 with normal inputs get there somewhat beyond 10⁵ visible keys. Neither bound sees a fault below it; each
//! feature therefore needs inputs made to show it, and [`discriminates`] says whether they do.

mod comparison;
mod naive;

use std::fmt;

pub use comparison::{Cause, Comparison, Context, Failure, Worst, compare, compare_rows};
pub use naive::naive_f32_rows;

use crate::oracle::Dtype;

/// `a`: what is allowed on top of a measured error.
const fn additive(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 1e-6,
        Dtype::F16 | Dtype::Bf16 => 2e-3,
    }
}

/// How far beyond the tolerance an answer must be once the feature is taken out.
const fn control_factor(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 100.0,
        Dtype::F16 | Dtype::Bf16 => 10.0,
    }
}

/// An error as large as this part of the signal is no longer an error but another answer.
const SIGNAL_FRACTION: f64 = 0.5;

/// lse is a logarithm: 0.01 is one per cent of the total weight, more than any sum in f32 loses.
const LSE_CEILING: f64 = 0.01;

/// Keys of 8 bits make a logit of order one wrong by about 0.006, which is what a row of one key shows: of some thousand such
/// rows the worst is at four times that, and a limit at twice the worst.
const COARSE_LSE_CEILING: f64 = 0.1;

/// The bounds an answer is held to. Made only by the rules of this module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    o_abs: f64,
    o_relative: f64,
    lse_abs: f64,
    lse_ceiling: f64,
    rule: &'static str,
}

impl Limit {
    /// The limit of a parallel result whose rows several devices have also computed alone, each compared with
    /// the same oracle rows: twice the worst of them, plus `a`.
    ///
    /// Panics without a dense comparison.
    pub fn parallel(dtype: Dtype, dense: &[&Comparison]) -> Self {
        assert!(!dense.is_empty(), "a parallel result is held to at least one single-device result");
        let largest = |of: fn(&Comparison) -> f64| dense.iter().map(|&c| of(c)).fold(0.0, f64::max);
        Self {
            o_abs: 2.0 * largest(|c| c.max_abs_error) + additive(dtype),
            o_relative: 2.0 * largest(|c| c.relative_error) + additive(dtype),
            lse_abs: lse_limit(largest(|c| c.max_lse_error), largest(|c| c.max_abs_lse)),
            lse_ceiling: LSE_CEILING,
            rule: "2 x single device + a",
        }
    }

    /// This limit for 8-bit keys: a larger measured error is still accepted as a meaningful limit.
    pub fn of_coarse_keys(self) -> Self {
        Self { lse_ceiling: COARSE_LSE_CEILING, ..self }
    }

    /// The limit of a single-device kernel that stores its output as `dtype`, from the comparison of
    /// [`naive_f32_rows`] with the oracle on the same rows.
    pub fn dense(dtype: Dtype, naive: &Comparison) -> Self {
        let u = dtype.unit_roundoff();
        Self {
            o_abs: 2.0 * naive.max_abs_error + u * naive.max_abs_o + additive(dtype),
            o_relative: 2.0 * naive.relative_error + u + additive(dtype),
            lse_abs: lse_limit(naive.max_lse_error, naive.max_abs_lse),
            lse_ceiling: LSE_CEILING,
            rule: "2 x naive f32 + rounding of the output + a",
        }
    }

    /// The limit of rows for which there is no oracle: `rows` compares them with what the same device computed in f32. Errors
    /// are those of the rows for which there is one, of plain f32 arithmetic (`naive`) and of the device's (`wide`), which may
    /// be wrong itself; magnitudes are those of `rows`. Where they fall, as they do along a causal mask, rows are best held in
    /// bands of similar ones.
    pub fn beside(dtype: Dtype, naive: &Comparison, wide: &Comparison, rows: &Comparison) -> Self {
        let u = dtype.unit_roundoff();
        Self {
            o_abs: 2.0 * naive.max_abs_error + wide.max_abs_error + u * rows.max_abs_o + additive(dtype),
            o_relative: 2.0 * naive.relative_error + wide.relative_error + u + additive(dtype),
            lse_abs: lse_limit(naive.max_lse_error, rows.max_abs_lse) + wide.max_lse_error,
            lse_ceiling: LSE_CEILING,
            rule: "2 x naive f32 + f32 on the device + rounding of the output + a",
        }
    }

    /// The largest error of o that is accepted.
    pub fn o_abs(&self) -> f64 {
        self.o_abs
    }

    /// The largest Frobenius norm of the error of o that is accepted, relative to that of the answer.
    pub fn o_relative(&self) -> f64 {
        self.o_relative
    }

    /// The largest error of a log-sum-exp that is accepted.
    pub fn lse_abs(&self) -> f64 {
        self.lse_abs
    }

    /// Why passing this limit would mean nothing on the answer compared, if so.
    fn vacuous_for(&self, comparison: &Comparison) -> Option<Vacuous> {
        let signal = comparison.rms_signal;
        // Rows that see no key, and NaN, are exact in any case; where there is nothing else no limit is used.
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

/// A limit too wide to tell right from wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Vacuous {
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

/// The negative-control rule: with the feature taken out, the error must be more than 100 times (f16, bf16: 10
/// times) the tolerance `2 · with_feature_error + a`, or the inputs cannot show the feature.
///
/// Errors are `max_abs_error` of two comparisons with the same oracle rows. Returns how many times the tolerance
/// the error is; ∞ where NaN shows it.
pub fn discriminates(
    with_feature_error: f64,
    without_feature_error: f64,
    dtype: Dtype,
) -> Result<f64, Indistinct> {
    let tolerance = 2.0 * with_feature_error + additive(dtype);
    let ratio = without_feature_error / tolerance;
    let required = control_factor(dtype);
    // Written so that a NaN or an infinite tolerance is not accepted.
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
    /// What it must exceed.
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
