//! No source file is longer than one reads at a sitting, and no folder has more of them than one
//! sees at a glance.

use std::collections::BTreeMap;
use std::path::Path;

use crate::files::{files, read, relative};

/// Lines of a source file.
const MOST_LINES: usize = 400;
/// Source files of a folder.
const MOST_FILES: usize = 15;

/// Files that may have up to 600, each with the reason.
const LONGER: [(&str, &str); 2] = [
    ("tests/tests/suites/plan_properties/mod.rs", "properties beside the random plans that they are about"),
    ("tests/tests/suites/simulator/mod.rs", "claims beside the cluster descriptions that they are about"),
];

const MOST_LINES_WITH_REASON: usize = 600;

/// How the names of source files end.
const SOURCES: [&str; 14] =
    ["rs", "sh", "py", "mjs", "js", "ts", "html", "css", "c", "cpp", "cu", "h", "wgsl", "toml"];

pub(crate) fn check(root: &Path) -> Vec<String> {
    let mut faults = Vec::new();
    let mut folders: BTreeMap<String, usize> = BTreeMap::new();
    for file in files(root) {
        let is_source =
            file.extension().is_some_and(|extension| SOURCES.iter().any(|source| extension == *source));
        let name = relative(root, &file);
        // Golden files are made by programs and kept as they are.
        if !is_source || name.contains("/golden/") {
            continue;
        }
        *folders
            .entry(file.parent().map(|folder| relative(root, folder)).unwrap_or_default())
            .or_default() += 1;
        let lines = read(&file).lines().count();
        let is_listed = LONGER.iter().any(|(longer, _)| *longer == name);
        let most = if is_listed { MOST_LINES_WITH_REASON } else { MOST_LINES };
        if lines > most {
            faults.push(format!("{name}: {lines} lines, at most {most}"));
        } else if is_listed && lines <= MOST_LINES {
            faults.push(format!("{name}: {lines} lines need no place in LONGER of xtask/src/sizes.rs"));
        }
    }
    for (folder, files) in folders.iter().filter(|(_, files)| **files > MOST_FILES) {
        faults.push(format!("{folder}: {files} source files, at most {MOST_FILES}"));
    }
    for (longer, _) in LONGER {
        if !root.join(longer).exists() {
            faults.push(format!("xtask/src/sizes.rs: there is no {longer}"));
        }
    }
    faults
}
