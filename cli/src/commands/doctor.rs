//! `kyklos doctor`: the diagnosis of a run from the records of its ranks.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::{Result, print};
use crate::interrupt;
use crate::observe::doctor::Diagnosis;
use crate::observe::page::target::{PageFile, PageTarget};
use crate::tensors::output::keep_apart;

/// The records to read.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Records of one run, or folders with records (*.jsonl)
    #[arg(required = true, value_name = "DUMP")]
    pub(crate) dumps: Vec<PathBuf>,
    /// Write the diagnosis with pictures as one HTML file
    #[arg(long, value_name = "F")]
    pub(crate) report: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Creates the page, before any work.
fn open(path: &Path, dumps: &[PathBuf]) -> Result<PageFile> {
    for dump in dumps {
        keep_apart(("--report", path), ("a record", Some(dump)), 1)?;
    }
    let target = PageTarget::new(path)?;
    interrupt::end_on_interrupt()?;
    target.open()
}

/// Runs the command; returns the exit code.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<u8> {
    let page = args.report.as_deref().map(|path| open(path, &args.dumps)).transpose()?;
    let diagnosis = Diagnosis::of(&args.dumps)?;
    if let Some(page) = page {
        page.write(&diagnosis.page())?;
    }
    print(&if args.json { diagnosis.json()? } else { diagnosis.text() })?;
    Ok(u8::from(diagnosis.is_bad()))
}
