//! What the driver says when it fails, in its own words.

use std::fmt;

/// A call of the driver that failed: the call, the number, and what the driver calls it and says of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) call: &'static str,
    pub(crate) code: u32,
    pub(crate) name: String,
    pub(crate) text: String,
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// Codes after which the context is of no use any more: every later call ends with the same.
const ENDS_CONTEXT: [u32; 17] =
    [4, 46, 201, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999];

impl Fault {
    pub(crate) fn is_out_of_memory(&self) -> bool {
        self.code == OUT_OF_MEMORY
    }

    pub(crate) fn ends_context(&self) -> bool {
        ENDS_CONTEXT.contains(&self.code)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({}): {}", self.call, self.name, self.code, self.text)
    }
}
