//! The C++ compiler of this machine, for the fake driver and for the emulator's tests.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The first compiler that runs: `CXX`, g++, clang++ or c++.
///
/// # Panics
/// If there is none.
pub fn compiler() -> &'static str {
    static FOUND: OnceLock<String> = OnceLock::new();
    let find = || {
        let chosen = std::env::var("CXX").ok();
        let mut names = chosen.into_iter().chain(["g++", "clang++", "c++"].map(str::to_owned));
        let works = |name: &String| {
            Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success())
        };
        names
            .find(works)
            .expect("a C++ compiler is needed to build the emulator: install g++ or clang++, or set CXX")
    };
    FOUND.get_or_init(find)
}

/// The compiler with the options that the emulator needs, at an optimisation level such as `-O2`.
pub fn command(level: &str) -> Command {
    let mut command = Command::new(compiler());
    command.args(["-std=c++17", level, "-march=native", "-ffp-contract=off"]);
    // Fibers jump between stacks. The checks that some distributions enable by default report that as
    // an error.
    command.args(["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0"]);
    command
}

/// Runs a compiler.
///
/// # Panics
/// If it reports an error.
pub fn run(command: &mut Command) {
    let output = command.output().expect("the compiler starts");
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// A file name part that changes with the compiler, and with the names and contents of `files`.
///
/// # Panics
/// If a file cannot be read.
pub fn fingerprint(files: &[PathBuf]) -> String {
    let mut hash = DefaultHasher::new();
    compiler().hash(&mut hash);
    for file in files {
        file.hash(&mut hash);
        std::fs::read(file).expect("a source").hash(&mut hash);
    }
    format!("{:016x}", hash.finish())
}

/// The files in a folder and in its folders, in a fixed order.
///
/// # Panics
/// If a folder cannot be read.
pub fn files_in(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<_> = std::fs::read_dir(folder)
        .expect("a folder of sources")
        .map(|entry| entry.expect("a folder of sources").path())
        .collect();
    entries.sort();
    let files = |path: PathBuf| if path.is_dir() { files_in(&path) } else { vec![path] };
    entries.into_iter().flat_map(files).collect()
}
