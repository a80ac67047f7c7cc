//! `kyklos man`: the manual pages.

use std::path::PathBuf;

use clap::{Args, Command};

use crate::failure::{Failure, Result};

/// Where the pages go.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Folder to write to, such as /usr/local/share/man/man1; created if it does not exist
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Writes the pages of `program` and of all its commands.
pub(crate) fn man(args: &ManArgs, program: Command) -> Result<()> {
    let cannot = |error| Failure::file("write the manual pages to", &args.folder, &error).into_refusal();
    std::fs::create_dir_all(&args.folder).map_err(cannot)?;
    clap_mangen::generate_to(program, &args.folder).map_err(cannot)
}
