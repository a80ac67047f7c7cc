//! Checks of the project's structure: `xtask circles | layers | sizes | deps | all`, and of a
//! program: `xtask kernels PROGRAM`.
//!
//! - `circles`: files do not use each other in a circle of more than three files, or across
//!   folders.
//! - `layers`: crates use each other only along the arrows of `ARCHITECTURE.md`, and plans depend
//!   on no device.
//! - `sizes`: no source file is too long, and no folder has too many.
//! - `deps`: what a feature brings in is absent without it.
//! - `kernels`: in the machine code of the program, the inner loops of the CPU kernels keep their
//!   sums in registers.

use std::path::Path;
use std::process::ExitCode;

use circles::House;

mod circles;
mod deps;
mod files;
mod kernels;
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
        "kernels" => match std::env::args().nth(2) {
            Some(program) => kernels::check(&program),
            None => vec!["xtask kernels: the path of a program is missing".to_owned()],
        },
        _ => vec![format!("`{verb}` is not known: use circles, layers, sizes, deps, kernels or all")],
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
