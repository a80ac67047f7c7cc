//! Errors of NCCL.

use std::fmt;

/// A call of NCCL that failed.
///
/// ```
/// # fn main() {
/// let nccl = match kyklos_cuda::Nccl::load() {
///     Ok(nccl) => nccl,
///     Err(unavailable) => return println!("{unavailable}"),
/// };
/// if let Err(error) = nccl.unique_id() {
///     println!("{} failed with code {}", error.call, error.code);
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclError {
    /// The function, for example `ncclGetUniqueId`.
    pub call: &'static str,
    /// NCCL's code, for example 2 for `ncclSystemError`.
    pub code: i32,
    /// NCCL's text for the code.
    pub text: String,
    /// What NCCL last reported in this process, which may say more than the code. Empty if it
    /// reported nothing.
    pub detail: String,
}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.text, self.code)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, ": {}", self.detail) }
    }
}

impl std::error::Error for NcclError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_tells_the_call_the_code_and_the_texts() {
        let call = "ncclGetUniqueId";
        let error =
            NcclError { call, code: 2, text: "unhandled system error".to_owned(), detail: String::new() };
        assert_eq!(error.to_string(), "ncclGetUniqueId: unhandled system error (2)");
        let error = NcclError { detail: "no socket interface found".to_owned(), ..error };
        let told = "ncclGetUniqueId: unhandled system error (2): no socket interface found";
        assert_eq!(error.to_string(), told);
    }
}
