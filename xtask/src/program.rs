//! The order of the modules of the program.

use std::path::Path;

use crate::{modules, read, relative, rust_files, uses};

/// From the bottom to the top. A module uses modules of its own line and of earlier lines.
const ORDER: [&[&str]; 12] = [
    &["failure", "interrupt", "switches", "median", "messages"],
    &["devices"],
    &["options"],
    &["tensors"],
    &["request"],
    &["run"],
    &["verify"],
    &["observe"],
    &["launchers", "network", "group", "entrance"],
    &["job"],
    &["commands"],
    &["demo", "decoders"],
];

/// Modules that use a module above them, and modules without a place in the order.
pub(crate) fn layers(root: &Path) -> Vec<String> {
    let source = root.join("cli/src");
    let floor = |module: &str| ORDER.iter().position(|line| line.contains(&module));
    let mut faults = Vec::new();
    for module in modules(&read(&source.join("lib.rs"))) {
        let Some(own) = floor(&module) else {
            faults.push(format!("cli/src/lib.rs: module {module} has no place in the order of xtask"));
            continue;
        };
        let files =
            rust_files(&source.join(&module)).into_iter().chain([source.join(format!("{module}.rs"))]);
        for file in files.filter(|file| file.exists() && !file.ends_with("tests.rs")) {
            let text = read(&file);
            // Unit tests may use any module.
            let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            for used in uses(text, &[]) {
                if floor(&used).is_some_and(|floor| floor > own) {
                    faults.push(format!("{}: module {module} may not use {used}", relative(root, &file)));
                }
            }
        }
    }
    faults
}
