//! For tests: NVIDIA's driver, its run-time compiler and NCCL on a CPU, as far as the CUDA backend
//! uses them.
//!
//! [`folder`] holds a `libcuda.so.1`, a `libnvrtc.so` and a `libnccl.so.2`, which the C++ compiler
//! of this machine builds once. A process that starts with this folder in `LD_LIBRARY_PATH` finds
//! GPUs: each stream is a thread that sleeps at random, new memory is NaN, and launches run the
//! kernels in the emulator. `KYKLOS_FAKE_CUDA` (see `driver/fake.h`) sets the number of GPUs, the
//! seed, and which call or operation fails.
//!
//! Ranks of NCCL are threads of one process or processes of one machine; messages go through shared
//! memory. `KYKLOS_FAKE_NCCL` (see `nccl/fake_nccl.h`) sets delays, and which rank fails, hangs or
//! dies at which of its groups.
//!
//! The process ends with exit code 86 when the host breaks a rule of the API, for example when it
//! uses a freed buffer, event or stream. It ends with 87 when objects are left at exit.

pub mod cxx;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The folder with the libraries.
///
/// # Panics
/// If there is no C++ compiler, or if it reports an error.
pub fn folder() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build)
}

/// The value of `LD_LIBRARY_PATH` with which a process finds the fake driver.
pub fn library_path() -> OsString {
    let before = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::join_paths(std::iter::once(folder().to_owned()).chain(std::env::split_paths(&before)))
        .expect("target folders have no colon in their names")
}

/// An object file of all kernels for the emulator: the fake driver and the emulator's tests link
/// it, for its compilation takes longer than that of all else here. Optimised for a short
/// compilation: with `-O2` the kernels take the same time.
///
/// # Panics
/// If there is no C++ compiler, or if it reports an error.
pub fn kernels() -> PathBuf {
    let [emulator, kernels] = ["emulator", "kernels"].map(|name| backend().join(name));
    let mut files = [cxx::files_in(&emulator), cxx::files_in(&kernels)].concat();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "h" || extension == "cu"));
    let target = target();
    // Several tests need it at the same time. The first one compiles, the others wait.
    let lock = std::fs::File::create(target.join("kernels.lock")).expect("target can be written");
    lock.lock().expect("target is on a file system with locks");
    let fingerprint = cxx::fingerprint(&files);
    let object = target.join(format!("{fingerprint}-kernels.o"));
    if !object.exists() {
        let unfinished = target.join(format!("{fingerprint}-kernels.part"));
        let mut command = cxx::command("-O1");
        command.args(["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]);
        command.arg("-I").arg(&emulator).arg("-I").arg(&kernels).arg("-c").arg("-o").arg(&unfinished);
        cxx::run(command.args(["-x", "c++"]).arg(kernels.join("kernels.cu")));
        std::fs::rename(&unfinished, &object).expect("both are in one folder");
    }
    object
}

fn home() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn backend() -> &'static Path {
    home().parent().expect("the folder of the backend")
}

/// Where libraries and objects are kept. Beside the running test, which is in a folder of the
/// target folder; an example uses that of the tests.
fn target() -> PathBuf {
    let program = std::env::current_exe().expect("a test knows where it is");
    let target = program.parent().expect("a file is in a folder").with_file_name("deps").join("fake-cuda");
    std::fs::create_dir_all(&target).expect("target can be written");
    target
}

fn build() -> PathBuf {
    let [driver, nccl] = ["driver", "nccl"].map(|name| home().join(name));
    let [emulator, kernel_sources] = ["emulator", "kernels"].map(|name| backend().join(name));
    let files = [cxx::files_in(home()), cxx::files_in(&emulator), cxx::files_in(&kernel_sources)].concat();
    let fingerprint = cxx::fingerprint(&files);
    let target = target();
    let done = target.join(&fingerprint);
    if done.exists() {
        return done;
    }
    let unfinished = target.join(format!("{fingerprint}-{}", std::process::id()));
    std::fs::create_dir_all(&unfinished).expect("target can be written");
    let mut command = shared(&unfinished.join("libcuda.so.1"));
    command.arg("-I").arg(home()).arg("-I").arg(&emulator).arg("-I").arg(&kernel_sources);
    command.args(["driver.cpp", "memory.cpp", "kernels.cpp", "state.cpp"].map(|name| driver.join(name)));
    command.args(["machine.cpp", "instructions.cpp", "hopper.cpp"].map(|name| emulator.join(name)));
    cxx::run(command.arg(kernels()));
    cxx::run(shared(&unfinished.join("libnvrtc.so")).arg(driver.join("nvrtc.cpp")));
    let mut command = shared(&unfinished.join("libnccl.so.2"));
    command.arg("-I").arg(home()).args(["nccl.cpp", "messages.cpp"].map(|name| nccl.join(name)));
    // It loads the fake driver, or finds it loaded by this name.
    cxx::run(command.arg("-L").arg(&unfinished).arg("-l:libcuda.so.1"));
    // Renamed when it is complete. If another process was first, its folder is used.
    if std::fs::rename(&unfinished, &done).is_err() {
        std::fs::remove_dir_all(&unfinished).expect("target can be written");
    }
    assert!(done.exists(), "{} could not be made", done.display());
    done
}

/// The compiler, set up to build a shared library.
fn shared(into: &Path) -> Command {
    let mut command = cxx::command("-O2");
    command.args(["-fPIC", "-shared", "-pthread", "-fvisibility=hidden"]);
    command.args(["-Wall", "-Wextra", "-Wno-unknown-pragmas"]);
    command.arg("-o").arg(into);
    command
}
