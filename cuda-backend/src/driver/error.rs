//! Errors of the driver, and why CUDA is not available.

use std::borrow::Cow;
use std::fmt;

pub(super) type Result<T> = std::result::Result<T, DriverError>;

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DriverError {
    /// The function, for example `cuMemAlloc_v2`.
    pub(crate) call: &'static str,
    pub(crate) code: u32,
    /// The driver's name of the code, for example `CUDA_ERROR_OUT_OF_MEMORY`.
    pub(crate) name: String,
    /// The driver's description of the code.
    pub(crate) text: String,
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// Codes of errors that destroy the context: every later call in it fails with the same code.
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

/// Why CUDA or a device cannot be used. `Display` gives the reason and a remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable {
    pub(crate) why: String,
    pub(crate) remedy: Cow<'static, str>,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.why, self.remedy)
    }
}

impl std::error::Error for Unavailable {}

/// For a driver that is installed and fails before a device is opened.
impl From<DriverError> for Unavailable {
    fn from(error: DriverError) -> Self {
        Self { why: format!("CUDA cannot be used: {error}"), remedy: "see what nvidia-smi says".into() }
    }
}
