//! What the driver says when it fails, in its own words.

use std::fmt;

pub(super) type Result<T> = std::result::Result<T, DriverError>;

/// A call of the driver that failed: the call, the number, and what the driver calls it and says of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DriverError {
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

impl DriverError {
    pub(crate) fn is_out_of_memory(&self) -> bool {
        self.code == OUT_OF_MEMORY
    }

    pub(crate) fn ends_context(&self) -> bool {
        ENDS_CONTEXT.contains(&self.code)
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({}): {}", self.call, self.name, self.code, self.text)
    }
}

/// Why there is no CUDA here, or why a device is of no use; for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable {
    pub(crate) why: String,
    pub(crate) remedy: &'static str,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.why, self.remedy)
    }
}

impl std::error::Error for Unavailable {}

/// The driver is there, and does not work.
impl From<DriverError> for Unavailable {
    fn from(error: DriverError) -> Self {
        Self { why: format!("CUDA cannot be used: {error}"), remedy: "see what nvidia-smi says" }
    }
}
