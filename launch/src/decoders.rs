//! Everything of this crate that reads bytes it did not write, for the fuzz targets in `fuzz/` and
//! the bounded run of `tests/decoders.rs`. Each takes any bytes: it must not panic, and what it
//! decodes must come back the same when it is encoded and decoded again. Not an interface.

use crate::assignment::assign;
use crate::cluster_file;
use crate::credentials::Credentials;
use crate::launchers::slurm::nodelist as lists;
use crate::options::Options;
use crate::variables::Variables;

/// Takes any bytes.
pub type Target = fn(&[u8]);

/// The name of each decoder, and its function.
pub const ALL: [(&str, Target); 3] =
    [("cluster_file", cluster_file), ("nodelist", nodelist), ("environment", environment)];

/// A cluster file.
pub fn cluster_file(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for rank in [None, Some(0), Some(u32::MAX)] {
        if let Err(error) = cluster_file::parse(&text, "file F", rank, |_| Ok(())) {
            assert!(error.to_string().contains("file F"), "{error}");
        }
    }
}

/// Slurm's lists of hosts and of tasks.
pub fn nodelist(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(hosts) = lists::hosts(&text, "F") {
        // A list written from the decoded hosts has the same meaning, unless it is too long.
        if let Ok(again) = lists::hosts(&hosts.join(","), "F") {
            assert_eq!(again, hosts);
        }
    }
    let _ = lists::tasks_per_host(&text, "F");
}

/// The environment of a launcher: one variable a line, `NAME=value`.
pub fn environment(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let look_up = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
    };
    let variables = Variables::from_lookup(&look_up);
    match assign(&Options::default(), &variables, Credentials::IdentityFile) {
        Ok(Some(assignment)) => {
            assert!(assignment.rank < assignment.size, "{assignment:?}");
            assert!(assignment.size == 1 || assignment.coordinator.is_some(), "{assignment:?}");
        }
        Ok(None) => {}
        Err(error) => assert!(error.is_request(), "{error}"),
    }
}
