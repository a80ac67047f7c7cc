//! For tests: NVIDIA's driver and its run-time compiler on a CPU, as far as the CUDA backend uses them.
//!
//! [`folder`] holds a `libcuda.so.1` and a `libnvrtc.so`, built once by the C++ compiler of this machine. A process that
//! starts with it in `LD_LIBRARY_PATH` finds GPUs: streams are threads that dawdle by chance, memory comes as NaN, and
//! launches run the kernels in the emulator. `KYKLOS_FAKE_CUDA` (see `driver/fake.h`) says how many GPUs, what seed,
//! and which call or operation fails.
//!
//! It ends the process with exit code 86 when the host does what it must not: a freed buffer, event or stream that is
//! used, memory that is nobody's. It ends it with 87 when something was left behind.

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The folder with both libraries.
///
/// # Panics
/// Without a C++ compiler (`CXX`, g++, clang++ or c++), or when it finds a fault: tests cannot go on then.
pub fn folder() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build)
}

/// What `LD_LIBRARY_PATH` has to be for a process that is to find the fake driver.
pub fn library_path() -> OsString {
    let before = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::join_paths(std::iter::once(folder().to_owned()).chain(std::env::split_paths(&before)))
        .expect("target folders have no colon in their names")
}

fn build() -> PathBuf {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let backend = home.parent().expect("the folder of the backend");
    let [driver, emulator, kernels] =
        [home.join("driver"), backend.join("emulator"), backend.join("kernels")];
    let files = sources(&[&driver, &emulator, &kernels]);
    let mut hash = DefaultHasher::new();
    compiler().hash(&mut hash);
    for file in &files {
        file.hash(&mut hash);
        std::fs::read(file).expect("a source").hash(&mut hash);
    }
    // Beside the program that runs: in the target folder.
    let program = std::env::current_exe().expect("a test knows where it is");
    let target = program.parent().expect("a file is in a folder").join("fake-cuda");
    let done = target.join(format!("{:016x}", hash.finish()));
    if done.exists() {
        return done;
    }
    let unfinished = target.join(format!("{:016x}-{}", hash.finish(), std::process::id()));
    std::fs::create_dir_all(&unfinished).expect("target can be written");
    let mut command = shared(&unfinished.join("libcuda.so.1"));
    command.arg("-I").arg(&emulator).arg("-I").arg(&kernels);
    command.args(["driver.cpp", "kernels.cpp", "world.cpp"].map(|name| driver.join(name)));
    command.args(["machine.cpp", "instructions.cpp", "hopper.cpp"].map(|name| emulator.join(name)));
    run(command.args(["-x", "c++"]).arg(kernels.join("kernels.cu")));
    run(shared(&unfinished.join("libnvrtc.so")).arg(driver.join("nvrtc.cpp")));
    // Whole or not at all; who comes second finds it there.
    if std::fs::rename(&unfinished, &done).is_err() {
        std::fs::remove_dir_all(&unfinished).expect("target can be written");
    }
    assert!(done.exists(), "{} could not be made", done.display());
    done
}

/// All sources in these folders.
fn sources(folders: &[&PathBuf]) -> Vec<PathBuf> {
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).expect("a folder of sources"));
    let mut files: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    files
}

fn shared(into: &Path) -> Command {
    let mut command = Command::new(compiler());
    command.args(["-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]);
    command.args(["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-fvisibility=hidden"]);
    // Fibers jump between stacks, which the checks that some distributions switch on take for a fault.
    command.args(["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0"]);
    command.arg("-o").arg(into);
    command
}

fn run(command: &mut Command) {
    let output = command.output().expect("the compiler starts");
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

fn compiler() -> &'static str {
    static FOUND: OnceLock<String> = OnceLock::new();
    let find = || {
        let chosen = std::env::var("CXX").ok();
        let mut names = chosen.into_iter().chain(["g++", "clang++", "c++"].map(str::to_owned));
        let works = |name: &String| {
            Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success())
        };
        names.find(works).expect("a C++ compiler builds the fake driver: install g++ or clang++, or set CXX")
    };
    FOUND.get_or_init(find)
}
