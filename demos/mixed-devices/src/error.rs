//! Errors of the demonstration.

/// Any error, with its text for the user.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// The result type of the demonstration.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;
