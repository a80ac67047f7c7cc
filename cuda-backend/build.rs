//! Compiles the kernels where there is an nvcc: in `NVCC`, in `CUDA_HOME`, or on the PATH. Where there is none the crate
//! builds all the same, and its kernels are compiled at run time.
//!
//! Writes `images.rs`: names of architectures, and what runs on them, deflated.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names of images, and how nvcc is told: cubins run on their own generation, PTX on whatever is newer.
const IMAGES: [(&str, &str, &str); 5] = [
    ("sm_80", "arch=compute_80,code=sm_80", "-cubin"),
    ("sm_86", "arch=compute_86,code=sm_86", "-cubin"),
    ("sm_89", "arch=compute_89,code=sm_89", "-cubin"),
    ("sm_90a", "arch=compute_90a,code=sm_90a", "-cubin"),
    ("compute_90", "arch=compute_90,code=compute_90", "-ptx"),
];

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let mut list = String::from("pub(crate) static IMAGES: &[(&str, &[u8])] = &[\n");
    if let Some(nvcc) = nvcc() {
        // Two at a time: what it takes is mostly one core, and builds share theirs.
        for pair in IMAGES.chunks(2) {
            std::thread::scope(|scope| {
                for (name, target, kind) in pair {
                    scope.spawn(|| compile(&nvcc, name, target, kind, &out));
                }
            });
        }
        for (name, ..) in IMAGES {
            let _ = writeln!(
                list,
                "    (\"{name}\", include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.z\"))),"
            );
        }
    }
    list.push_str("];\n");
    fs::write(out.join("images.rs"), list).expect("OUT_DIR can be written");
}

/// The compiler, unless there is none. One that is named and does not run is a mistake, and ends the build.
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

fn compile(nvcc: &Path, name: &str, target: &str, kind: &str, out: &Path) {
    let image = out.join(name);
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut command = Command::new(nvcc);
    command.args(["--std=c++17", "-O3", kind, "-gencode", target, "-o"]).arg(&image);
    command.arg("-I").arg(kernels.join("cuda")).arg("-I").arg(&kernels).arg(kernels.join("kernels.cu"));
    let output = command.output().expect("it ran a moment ago");
    assert!(
        output.status.success(),
        "{command:?}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let mut bytes = fs::read(&image).expect("nvcc wrote it");
    if kind == "-ptx" {
        // The driver takes PTX as a text that ends with a zero byte.
        bytes.push(0);
    }
    let packed = miniz_oxide::deflate::compress_to_vec_zlib(&bytes, 9);
    fs::write(out.join(format!("{name}.z")), packed).expect("OUT_DIR can be written");
}
