//! Environment variables: Kyklos' own variables, and how all variables are read.

use std::env;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::source::Setting;

/// A lookup by name: in the environment of this process, or in a table.
pub(crate) struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'static> {
    pub(crate) fn of_process() -> Self {
        Self(&|name| env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }
}

impl<'a> Variables<'a> {
    pub(crate) fn from_lookup(look_up: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self(look_up)
    }

    /// Whether `kyklos launch` has started this process.
    pub(crate) fn under_kyklos_launch(&self) -> bool {
        self.text(LAUNCH).is_some()
    }

    /// Its value; `None` if it is not set or empty.
    pub(crate) fn text(&self, name: &str) -> Option<Setting<String>> {
        let value = (self.0)(name).filter(|value| !value.is_empty())?;
        let shown: String = value.chars().take(LONGEST_SHOWN).collect();
        let dots = if shown.len() < value.len() { "…" } else { "" };
        Some(Setting { origin: format!("{name}={shown}{dots}"), value })
    }

    /// Its value as a number.
    pub(crate) fn number<T: FromStr>(&self, name: &str) -> Result<Option<Setting<T>>> {
        let Some(Setting { value, origin }) = self.text(name) else {
            return Ok(None);
        };
        match value.parse() {
            Ok(value) => Ok(Some(Setting { value, origin })),
            Err(_) => Err(Error::request(
                format!("{origin} in the environment is not a valid number"),
                "let the launcher set it, or unset it",
            )),
        }
    }

    /// Its value as a number, without its origin.
    pub(crate) fn count(&self, name: &str) -> Result<Option<u32>> {
        Ok(self.number(name)?.map(|setting| setting.value))
    }

    /// Two variables of which a launcher sets both or neither.
    pub(crate) fn pair<T: FromStr>(&self, names: [&str; 2]) -> Result<Option<[Setting<T>; 2]>> {
        match (self.number(names[0])?, self.number(names[1])?) {
            (None, None) => Ok(None),
            (Some(first), Some(second)) => Ok(Some([first, second])),
            (first, _) => {
                let [set, unset] = if first.is_some() { names } else { [names[1], names[0]] };
                Err(Error::request(
                    format!("{set} is set in the environment and {unset} is not"),
                    "set both, as a launcher does, or none",
                ))
            }
        }
    }
}

/// Number of ranks, where no launcher sets it.
pub const WORLD: &str = "KYKLOS_WORLD";
/// Where rank 0 listens, `HOST:PORT`.
pub const COORDINATOR: &str = "KYKLOS_COORDINATOR";
/// Name of the job that the identities must be of.
pub const JOB_ID: &str = "KYKLOS_JOB_ID";
/// Addresses at which the others reach this rank, separated by commas.
pub const ADVERTISE: &str = "KYKLOS_ADVERTISE";
/// `off` keeps messages between ranks of one host on the network, whatever the options say.
pub const SHARED_MEMORY: &str = "KYKLOS_SHARED_MEMORY";
/// Path of the file that proves this rank to the others.
pub const IDENTITY: &str = "KYKLOS_IDENTITY";
/// A join token: other users of a host see arguments, not variables.
pub const JOIN: &str = "KYKLOS_JOIN";
/// Set by `kyklos launch` for its processes.
pub const LAUNCH: &str = "KYKLOS_LAUNCH";

/// An error quotes at most so many characters of a value.
const LONGEST_SHOWN: usize = 120;
