//! The passes of a combination.

/// What of a combination is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Pass {
    /// Attention.
    Forward,
    /// Attention, and then the gradients, which are compared.
    Backward,
}

impl Pass {
    pub(crate) const ALL: [Self; 2] = [Self::Forward, Self::Backward];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}
