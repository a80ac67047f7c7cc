//! `kyklos doctor`: the diagnosis of a run from the records of its ranks.

use std::path::PathBuf;

use clap::Args;

use crate::failure::{Result, print};
use crate::observe::doctor::Diagnosis;

/// The records to read.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Records of one run, or folders with records (*.jsonl)
    #[arg(required = true, value_name = "DUMP")]
    pub(crate) dumps: Vec<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Runs the command; returns the exit code.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<u8> {
    let diagnosis = Diagnosis::of(&args.dumps)?;
    print(&if args.json { diagnosis.json()? } else { diagnosis.text() })?;
    Ok(u8::from(diagnosis.is_bad()))
}
