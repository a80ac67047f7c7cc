//! Environment variables that switch a feature off.

use std::env;
use std::ffi::OsString;

use kyklos_cuda::CudaOptions;

use crate::failure::{Failure, Result};

/// A variable that is `off` or unset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Switch {
    name: &'static str,
    /// The effect of `off`, for the message.
    does: &'static str,
}

/// Whether runs use the choices of `kyklos tune`.
pub(crate) const TUNE: Switch = Switch { name: "KYKLOS_TUNE", does: "uses the built-in choices" };

/// Whether owners of helpers announce themselves: only the library does it.
const ANNOUNCE: Switch =
    Switch { name: "KYKLOS_ANNOUNCE", does: "keeps owners of helpers quiet on the local network" };

impl Switch {
    /// Whether the user turned it off.
    pub(crate) fn is_off(self) -> Result<bool> {
        self.reads_off(env::var_os(self.name))
    }

    fn reads_off(self, value: Option<OsString>) -> Result<bool> {
        match value {
            None => Ok(false),
            Some(value) if value == "off" => Ok(true),
            Some(value) => Err(Failure::request(
                format!("{} is `{}`", self.name, value.display()),
                format!("set it to off, which {}, or leave it unset", self.does),
            )),
        }
    }
}

/// Refuses a wrong value, also where the command does not use the switch.
pub(crate) fn check() -> Result<()> {
    TUNE.is_off()?;
    ANNOUNCE.is_off()?;
    CudaOptions::from_environment()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_is_off_or_absent() {
        assert!(!TUNE.reads_off(None).unwrap());
        assert!(TUNE.reads_off(Some("off".into())).unwrap());
        for other in ["", "0", "on", "OFF"] {
            let failure = TUNE.reads_off(Some(other.into())).unwrap_err();
            assert_eq!(failure.exit, 2);
            assert!(failure.text.contains("set it to off"), "{}", failure.text);
        }
    }
}
