//! Which crate may use which, and which module of a crate.

use std::path::{Path, PathBuf};

use crate::circles::{House, package_name};
use crate::files::{packages, read};

/// Which of our crates each package may name in `[dependencies]`. What tests need
/// (`[dev-dependencies]`) is free. A package below `demos/` has the rule of `demos`.
const CRATES: [(&str, &[&str]); 18] = [
    ("rank", &[]),
    ("plan", &["kyklos-rank"]),
    ("shaders", &[]),
    ("transport", &["kyklos-rank"]),
    ("runtime", &["kyklos-plan", "kyklos-shaders", "kyklos-transport", "kyklos-launch"]),
    ("cuda-backend", &["kyklos", "kyklos-transport"]),
    ("cuda-backend/fake", &[]),
    ("launch", &["kyklos-transport"]),
    ("helpers", &["kyklos", "kyklos-plan", "kyklos-transport"]),
    ("tab", &["kyklos"]),
    ("oracle", &[]),
    ("tests/backend-suite", &["kyklos", "kyklos-oracle", "kyklos-transport"]),
    ("tests/vendors", &["kyklos", "kyklos-shaders"]),
    ("tests", &[]),
    (
        "cli",
        &[
            "kyklos",
            "kyklos-shaders",
            "kyklos-transport",
            "kyklos-cuda",
            "kyklos-launch",
            "kyklos-helpers",
            "kyklos-tab",
            "kyklos-oracle",
        ],
    ),
    (
        "python",
        &[
            "kyklos",
            "kyklos-transport",
            "kyklos-cuda",
            "kyklos-launch",
            "kyklos-helpers",
            "kyklos-backend-suite",
        ],
    ),
    ("demos", &["kyklos", "kyklos-transport", "kyklos-cuda", "kyklos-launch", "kyklos-tab", "kyklos-oracle"]),
    ("xtask", &[]),
];

/// The modules of a crate, from the bottom to the top. A module uses modules of its own line and of
/// earlier lines.
const LAYERS: [(&str, &[&[&str]]); 3] =
    [("plan/src", &PLAN), ("runtime/src", &LIBRARY), ("cli/src", &PROGRAM)];

const PLAN: [&[&str]; 6] = [
    &["error", "remedy", "dtype", "named", "tokens", "spans", "parallel"],
    &["mask", "bias", "wire", "problem", "lower"],
    &["mesh", "placement", "strategy_list"],
    &["plan"],
    &["strategy"],
    &["simulate"],
];

const LIBRARY: [&[&str]; 4] = [
    &["error", "machine", "clock"],
    &["backend"],
    &["tensor", "collective", "exec", "meter", "host", "collect"],
    &["call", "session", "local"],
];

const PROGRAM: [&[&str]; 11] = [
    &["hints", "failure", "interrupt", "cores", "switches", "median", "messages", "new_file"],
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

pub(crate) fn check(root: &Path, house: &House) -> Vec<String> {
    let packages = packages(root);
    let mut faults: Vec<String> = packages.iter().flat_map(|package| of_manifest(root, package)).collect();
    faults.extend(LAYERS.iter().flat_map(|(folder, lines)| of_modules(house, folder, lines)));
    faults
}

/// Modules below `folder` that use a module of a later line.
fn of_modules(house: &House, folder: &str, lines: &[&[&str]]) -> Vec<String> {
    let path = |module: &str| {
        let module = Path::new(folder).join(module);
        if house.contains(&module) { module } else { module.with_extension("rs") }
    };
    let mut faults = Vec::new();
    for (line, modules) in lines.iter().enumerate() {
        for module in *modules {
            let lower = path(module);
            if !house.contains(&lower) {
                faults.push(format!("xtask/src/layers.rs: there is no {}", lower.display()));
            }
            for above in lines[line + 1..].iter().flat_map(|line| line.iter()) {
                if let Some(way) = house.way(&lower, &path(above)) {
                    faults.push(format!("{folder}/{module} is below {above}, but {way}"));
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
