//! Everything of the program that reads bytes it did not write, for the fuzz targets in `fuzz/` and the bounded run of
//! `tests/decoders.rs`. Each takes any bytes: it must not panic, and what it decodes must come back the same when it is
//! encoded and decoded again. Not an interface.

use std::ffi::OsString;
use std::path::Path;

use crate::launchers::{cluster_file, nodelist};
use crate::record::format::Line;
use crate::{args, doctor, tuned};

/// Something that takes any bytes.
pub type Target = fn(&[u8]);

/// A decoder's name, and what feeds it.
pub const ALL: [(&str, Target); 5] = [
    ("record", record),
    ("cluster_file", cluster_file),
    ("nodelist", nodelist),
    ("tuning", tuning),
    ("arguments", arguments),
];

/// A rank's record, as `kyklos doctor` reads it.
pub fn record(bytes: &[u8]) {
    let _ = doctor::read::of_lines(Path::new("F"), bytes);
    for line in bytes.split(|&byte| byte == b'\n') {
        if let Ok(line) = serde_json::from_slice::<Line>(line) {
            let again = serde_json::to_vec(&line).map(|bytes| serde_json::from_slice(&bytes));
            assert_eq!(again.ok().and_then(Result::ok), Some(line));
        }
    }
}

/// `--cluster F`.
pub fn cluster_file(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for rank in [None, Some(0), Some(u32::MAX)] {
        if let Err(failure) = cluster_file::parse(&text, "--cluster F", rank) {
            assert!(failure.text.contains("--cluster F"), "{}", failure.text);
        }
    }
}

/// Slurm's lists of hosts and of tasks.
pub fn nodelist(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(hosts) = nodelist::hosts(&text, "F") {
        // A list of its own hosts says the same, unless it is too long.
        if let Ok(again) = nodelist::hosts(&hosts.join(","), "F") {
            assert_eq!(again, hosts);
        }
    }
    let _ = nodelist::tasks_per_host(&text, "F");
}

/// The choices that `kyklos tune` keeps.
pub fn tuning(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(table) = tuned::parse(&text) {
        let again = tuned::text_of(&table).map(|text| tuned::parse(&text));
        assert_eq!(again.ok(), Some(Ok(table)));
    }
}

/// The command line: one argument a line.
pub fn arguments(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let words = std::iter::once("kyklos").chain(text.lines()).map(OsString::from);
    if let Err(error) = args::parse(words) {
        let _ = args::one_line(&error);
    }
}
