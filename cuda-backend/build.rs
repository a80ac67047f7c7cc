//! Compiles the kernels if there is an nvcc: in `NVCC`, in `CUDA_HOME/bin`, or on the PATH. Without
//! nvcc the crate builds too, and NVRTC compiles its kernels at run time.
//!
//! Writes `images.rs`: the version of the toolkit, and names of architectures with their images,
//! deflated. `OUT_DIR` keeps the images, and in `.log` files the output of the compilers with the
//! register counts: `scripts/check/cuda.sh` reads both.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Each line: a virtual architecture, and the real ones for which its PTX is assembled to cubins.
const ARCHITECTURES: &str = include_str!("architectures.txt");

/// The virtual architecture whose PTX is embedded for newer devices. Code for an architecture that
/// ends with `a` does not run on newer devices.
const NEWER: &str = "compute_80";

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=architectures.txt");
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let mut list = String::new();
    let mut toolkit = 0;
    if let Some(nvcc) = nvcc() {
        toolkit = toolkit_of(&nvcc);
        let (fingerprint, stamp) = (fingerprint(&nvcc), out.join("fingerprint"));
        let architectures = architectures();
        let images = || architectures.iter().flat_map(|(_, real)| real).chain([&NEWER]);
        if fs::read_to_string(&stamp).ok().as_ref() != Some(&fingerprint) {
            std::thread::scope(|scope| {
                for (virtual_one, real) in &architectures {
                    scope.spawn(|| compile(&nvcc, virtual_one, real, &out));
                }
            });
            images().for_each(|name| pack(name, &out));
            fs::write(stamp, fingerprint).expect("OUT_DIR can be written");
        }
        for name in images() {
            let _ = writeln!(
                list,
                "    (\"{name}\", include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.z\"))),"
            );
        }
    }
    let embedded = format!(
        "static EMBEDDED: Embedded<'static> = Embedded {{ toolkit: {toolkit}, images: &[\n{list}] }};\n"
    );
    fs::write(out.join("images.rs"), embedded).expect("OUT_DIR can be written");
}

/// (virtual architecture, real architectures). The compiler's front end takes most of the time and
/// runs once for each virtual one.
fn architectures() -> Vec<(&'static str, Vec<&'static str>)> {
    let lines = ARCHITECTURES.lines().filter(|line| !line.starts_with('#'));
    let words = lines.map(str::split_whitespace);
    words.map(|mut words| (words.next().expect("no empty line"), words.collect())).collect()
}

/// The compiler, if there is one. If `NVCC` or `CUDA_HOME` names one that does not run, the build
/// fails.
fn nvcc() -> Option<PathBuf> {
    let runs =
        |path: &Path| Command::new(path).arg("--version").output().is_ok_and(|out| out.status.success());
    let named = |variable: &str| env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(path) = named("NVCC").or_else(|| named("CUDA_HOME").map(|home| home.join("bin/nvcc"))) {
        assert!(runs(&path), "{} does not run: correct or unset NVCC and CUDA_HOME", path.display());
        return Some(path);
    }
    Some(PathBuf::from("nvcc")).filter(|path| runs(path))
}

/// What nvcc says about its version.
fn version_of(nvcc: &Path) -> Vec<u8> {
    Command::new(nvcc).arg("--version").output().expect("it ran a moment ago").stdout
}

/// The version of the toolkit, as 1000 · major + 10 · minor. nvcc says `release 13.0`.
fn toolkit_of(nvcc: &Path) -> u32 {
    let said = String::from_utf8_lossy(&version_of(nvcc)).into_owned();
    let number = said.split_once("release ").and_then(|(_, rest)| rest.split([',', ' ']).next());
    let version = number.and_then(|number| {
        let (major, minor) = number.split_once('.')?;
        Some(1000 * major.parse::<u32>().ok()? + 10 * minor.parse::<u32>().ok()?)
    });
    version.unwrap_or_else(|| panic!("{} does not tell its release: {said}", nvcc.display()))
}

/// A hash of everything that the images depend on. Builds with and without nvcc may alternate in
/// one `OUT_DIR`; images with the same hash are not compiled again.
fn fingerprint(nvcc: &Path) -> String {
    let version = version_of(nvcc);
    let mut hash = DefaultHasher::new();
    (nvcc, version, include_str!("build.rs"), ARCHITECTURES).hash(&mut hash);
    let mut sources: Vec<_> = [kernels(), kernels().join("backward"), kernels().join("cuda")]
        .into_iter()
        .flat_map(|folder| fs::read_dir(folder).expect("a folder of sources").flatten())
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect();
    sources.sort();
    for source in sources {
        (fs::read(&source).expect("a source"), source).hash(&mut hash);
    }
    format!("{:016x}", hash.finish())
}

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// Compiles all kernels to PTX, and assembles a cubin from it for each of `real`.
fn compile(nvcc: &Path, virtual_one: &str, real: &[&str], out: &Path) {
    let kernels = kernels();
    let ptx = out.join(virtual_one).with_extension("ptx");
    let mut command = Command::new(nvcc);
    command.args(["--std=c++17", "-O3", "-ptx", "-arch", virtual_one, "-o"]).arg(&ptx);
    command.arg("-I").arg(kernels.join("cuda")).arg("-I").arg(&kernels).arg(kernels.join("kernels.cu"));
    run(&mut command, &out.join(virtual_one));
    for name in real {
        let mut command = Command::new(nvcc);
        command.args(["-cubin", "-Xptxas", "-v", "-arch", name, "-o"]);
        run(command.arg(out.join(name).with_extension("cubin")).arg(&ptx), &out.join(name));
    }
}

/// Runs a compiler and writes its output to `log`.log.
fn run(command: &mut Command, log: &Path) {
    let output = command.output().expect("it ran a moment ago");
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&said));
    fs::write(log.with_extension("log"), said).expect("OUT_DIR can be written");
}

fn pack(name: &str, out: &Path) {
    let kind = if name == NEWER { "ptx" } else { "cubin" };
    let mut bytes = fs::read(out.join(name).with_extension(kind)).expect("nvcc wrote it");
    if name == NEWER {
        // The driver expects a zero byte at the end of PTX.
        bytes.push(0);
    }
    let packed = miniz_oxide::deflate::compress_to_vec_zlib(&bytes, 9);
    fs::write(out.join(name).with_extension("z"), packed).expect("OUT_DIR can be written");
}
