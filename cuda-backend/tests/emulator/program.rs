//! The emulator as a program: built by the C++ compiler, run for each job.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use kyklos_fake_cuda::cxx;

use crate::parallel::in_parallel;

/// An emulator with some kernels.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    path: PathBuf,
    /// Processor time after which a run is ended, in seconds: a kernel with a planted bug may have
    /// no end.
    limit_s: Option<u32>,
}

/// The emulator with all kernels of this crate and the probes.
pub(crate) fn emulator() -> &'static Program {
    static BUILT: OnceLock<Program> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut objects = objects(&folder().join("kernels"), &[folder().join("emulator/probes.cu")]);
        objects.push(kyklos_fake_cuda::kernels());
        Program::link(objects)
    })
}

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

impl Program {
    /// Builds the emulator with the kernels in `sources`, which may include headers of the folder
    /// `headers`.
    pub(crate) fn build(headers: &Path, sources: &[PathBuf]) -> Self {
        Self::link(objects(headers, sources))
    }

    fn link(mut objects: Vec<PathBuf>) -> Self {
        objects.sort();
        let program = path_for(&objects, "emulate");
        if !program.exists() {
            compile(Command::new(cxx::compiler()).args(&objects), &program);
        }
        Self { path: program, limit_s: None }
    }

    /// The same, whose runs end after `limit_s` seconds of processor time with an error.
    pub(crate) fn limited(self, limit_s: u32) -> Self {
        Self { limit_s: Some(limit_s), ..self }
    }

    /// Runs a job. Returns its answer, or as error the emulator's message or the signal that ended
    /// it.
    pub(crate) fn run(&self, job: &[u8]) -> Result<Vec<u8>, String> {
        let limit = self.limit_s.map(|seconds| ("KYKLOS_EMULATOR_CPU_SECONDS", seconds.to_string()));
        let mut child = Command::new(&self.path)
            .envs(limit)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the emulator was built");
        // The emulator reads the whole job before it answers. If it ends early, this write fails.
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

/// The objects of `sources` and of the emulator itself.
fn objects(headers: &Path, sources: &[PathBuf]) -> Vec<PathBuf> {
    let emulator = folder().join("emulator");
    let machine = ["machine.cpp", "instructions.cpp", "hopper.cpp", "main.cpp"]
        .map(|name| (emulator.join(name), folder().join("kernels")));
    // The kernels first: they take longest.
    let all: Vec<_> =
        sources.iter().map(|source| (source.clone(), headers.to_owned())).chain(machine).collect();
    in_parallel(all.len(), |n| Some(object(&all[n].0, &all[n].1)))
}

/// The object of a source. It is compiled unless there is one of the same source, headers and
/// compiler.
fn object(source: &Path, headers: &Path) -> PathBuf {
    let mut read = vec![source.to_owned()];
    for folder in [headers, &folder().join("kernels"), &folder().join("emulator")] {
        let files = cxx::files_in(folder).into_iter();
        read.extend(files.filter(|path| path.extension().is_some_and(|extension| extension == "h")));
    }
    let stem = source.file_stem().expect("a file").to_string_lossy().into_owned();
    let object = path_for(&read, &format!("{stem}.o"));
    if !object.exists() {
        // Kernels with planted bugs run only for a moment, so they are compiled fast rather than well.
        let level = if source.extension().is_some_and(|extension| extension == "cu") { "-O1" } else { "-O2" };
        let mut command = cxx::command(level);
        command.arg("-I").arg(folder().join("emulator")).arg("-I").arg(headers);
        compile(command.args(["-c", "-x", "c++"]).arg(source), &object);
    }
    object
}

/// A path that changes with the contents of `files`.
fn path_for(files: &[PathBuf], name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", cxx::fingerprint(files)))
}

/// Runs a compiler. Tests build at the same time, so its output is renamed when it is complete.
fn compile(command: &mut Command, into: &Path) {
    let unfinished = into.with_extension(format!("{:?}", std::thread::current().id()));
    cxx::run(command.arg("-o").arg(&unfinished));
    std::fs::rename(&unfinished, into).expect("both are in one folder");
}
