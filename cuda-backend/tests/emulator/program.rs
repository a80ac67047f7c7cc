//! The emulator as a program: built here by the C++ compiler, run for each job.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::parallel::in_parallel;

/// An emulator with some kernels in it.
#[derive(Clone, Debug)]
pub(crate) struct Program(PathBuf);

/// The emulator with all kernels of this crate and the probes.
pub(crate) fn emulator() -> &'static Program {
    static BUILT: OnceLock<Program> = OnceLock::new();
    BUILT.get_or_init(|| {
        let kernels = folder().join("kernels");
        let sources = [kernels.join("kernels.cu"), folder().join("emulator/probes.cu")];
        Program::build(&kernels, &sources)
    })
}

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

impl Program {
    /// The emulator with the kernels in `sources`, which may include what is in `headers`.
    pub(crate) fn build(headers: &Path, sources: &[PathBuf]) -> Self {
        let emulator = folder().join("emulator");
        let machine = ["machine.cpp", "instructions.cpp", "hopper.cpp", "main.cpp"]
            .map(|name| (emulator.join(name), folder().join("kernels")));
        // The kernels first: they take longest.
        let all: Vec<_> =
            sources.iter().map(|source| (source.clone(), headers.to_owned())).chain(machine).collect();
        let mut objects = in_parallel(all.len(), |n| Some(object(&all[n].0, &all[n].1)));
        objects.sort();
        let program = made_of(&objects, "emulate");
        if !program.exists() {
            compile(Command::new(compiler()).args(&objects), &program);
        }
        Self(program)
    }

    /// Runs a job. The answer, or what was wrong: the emulator's own words, or the signal that ended it.
    pub(crate) fn run(&self, job: &[u8]) -> Result<Vec<u8>, String> {
        let mut child = Command::new(&self.0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the emulator was built");
        // It reads all of the job before it answers, or ends early, and then this write fails.
        let written = child.stdin.take().expect("piped").write_all(job);
        let output = child.wait_with_output().expect("the emulator ends");
        if output.status.success() {
            written.expect("it read all of the job");
            return Ok(output.stdout);
        }
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(if words.is_empty() { output.status.to_string() } else { words })
    }
}

fn compiler() -> String {
    static FOUND: OnceLock<String> = OnceLock::new();
    let find = || {
        let chosen = std::env::var("CXX").ok();
        let names = chosen.into_iter().chain(["g++", "clang++", "c++"].map(str::to_owned));
        let works = |name: &String| {
            Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success())
        };
        names
            .into_iter()
            .find(works)
            .expect("a C++ compiler builds the emulator: install g++ or clang++, or set CXX")
    };
    FOUND.get_or_init(find).clone()
}

/// The object of a source, which is compiled unless one of this source, these headers and this machine is there.
fn object(source: &Path, headers: &Path) -> PathBuf {
    let mut read = vec![source.to_owned()];
    for folder in [headers, &folder().join("kernels"), &folder().join("emulator")] {
        let entries =
            std::fs::read_dir(folder).expect("a folder of sources").flatten().map(|entry| entry.path());
        read.extend(entries.filter(|path| path.extension().is_some_and(|extension| extension == "h")));
    }
    let stem = source.file_stem().expect("a file").to_string_lossy().into_owned();
    let object = made_of(&read, &format!("{stem}.o"));
    if !object.exists() {
        let mut command = Command::new(compiler());
        // Kernels are large, and changed ones run for a moment: compiling them must not take longer than that.
        let level = if source.extension().is_some_and(|extension| extension == "cu") { "-O1" } else { "-O2" };
        command.args(["-std=c++17", level, "-march=native", "-ffp-contract=off"]);
        // Fibers jump between stacks, which the checks that some distributions switch on take for a fault.
        command.args(["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0"]);
        command.arg("-I").arg(folder().join("emulator")).arg("-I").arg(headers);
        compile(command.args(["-c", "-x", "c++"]).arg(source), &object);
    }
    object
}

/// A path that changes with what is in `files`.
fn made_of(files: &[PathBuf], name: &str) -> PathBuf {
    let mut hash = DefaultHasher::new();
    compiler().hash(&mut hash);
    for file in files {
        file.hash(&mut hash);
        std::fs::read(file).expect("a source").hash(&mut hash);
    }
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{:016x}-{name}", hash.finish()))
}

/// Runs a compiler; what it makes appears whole or not at all, for tests build at the same time.
fn compile(command: &mut Command, into: &Path) {
    let unfinished = into.with_extension(format!("{:?}", std::thread::current().id()));
    let output = command.arg("-o").arg(&unfinished).output().expect("the compiler starts");
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&unfinished, into).expect("both are in one folder");
}
