//! The format of keys and values that are sent between shards.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// The format of keys and values that are sent between shards.
///
/// Every format except [`Self::Same`] limits the accuracy of a result: the owner rounds its keys
/// and values once, and other shards get the rounded ones, which are not rounded again.
#[derive(Default, Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WireFormat {
    /// The tensors' own type.
    #[default]
    Same,
    /// f16, for f32 tensors: magnitudes up to 65,504, in steps of 2⁻²⁴ below 2⁻¹⁴. A call with a
    /// finite element of at least 65,520, which would become infinite, is an error of all
    /// ranks.
    F16,
    /// 8-bit codes, for tensors of any type. Keys have an f32 scale for each (batch entry, KV head,
    /// channel) and [`TOKENS_PER_SCALE`] tokens of the list that travels together, values one
    /// for each (batch entry, token, KV head). A scale is the largest finite magnitude over
    /// 127, a code the element over its scale, rounded to nearest, ties to even; so the range
    /// is that of f32, and elements below 1/254 of the largest that shares their scale become 0;
    /// a subnormal scale counts as 0. The code −128 stands for a value that is not finite, and is
    /// read as NaN.
    Int8,
}

/// Tokens of one channel of the keys that share a scale in [`WireFormat::Int8`].
pub const TOKENS_PER_SCALE: usize = 64;

impl WireFormat {
    /// All of them, for tests and help texts.
    pub const ALL: [Self; 3] = [Self::Same, Self::F16, Self::Int8];

    /// The name used on the command line, in reports and in plan hashes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::F16 => "f16",
            Self::Int8 => "int8",
        }
    }

    /// Whether keys and values are rounded.
    pub fn rounds(self) -> bool {
        self != Self::Same
    }

    /// The error that this format is expected to cause: the L2 norm of the output's error relative
    /// to that of the output, for heads of `head_dim` elements and the factor `scale` on q·k.
    ///
    /// Rounding is independent noise for each element, ε times the rms of the rounded tensor. To
    /// first order, noise in the values is the same relative noise in the output. Noise in the
    /// keys is multiplied by the spread of the logits, because it changes the weights of values
    /// that are as random as the output itself: ε·√(1 + spread²).
    ///
    /// Assumes that q, k and v are normal, independent, and of variance 1, so that logits spread by
    /// scale·√dim; that every key comes from another shard (a rank's own keys are not rounded,
    /// so a share f of foreign keys has √f of this error); that rows see many keys; and no
    /// softcap, which only makes the error smaller. Data with a few much larger channels of the
    /// keys has a larger error: channels share no scale, but those channels spread the logits.
    pub fn expected_error(self, head_dim: u32, scale: f32) -> f64 {
        let (keys, values) = match self {
            Self::Same => return 0.0,
            // Uniform noise over a step of 2^-10 times the power of two below a number; the mean square of
            // that power is 0.542.
            Self::F16 => [(0.542_f64 / 12.0).sqrt() / 1024.0; 2].into(),
            Self::Int8 => {
                // Uniform noise over a step of largest / 127.
                let noise = |together: usize| (mean_largest_square(together) / 12.0).sqrt() / 127.0;
                (noise(TOKENS_PER_SCALE), noise(head_dim as usize))
            }
        };
        let spread = f64::from(scale) * f64::from(head_dim).sqrt();
        values.hypot(keys * spread)
    }
}

/// Mean of the largest square among `count` standard normal numbers: ∫ 2t·(1 − P(|x| < t)ⁿ) dt.
fn mean_largest_square(count: usize) -> f64 {
    const STEP: f64 = 1.0 / 256.0;
    let density = |t: f64| (-t * t / 2.0).exp() * (2.0 / std::f64::consts::PI).sqrt();
    let power = i32::try_from(count).unwrap_or(i32::MAX);
    let (mut below, mut sum) = (0.0, 0.0);
    for step in 0..2560 {
        let t = (f64::from(step) + 0.5) * STEP;
        let inside: f64 = below + density(t - STEP / 4.0) * STEP / 2.0;
        sum += 2.0 * t * (1.0 - inside.min(1.0).powi(power)) * STEP;
        below += density(t) * STEP;
    }
    sum
}

impl fmt::Display for WireFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WireFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or_else(|| {
            Error::request(format!("`{text}` on the wire is not known"), "use same, f16 or int8")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_square_of_one_normal_number_is_its_variance_and_grows_with_how_many_there_are() {
        assert!((mean_largest_square(1) - 1.0).abs() < 1e-4);
        // For two numbers: E max(x², y²) = 1 + 2/π.
        assert!((mean_largest_square(2) - (1.0 + 2.0 / std::f64::consts::PI)).abs() < 1e-4);
        let growing: Vec<f64> = [8, 64, 128, 512].map(mean_largest_square).to_vec();
        assert!(growing.is_sorted() && growing[1] > 6.0 && growing[1] < 8.0, "{growing:?}");
    }
}
