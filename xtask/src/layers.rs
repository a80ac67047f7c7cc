//! Which crate may use which, and which folders stay free of devices, networks and clocks.

use std::path::{Path, PathBuf};

use crate::circles::{House, package_name};
use crate::files::{packages, read};

/// Which of our crates each package may name in `[dependencies]`. What tests need (`[dev-dependencies]`) is free.
/// A package below `demos/` has the rule of `demos`.
const CRATES: [(&str, &[&str]); 14] = [
    ("shaders", &[]),
    ("transport", &[]),
    ("runtime", &["kyklos-shaders", "kyklos-transport", "kyklos-launch"]),
    ("cuda-backend", &["kyklos", "kyklos-transport"]),
    ("cuda-backend/fake", &[]),
    ("launch", &["kyklos-transport"]),
    ("tab", &["kyklos"]),
    ("oracle", &[]),
    ("tests/backend-suite", &["kyklos", "kyklos-oracle", "kyklos-transport"]),
    ("tests", &[]),
    (
        "cli",
        &[
            "kyklos",
            "kyklos-shaders",
            "kyklos-transport",
            "kyklos-cuda",
            "kyklos-launch",
            "kyklos-tab",
            "kyklos-oracle",
        ],
    ),
    ("python", &["kyklos", "kyklos-transport", "kyklos-cuda", "kyklos-launch"]),
    ("demos", &["kyklos", "kyklos-transport", "kyklos-cuda", "kyklos-launch", "kyklos-tab", "kyklos-oracle"]),
    ("xtask", &[]),
];

/// The modules of the program, from the bottom to the top. A module uses modules of its own line and of earlier lines.
const PROGRAM: [&[&str]; 11] = [
    &["hints", "failure", "interrupt", "switches", "median", "messages", "new_file"],
    &["devices"],
    &["options"],
    &["tensors"],
    &["request"],
    &["run"],
    &["verify"],
    &["observe"],
    &["network", "group"],
    &["job"],
    &["commands"],
];

/// What computes plans: a pure function, whatever it uses.
const PURE: [&str; 6] = [
    "runtime/src/mask.rs",
    "runtime/src/mesh.rs",
    "runtime/src/placement.rs",
    "runtime/src/plan",
    "runtime/src/strategy",
    "runtime/src/simulate",
];

/// Devices, networks and clocks.
const IMPURE: [&str; 7] = [
    "runtime/src/backend",
    "runtime/src/collective.rs",
    "runtime/src/exec.rs",
    "runtime/src/clock.rs",
    "runtime/src/machine.rs",
    "transport/src/in_process",
    "transport/src/quic",
];

pub(crate) fn check(root: &Path, house: &House) -> Vec<String> {
    let packages = packages(root);
    let mut faults: Vec<String> = packages.iter().flat_map(|package| of_manifest(root, package)).collect();
    for path in PURE.iter().chain(&IMPURE) {
        if !house.contains(Path::new(path)) {
            faults.push(format!("xtask/src/layers.rs: there is no {path}"));
        }
    }
    for pure in PURE {
        for impure in IMPURE {
            if let Some(way) = house.way(Path::new(pure), Path::new(impure)) {
                faults.push(format!("{pure} must not use {impure}, but {way}"));
            }
        }
    }
    faults.extend(of_program(house));
    faults
}

/// Modules of the program that use a module of a later line of [`PROGRAM`].
fn of_program(house: &House) -> Vec<String> {
    let path = |module: &str| {
        let folder = Path::new("cli/src").join(module);
        if house.contains(&folder) { folder } else { folder.with_extension("rs") }
    };
    let mut faults = Vec::new();
    for (line, modules) in PROGRAM.iter().enumerate() {
        for module in *modules {
            let lower = path(module);
            if !house.contains(&lower) {
                faults.push(format!("xtask/src/layers.rs: there is no {}", lower.display()));
            }
            for above in PROGRAM[line + 1..].iter().flat_map(|line| line.iter()) {
                if let Some(way) = house.way(&lower, &path(above)) {
                    faults.push(format!("cli/src/{module} is below {above}, but {way}"));
                }
            }
        }
    }
    faults
}

fn of_manifest(root: &Path, package: &PathBuf) -> Vec<String> {
    let rule = if package.starts_with("demos") { Path::new("demos") } else { package.as_path() };
    let Some((_, allowed)) = CRATES.iter().find(|(folder, _)| Path::new(folder) == rule) else {
        return vec![format!("{}: has no place among the crates of xtask/src/layers.rs", package.display())];
    };
    let manifest = read(&root.join(package).join("Cargo.toml"));
    let own = package_name(&manifest);
    let dependencies = manifest.split("\n[").filter(|part| {
        let name = part.lines().next().unwrap_or_default();
        name.ends_with("dependencies]") && !name.contains("dev-")
    });
    let mut faults = Vec::new();
    for line in dependencies.flat_map(str::lines) {
        let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
        if name.starts_with("kyklos") && name != own && !allowed.contains(&name) {
            faults.push(format!("{}/Cargo.toml: may not depend on {name}", package.display()));
        }
    }
    faults
}
