//! What this machine is: its memory, its processor, whether this program can load drivers, and
//! where a user keeps what can be made again.

#[cfg(target_os = "linux")]
mod control_group;

#[cfg(not(target_arch = "wasm32"))]
use std::{env, ffi::OsString, path::PathBuf};

/// Bytes of memory that this process may use: those of the machine, or of its control group (Linux)
/// or a parent of that if one has less, such as a systemd unit with `MemoryMax=` or a step of
/// Slurm. `None` where the system does not tell it.
#[cfg(not(target_arch = "wasm32"))]
pub fn memory_bytes() -> Option<u64> {
    memory_bytes_of(1)
}

/// Bytes of memory that this many processes like this one may use together: as [`memory_bytes`],
/// but where this process is alone in its control group, each of the others has such a group too.
/// `None` where the system does not tell it.
#[cfg(not(target_arch = "wasm32"))]
pub fn memory_bytes_of(processes: u32) -> Option<u64> {
    let memory = sysinfo::MemoryRefreshKind::nothing().with_ram();
    let system = sysinfo::System::new_with_specifics(sysinfo::RefreshKind::nothing().with_memory(memory));
    // 0 where /proc is not mounted, as after a bare chroot.
    let total = Some(system.total_memory()).filter(|bytes| *bytes > 0)?;
    #[cfg(target_os = "linux")]
    let total = match control_group::memory_limit_bytes("/".as_ref(), processes) {
        Some(limit) => limit.min(total),
        None => total,
    };
    #[cfg(not(target_os = "linux"))]
    let _ = processes;
    Some(total)
}

/// A page of a browser is not told.
#[cfg(target_arch = "wasm32")]
pub fn memory_bytes() -> Option<u64> {
    None
}

/// The name of the processor, or its architecture where the system does not tell a name.
#[cfg(not(target_arch = "wasm32"))]
pub fn processor_name() -> String {
    let kind = sysinfo::RefreshKind::nothing().with_cpu(sysinfo::CpuRefreshKind::nothing());
    let system = sysinfo::System::new_with_specifics(kind);
    let name = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| env::consts::ARCH.to_owned())
}

/// The name of this machine. `None` where the system does not tell it.
#[cfg(not(target_arch = "wasm32"))]
pub fn host_name() -> Option<String> {
    sysinfo::System::host_name().filter(|name| !name.is_empty())
}

/// The architecture: a page of a browser is told no name.
#[cfg(target_arch = "wasm32")]
pub fn processor_name() -> String {
    std::env::consts::ARCH.to_owned()
}

/// Whether this program can load the libraries of drivers. A static program on Linux (musl) cannot,
/// whatever is installed.
pub const fn can_load_drivers() -> bool {
    !cfg!(all(unix, target_feature = "crt-static"))
}

/// The folder for what Kyklos can make again, such as compiled kernels: `KYKLOS_CACHE_DIR`, or else
/// a folder of the platform for this user. `None` if the user has none.
#[cfg(not(target_arch = "wasm32"))]
pub fn cache_folder() -> Option<PathBuf> {
    Folder::Caches.find(|name| env::var_os(name))
}

/// The folder for what this user has set up and Kyklos must not lose, such as invitations. It need
/// not exist. `None` where the environment does not say where it is.
#[cfg(not(target_arch = "wasm32"))]
pub fn settings_folder() -> Option<PathBuf> {
    Folder::Settings.find(|name| env::var_os(name))
}

#[cfg(not(target_arch = "wasm32"))]
#[derive(Clone, Copy)]
enum Folder {
    Caches,
    Settings,
}

#[cfg(not(target_arch = "wasm32"))]
impl Folder {
    /// By these variables. Relative paths of the platform and empty names are ignored.
    fn find(self, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let (own, windows, mac, xdg, home) = match self {
            Self::Caches => {
                ("KYKLOS_CACHE_DIR", ("LOCALAPPDATA", "cache"), "Caches", "XDG_CACHE_HOME", ".cache")
            }
            Self::Settings => (
                "KYKLOS_SETTINGS_DIR",
                ("APPDATA", "settings"),
                "Application Support",
                "XDG_CONFIG_HOME",
                ".config",
            ),
        };
        if let Some(own) = variable(own).filter(|own| !own.is_empty()) {
            return Some(PathBuf::from(own));
        }
        if cfg!(windows) {
            return Some(absolute(windows.0)?.join("kyklos").join(windows.1));
        }
        if cfg!(target_os = "macos") {
            return Some(absolute("HOME")?.join("Library").join(mac).join("kyklos"));
        }
        let base = absolute(xdg).or_else(|| Some(absolute("HOME")?.join(home)))?;
        Some(base.join("kyklos"))
    }
}

#[cfg(all(test, not(target_arch = "wasm32")))]
mod tests {
    use super::*;

    #[test]
    fn the_cache_folder_is_the_named_one_or_that_of_the_platform() {
        let of = |set: &[(&str, &str)]| {
            let set: Vec<(String, OsString)> =
                set.iter().map(|(k, v)| ((*k).to_owned(), (*v).into())).collect();
            Folder::Caches
                .find(|name| set.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone()))
        };
        assert_eq!(of(&[("KYKLOS_CACHE_DIR", "here")]), Some(PathBuf::from("here")));
        assert_eq!(of(&[("KYKLOS_CACHE_DIR", "")]), None);
        assert_eq!(of(&[]), None);
        if cfg!(all(unix, not(target_os = "macos"))) {
            let home = [("HOME", "/home/me"), ("XDG_CACHE_HOME", "relative")];
            assert_eq!(of(&home), Some(PathBuf::from("/home/me/.cache/kyklos")));
            let caches = [("HOME", "/home/me"), ("XDG_CACHE_HOME", "/caches")];
            assert_eq!(of(&caches), Some(PathBuf::from("/caches/kyklos")));
        }
    }

    #[test]
    fn the_machine_says_how_much_memory_it_has() {
        assert!(memory_bytes().is_some_and(|bytes| bytes > 1 << 28));
        assert!(memory_bytes_of(2) >= memory_bytes());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_and_processor_are_those_of_the_kernel() {
        let read = |path: &str| std::fs::read_to_string(path).unwrap();
        let memory = read("/proc/meminfo");
        let line = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
        let total: u64 = line.trim().strip_suffix("kB").unwrap().trim().parse().unwrap();
        assert!(memory_bytes().is_some_and(|bytes| bytes <= total * 1024));
        if let Some(line) = read("/proc/cpuinfo").lines().find(|line| line.starts_with("model name")) {
            assert_eq!(processor_name(), line.split_once(':').unwrap().1.trim());
        }
    }
}
