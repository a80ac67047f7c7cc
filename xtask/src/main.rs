//! Checks of the project's structure: `xtask circles | layers | sizes | deps | all`.
//!
//! - `circles`: files do not use each other in a circle of more than three files, or across folders.
//! - `layers`: crates use each other only along the arrows of `ARCHITECTURE.md`, and plans depend on no device.
//! - `sizes`: no source file is too long.
//! - `deps`: what a feature brings in is absent without it.

use std::path::Path;
use std::process::ExitCode;

use circles::House;

mod circles;
mod deps;
mod files;
mod layers;
mod sizes;

fn main() -> ExitCode {
    let verb = std::env::args().nth(1).unwrap_or_default();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a folder of the workspace");
    let house = || House::read(root, &files::packages(root));
    let faults = match verb.as_str() {
        "circles" => circles::check(&house()),
        "layers" => layers::check(root, &house()),
        "sizes" => sizes::check(root),
        "deps" => deps::check(root),
        "all" => {
            let house = house();
            [circles::check(&house), layers::check(root, &house), sizes::check(root), deps::check(root)]
                .concat()
        }
        _ => vec![format!("`{verb}` is not known: use circles, layers, sizes, deps or all")],
    };
    for fault in &faults {
        eprintln!("{fault}");
    }
    if faults.is_empty() {
        println!("xtask {verb}: no faults");
        return ExitCode::SUCCESS;
    }
    ExitCode::FAILURE
}
