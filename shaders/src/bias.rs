//! The attention bias tensor: over (query, key) pairs; it hides keys or is added to logits.

use crate::Storage;
use crate::text::Text;

/// Which mask or bias tensor a kernel reads, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BiasInput {
    /// Nothing.
    #[default]
    None,
    /// A bit: bit `k % 32` of word `k / 32` of a row is 0 where the row does not see the key at
    /// position k.
    Visible,
    /// A number in the storage type of q, k and v, added to the logit; −∞ hides the key.
    Bias,
}

impl BiasInput {
    /// Whether the kernel reads a tensor.
    pub const fn any(self) -> bool {
        !matches!(self, Self::None)
    }

    /// Part of a kernel's name.
    pub(crate) const fn suffix(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Visible => "-visible",
            Self::Bias => "-bias",
        }
    }

    /// `HIDDEN`, and `bias_term(row, position)`: the term of the row that starts at `row` of the
    /// binding, for its base-2 logit of the key at `position`; or `HIDDEN`. `HIDDEN` itself
    /// must never be added.
    pub(crate) fn functions(self, storage: Storage) -> String {
        let mut t = Text::default();
        match self {
            Self::None => return String::new(),
            Self::Visible => {
                t.line(HIDDEN);
                t.block("fn bias_term(row: u32, position: u32) -> f32", |t| {
                    t.line("let bit = (bias[row + (position >> 5u)] >> (position & 31u)) & 1u;");
                    t.line("return select(HIDDEN, 0.0f, bit == 1u);");
                });
            }
            Self::Bias => {
                t.line(HIDDEN);
                t.block("fn bias_term(row: u32, position: u32) -> f32", |t| {
                    match storage {
                        Storage::F32 => t.lines(
                            "let bits = bias[row + position];
let bias = bitcast<f32>(bits);
let hidden = bits == 0xff800000u;",
                        ),
                        Storage::F16 => t.lines(
                            "let word = bias[(row + position) >> 1u];
let bits = (word >> (((row + position) & 1u) * 16u)) & 0xffffu;
let bias = unpack2x16float(bits).x;
let hidden = bits == 0xfc00u;",
                        ),
                        Storage::Bf16 => t.lines(
                            "let word = bias[(row + position) >> 1u];
let bits = (word >> (((row + position) & 1u) * 16u)) << 16u;
let bias = bitcast<f32>(bits);
let hidden = bits == 0xff800000u;",
                        ),
                    }
                    t.line("// `max` may drop a NaN, so NaN goes around; logits stay above that of a row that saw no key.");
                    t.line("let is_nan = (bitcast<u32>(bias) & 0x7fffffffu) > 0x7f800000u;");
                    t.line("let kept = select(max(bias, -1e38f), bias, is_nan);");
                    t.line("return select(kept, HIDDEN, hidden);");
                });
            }
        }
        t.finish()
    }
}

/// Below every logit with a bias, and finite, because WGSL promises nothing about infinities.
const HIDDEN: &str = "const HIDDEN: f32 = -3e38f;
// By bits, so that NaN is shown: SPIR-V from naga has `!=` false for NaN.
fn shows(term: f32) -> bool { return bitcast<u32>(term) != 0xff61b1e6u; }";
