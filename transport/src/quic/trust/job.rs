//! The number of a job.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest::{SHA256, digest};

use crate::error::TransportError;

/// 128-bit number of a job. It is a name, not a secret: what keeps strangers out is the job's
/// authority.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct JobId(pub [u8; 16]);

impl JobId {
    /// A new number from the system's randomness.
    ///
    /// # Errors
    ///
    /// [`TransportError::Bootstrap`] if the system has no randomness to give.
    pub fn random() -> Result<Self, TransportError> {
        let mut bytes = [0; 16];
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        provider
            .secure_random
            .fill(&mut bytes)
            .map_err(|_| TransportError::bootstrap("no randomness for a job number"))?;
        Ok(Self(bytes))
    }

    /// The number that stands for a launcher's own name of the job, the same on every rank: the
    /// first half of its SHA-256, so that nobody finds a name with the number of another job.
    pub fn from_name(name: &str) -> Self {
        let mut number = [0; 16];
        number.copy_from_slice(&digest(&SHA256, name.as_bytes()).as_ref()[..16]);
        Self(number)
    }

    /// The job as a launcher gives it: a number in 32 hexadecimal digits, or a name. No job has a
    /// name that reads like a number: identities are not issued for one.
    pub fn of_text(text: &str) -> Self {
        text.parse().unwrap_or_else(|_| Self::from_name(text))
    }

    /// The part of the number that message headers carry.
    pub(crate) fn low(self) -> u64 {
        let [_, _, _, _, _, _, _, _, low @ ..] = self.0;
        u64::from_le_bytes(low)
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobId({self})")
    }
}

impl FromStr for JobId {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        let wrong =
            || TransportError::bootstrap(format!("a job number has 32 hexadecimal digits, not {text:?}"));
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        u128::from_str_radix(text, 16).map(|number| Self(number.to_be_bytes())).map_err(|_| wrong())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_name_is_half_of_its_sha_256() {
        // echo -n train | sha256sum
        let number = "116f54c41d0405dbb10e7b04ebc31e26";
        assert_eq!(JobId::from_name("train").to_string(), number);
        assert_eq!(JobId::of_text("train"), JobId::of_text(number));
    }
}
