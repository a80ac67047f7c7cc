//! Checks of the project's structure: `xtask layers | sizes | deps | all`.
//!
//! - `layers`: crates and modules use each other only along the arrows of `ARCHITECTURE.md`.
//! - `sizes`: no source file outgrows one sitting.
//! - `deps`: what a feature brings in is absent without it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let verb = std::env::args().nth(1).unwrap_or_default();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace");
    let faults = match verb.as_str() {
        "layers" => layers(root),
        "sizes" => sizes(root),
        "deps" => deps(root),
        "all" => [layers(root), sizes(root), deps(root)].concat(),
        _ => vec![format!("`{verb}` is not known: use layers, sizes, deps or all")],
    };
    for fault in &faults {
        eprintln!("{fault}");
    }
    if faults.is_empty() {
        println!("xtask {verb}: nothing found");
        return ExitCode::SUCCESS;
    }
    ExitCode::FAILURE
}

/// Which of our crates each folder may name in its manifest's `[dependencies]`.
const CRATES: [(&str, &[&str]); 6] = [
    ("shaders", &[]),
    ("transport", &[]),
    ("runtime", &["kyklos-shaders", "kyklos-transport"]),
    ("cuda-backend", &["kyklos"]),
    ("tests/oracle", &[]),
    ("cli", &["kyklos", "kyklos-shaders", "kyklos-transport", "kyklos-cuda", "kyklos-oracle"]),
];

/// Inside the runtime: what each module may use of the others (`error` and `Result` are everybody's). The order is
/// from the bottom to the top; whoever is missing may be used by nobody below.
const MODULES: [(&str, &[&str]); 25] = [
    ("dtype", &["error"]),
    ("named", &["error"]),
    ("strategy_list", &["error", "named"]),
    ("error", &["tokens"]),
    ("tokens", &[]),
    ("spans", &[]),
    ("mask", &["error", "spans"]),
    ("bias", &["dtype", "error"]),
    ("wire", &["error"]),
    ("problem", &["dtype", "error", "mask", "bias", "wire"]),
    ("lower", &["mask", "problem", "spans", "tokens"]),
    ("mesh", &["error", "problem"]),
    ("placement", &["error", "mesh", "named", "tokens"]),
    ("plan", &["error", "mesh", "bias", "placement", "problem", "strategy_list", "tokens", "wire"]),
    (
        "strategy",
        &["error", "lower", "mesh", "named", "placement", "plan", "problem", "strategy_list", "tokens"],
    ),
    (
        "simulate",
        &[
            "dtype",
            "error",
            "mask",
            "mesh",
            "placement",
            "plan",
            "problem",
            "strategy",
            "strategy_list",
            "tokens",
        ],
    ),
    ("host", &["error", "tokens"]),
    ("clock", &[]),
    ("meter", &["clock"]),
    ("backend", &["dtype", "error", "lower", "bias", "problem", "spans", "wire"]),
    ("collective", &["backend", "error", "meter", "plan"]),
    (
        "exec",
        &["backend", "clock", "collective", "dtype", "error", "lower", "meter", "plan", "problem", "wire"],
    ),
    ("collect", &["error", "host", "plan", "tokens"]),
    ("local", &["backend", "error", "exec", "host", "lasting", "plan"]),
    ("lasting", &["backend", "collective", "error", "exec", "local", "plan", "strategy"]),
];

fn layers(root: &Path) -> Vec<String> {
    let mut faults = Vec::new();
    for (folder, allowed) in CRATES {
        let manifest = read(&root.join(folder).join("Cargo.toml"));
        let dependencies = manifest.split("\n[").filter(|part| {
            let name = part.lines().next().unwrap_or_default().trim_start_matches('[');
            name.ends_with("dependencies]") && !name.starts_with("dev-")
        });
        for line in dependencies.flat_map(str::lines) {
            let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if name.starts_with("kyklos") && !allowed.contains(&name) {
                faults.push(format!("{folder}/Cargo.toml: may not depend on {name}"));
            }
        }
    }
    let source = root.join("runtime/src");
    let exports = exports(&read(&source.join("lib.rs")));
    for (module, allowed) in MODULES {
        for file in rust_files(&source.join(module)).into_iter().chain([source.join(format!("{module}.rs"))])
        {
            if !file.exists() || file.ends_with("tests.rs") {
                continue;
            }
            let text = read(&file);
            // In-module tests may use whatever they like.
            let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            for used in uses(text, &exports) {
                if used != module && used != "error" && !allowed.contains(&used.as_str()) {
                    faults.push(format!("{}: module {module} may not use {used}", relative(root, &file)));
                }
            }
        }
    }
    let known: BTreeSet<&str> = MODULES.iter().map(|(module, _)| *module).collect();
    for module in modules(&read(&source.join("lib.rs"))) {
        if !known.contains(module.as_str()) {
            faults.push(format!("runtime/src/lib.rs: module {module} has no place in the arrows of xtask"));
        }
    }
    faults
}

/// Modules declared in a lib.rs.
fn modules(lib: &str) -> Vec<String> {
    let declared = lib.lines().filter_map(|line| line.trim_start_matches("pub ").strip_prefix("mod "));
    declared.map(|name| name.trim_end_matches(';').to_owned()).collect()
}

/// From a name that lib.rs re-exports to the module it comes from.
fn exports(lib: &str) -> Vec<(String, String)> {
    let mut exports = Vec::new();
    for statement in lib.split("pub use ").skip(1) {
        let statement = statement.split(';').next().unwrap_or_default();
        let Some((module, names)) = statement.split_once("::") else {
            continue;
        };
        for name in names.trim_matches(['{', '}']).split(',') {
            let name = name.rsplit(" as ").next().unwrap_or_default().trim();
            exports.push((name.to_owned(), module.trim().to_owned()));
        }
    }
    exports
}

/// Modules that a source text uses through `crate::`.
fn uses(text: &str, exports: &[(String, String)]) -> BTreeSet<String> {
    let mut used = BTreeSet::new();
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        for path in line.split("crate::").skip(1) {
            let names: Vec<&str> = match path.strip_prefix('{') {
                Some(list) => list.split('}').next().unwrap_or_default().split(',').collect(),
                None => vec![path],
            };
            for name in names {
                let name =
                    name.trim().split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
                let module =
                    exports.iter().find(|(export, _)| export == name).map(|(_, module)| module.as_str());
                let module = module.unwrap_or(name);
                if !module.is_empty() && module != "Result" {
                    used.insert(module.to_owned());
                }
            }
        }
    }
    used
}

/// Lines that a source file may have; over 400 wants a reason in review.
const MOST_LINES: usize = 600;

fn sizes(root: &Path) -> Vec<String> {
    let folders = ["shaders", "transport", "runtime", "cuda-backend", "tests", "cli", "xtask"];
    let files = folders.iter().flat_map(|folder| rust_files(&root.join(folder)));
    files
        .filter_map(|file| {
            let lines = read(&file).lines().count();
            (lines > MOST_LINES)
                .then(|| format!("{}: {lines} lines, at most {MOST_LINES}", relative(root, &file)))
        })
        .collect()
}

fn deps(root: &Path) -> Vec<String> {
    let mut faults = Vec::new();
    for (arguments, absent) in [
        (
            &["-p", "kyklos", "--no-default-features", "--features", "cpu,wgpu"][..],
            &["quinn", "tokio", "rustls"][..],
        ),
        (&["-p", "kyklos", "--no-default-features"][..], &["wgpu", "rayon", "kyklos-shaders"][..]),
        (
            &["-p", "kyklos-transport", "--no-default-features"][..],
            &["quinn", "tokio", "rustls", "rcgen"][..],
        ),
        (&["-p", "kyklos-shaders"][..], &["wgpu", "naga"][..]),
    ] {
        let output = Command::new(env!("CARGO"))
            .current_dir(root)
            .args(["tree", "--quiet", "--edges", "normal", "--prefix", "none", "--format", "{p}"])
            .args(arguments)
            .output();
        let Ok(output) = output else {
            faults.push("cargo tree does not start".to_owned());
            continue;
        };
        if !output.status.success() {
            faults.push(format!("cargo tree {arguments:?}: {}", String::from_utf8_lossy(&output.stderr)));
        }
        let tree = String::from_utf8_lossy(&output.stdout).into_owned();
        for name in absent {
            if tree.lines().any(|line| line.split(' ').next() == Some(name)) {
                faults.push(format!("cargo tree {}: {name} must be absent", arguments.join(" ")));
            }
        }
    }
    faults
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut files = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() && path.file_name().is_none_or(|name| name != "target") {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn relative(root: &Path, file: &Path) -> String {
    file.strip_prefix(root).unwrap_or(file).display().to_string()
}
