//! The attention bias tensor: over (query, key) pairs; it hides keys or is added to logits.

use minijinja::value::Value;

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

    /// In templates: what it is, or false.
    pub(crate) fn value(self) -> Value {
        match self {
            Self::None => Value::from(false),
            Self::Visible => Value::from("visible"),
            Self::Bias => Value::from("bias"),
        }
    }
}
