//! The environment's variables, looked up by name.

use std::env;
use std::str::FromStr;

use super::source::Said;
use crate::failure::{Failure, Result};

/// Where variables come from: this process, or a table of them.
pub(crate) struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'static> {
    pub(crate) fn of_this_process() -> Self {
        Self(&|name| env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }
}

impl<'a> Variables<'a> {
    pub(crate) fn of(look_up: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self(look_up)
    }

    /// What it says; `None` where it is not set or empty.
    pub(crate) fn text(&self, name: &str) -> Option<Said<String>> {
        let value = (self.0)(name).filter(|value| !value.is_empty())?;
        let shown: String = value.chars().take(LONGEST_SHOWN).collect();
        let dots = if shown.len() < value.len() { "…" } else { "" };
        Some(Said { words: format!("{name}={shown}{dots}"), value })
    }

    /// The same as a number.
    pub(crate) fn number<T: FromStr>(&self, name: &str) -> Result<Option<Said<T>>> {
        let Some(Said { value, words }) = self.text(name) else {
            return Ok(None);
        };
        match value.parse() {
            Ok(value) => Ok(Some(Said { value, words })),
            Err(_) => Err(Failure::request(
                format!("{words} in the environment is not a number that can be meant"),
                "let the launcher set it, or unset it",
            )),
        }
    }

    /// Two variables of which a launcher sets both or none.
    pub(crate) fn both<T: FromStr>(&self, names: [&str; 2]) -> Result<Option<[Said<T>; 2]>> {
        match (self.number(names[0])?, self.number(names[1])?) {
            (None, None) => Ok(None),
            (Some(first), Some(second)) => Ok(Some([first, second])),
            (first, _) => {
                let [set, unset] = if first.is_some() { names } else { [names[1], names[0]] };
                Err(Failure::request(
                    format!("{set} is set in the environment and {unset} is not"),
                    "set both, as a launcher does, or none",
                ))
            }
        }
    }
}

/// Characters of a value that an error quotes.
const LONGEST_SHOWN: usize = 120;
