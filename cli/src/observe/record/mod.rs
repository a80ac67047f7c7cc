//! Records: the recent events of each rank of this process, written to a file when the rank ends or
//! on request.

mod dump;
mod flight;
pub(crate) mod format;

use std::path::{Path, PathBuf};

use self::dump::Why;
pub(crate) use self::flight::{About, Flight, ListedFlight, flights};
use crate::failure::{Failure, Result, note};
use crate::interrupt;
use crate::new_file::NewFile;

impl ListedFlight {
    /// Writes the record of a rank that ends with this result.
    pub(crate) fn ended<T>(&self, result: &Result<T>) {
        match result {
            Ok(_) => write(&self.0, Why::Done),
            Err(failure) => write(&self.0, Why::Failed(&failure.text)),
        }
    }
}

/// Writes the record of a rank. A record that cannot be written is a warning: the run does not fail
/// for it.
fn write(flight: &Flight, why: Why<'_>) {
    if let Err(failure) = try_to_write(flight, why) {
        note(&format!("warning: no record of rank {}: {}", flight.rank, failure.text));
    }
}

fn try_to_write(flight: &Flight, why: Why<'_>) -> Result<()> {
    let Some(folder) = &flight.about.folder else { return Ok(()) };
    // The name contains this rank's own number: a later record replaces an earlier one.
    let path = folder.join(format!("rank-{}.jsonl", flight.rank));
    let file = NewFile::create_private(&path)?;
    dump::write(flight, why, file.as_file()).map_err(|error| file.cannot_write(&error))?;
    file.commit()
}

/// The folder from `--record` or the environment; created if it does not exist.
pub(crate) fn folder(flag: Option<&Path>) -> Result<Option<PathBuf>> {
    let named = std::env::var_os(FOLDER).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let Some(folder) = flag.map(Path::to_owned).or(named) else { return Ok(None) };
    std::fs::create_dir_all(&folder).map_err(|error| {
        Failure::request(
            format!("records cannot go to {}: {error}", folder.display()),
            format!("name another folder with --record or {FOLDER}"),
        )
    })?;
    Ok(Some(folder))
}

/// From now on SIGUSR1 writes the records of all ranks here.
pub(crate) fn write_on_request() -> Result<()> {
    interrupt::on_request(write_all)
}

/// Writes the records of all ranks here.
pub(crate) fn write_all() {
    let flights = flights();
    if !flights.iter().any(|flight| flight.about.folder.is_some()) {
        let why = if flights.is_empty() { "no rank runs here yet" } else { "no folder is named for them" };
        note(&format!("no records are written: {why} (--record DIR or {FOLDER})"));
    }
    for flight in flights {
        write(&flight, Why::Asked);
    }
}

/// Variable with the folder for records.
pub(crate) const FOLDER: &str = "KYKLOS_RECORD_DIR";
