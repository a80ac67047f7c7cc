//! Descriptions of devices and links: `--hardware`.

use std::io::ErrorKind;
use std::path::Path;

use kyklos::PlanError;
use kyklos::simulate::Cluster;
use kyklos_transport::regular_file::read_regular_text;

use crate::failure::{Failure, Result};
use crate::hints;

/// Reads a description of a cluster.
pub(crate) fn read(path: &Path) -> Result<Cluster> {
    let text = read_regular_text(path, MOST_BYTES).map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => Failure::request(
            format!("{} has more than {MOST_BYTES} bytes", path.display()),
            "write devices, hosts and links, and nothing else",
        ),
        _ => Failure::file("read", path, &error).into_refusal(),
    })?;
    Cluster::from_toml(&text).map_err(|error| {
        let failure = Failure::from(error);
        Failure { text: format!("{}: {}", path.display(), failure.text), ..failure }
    })
}

/// The failure when every candidate is refused.
pub(crate) fn nothing_fits(candidates: usize, first: &PlanError) -> Failure {
    let plural = if candidates == 1 { "the plan is" } else { "all plans are" };
    let first = hints::of_plan(first);
    Failure::refused(format!("{plural} refused, of {candidates} the first one because: {first}"))
}

const MOST_BYTES: u64 = 1 << 20;
