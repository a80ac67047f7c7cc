//! The launchers whose environments are read. To add one: a file here with its tests, its `mod`
//! line, its entry in [`LAUNCHERS`].

mod kubernetes;
mod mpi;
pub(crate) mod slurm;
pub(crate) mod torchrun;

use crate::error::Result;
use crate::source::{Precedence, Source};
use crate::variables::Variables;

/// A launcher or scheduler that gives its processes their ranks in environment variables.
#[derive(Clone, Copy, Debug)]
pub struct Launcher {
    /// Its name for users.
    pub name: &'static str,
    /// Every variable that is read begins with one of these.
    pub variables: &'static [&'static str],
    /// The variables that alone show that a process is one of several, in the order in which notes
    /// quote them. The first one is the rank.
    pub rank_variables: &'static [&'static str],
    pub(crate) precedence: Precedence,
    /// The settings in the variables; [`Source::default`] if this launcher did not start the
    /// process.
    pub(crate) read: fn(&Variables<'_>) -> Result<Source>,
}

/// All of them. Of two launchers that provide the same setting the first one wins.
pub const LAUNCHERS: &[Launcher] =
    &[torchrun::LAUNCHER, mpi::OPEN_MPI, mpi::PMI, slurm::LAUNCHER, kubernetes::LAUNCHER];

impl Launcher {
    /// The settings in the environment of this launcher.
    pub(crate) fn source(&self, variables: &Variables<'_>) -> Result<Source> {
        Ok(Source { precedence: self.precedence, ..(self.read)(variables)? })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn the_front_page_of_the_manual_names_every_variable_that_is_read() {
        let manual = include_str!("../lib.rs");
        // A launcher reads some variables only if others are set, and some only if others are not.
        let tables: [&dyn Fn(&str) -> bool; 3] =
            [&|_| true, &|name| !name.contains("_STEP_"), &|name| name == "SLURM_PROCID"];
        for launcher in LAUNCHERS {
            let read = RefCell::new(Vec::new());
            for is_set in tables {
                let look_up = |name: &str| {
                    read.borrow_mut().push(name.to_owned());
                    is_set(name).then(|| "1".to_owned())
                };
                let _ = launcher.source(&Variables::from_lookup(&look_up));
            }
            let read = read.into_inner();
            for name in launcher.rank_variables {
                assert!(read.iter().any(|read| read == name), "{}: {name} is not read", launcher.name);
            }
            for name in read {
                assert!(manual.contains(&format!("`{name}`")), "{}: {name}", launcher.name);
            }
        }
    }
}
