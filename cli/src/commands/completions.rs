//! `kyklos completions`: what a shell completes after `kyklos`.

use clap::{Args, Command};
use clap_complete::Shell;

use crate::failure::{Failure, Result, print};

/// The shell.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell that reads them
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the completions of `program` for a shell.
pub(crate) fn completions(args: &CompletionsArgs, mut program: Command) -> Result<()> {
    let mut script = Vec::new();
    let name = program.get_name().to_owned();
    clap_complete::generate(args.shell, &mut program, name, &mut script);
    let script = String::from_utf8(script)
        .map_err(|error| Failure::run(format!("the completions are not text: {error}")))?;
    print(&script)
}
