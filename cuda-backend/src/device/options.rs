//! Options of a backend.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use kyklos::{Error, Result};

/// Options of a [`CudaBackend`](crate::CudaBackend).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Limit for all buffers together, in bytes. `None`: the memory of the device. What only a
    /// message to a rank of another device still has, or the copy of one, does not count.
    pub max_memory_bytes: Option<u64>,
    /// Folder for kernels that are compiled at run time, by default
    /// [`kyklos::machine::cache_folder`]. `None`: they are compiled again at each start.
    pub cache: Option<PathBuf>,
    /// If the device completes nothing for this long, it counts as lost. Must be longer than the
    /// longest kernel, and longer than other processes keep the device busy. During
    /// [`ShortWork`](kyklos::backend::ShortWork) it is
    /// [`ShortWork::AT_MOST`](kyklos::backend::ShortWork::AT_MOST), if that is shorter.
    pub stuck_after: Duration,
    /// Whether sequences of launches that repeat are submitted as CUDA graphs. If not, profilers
    /// and debuggers see each launch by itself.
    pub graphs: bool,
    /// Whether a Hopper GPU gets the kernels with wgmma and TMA. If not, it gets those of all GPUs,
    /// as one of sm_80 does.
    pub wgmma: bool,
    /// For developers of kernels: a cubin with some kernels, which are launched instead of those of
    /// the same names; all others come from the image of the device, as always. So a variant of
    /// a kernel needs no new program.
    ///
    /// Each has the arguments, threads, dynamic shared memory and tile of the kernel that it
    /// replaces. Nothing checks its tile. More threads or more shared memory, with its static
    /// one, than the driver allows it is an error of the launch. Anything else that differs
    /// is a wrong result or an access outside of the buffers. The device's
    /// [`kernel`](kyklos::backend::DeviceInfo::kernel) names the file, the hash of its contents
    /// and the kernels.
    pub replacement: Option<PathBuf>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            max_memory_bytes: None,
            cache: kyklos::machine::cache_folder(),
            stuck_after: Duration::from_secs(120),
            graphs: true,
            wgmma: true,
            replacement: None,
        }
    }
}

impl CudaOptions {
    /// The default options, with what the environment says:
    ///
    /// | variable | value | field |
    /// |---|---|---|
    /// | `KYKLOS_CUDA_GRAPHS` | `off` | [`graphs`](Self::graphs) |
    /// | `KYKLOS_CUDA_WGMMA` | `off` | [`wgmma`](Self::wgmma) |
    /// | `KYKLOS_CUDA_IMAGE` | a file | [`replacement`](Self::replacement) |
    ///
    /// # Errors
    /// [`Error::Request`] for another value. The file is read when a device is opened.
    pub fn from_environment() -> Result<Self> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(value_of: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let is_on = |name, off: &str| match value_of(name) {
            None => Ok(true),
            Some(value) if value == "off" => Ok(false),
            Some(value) => Err(Error::request(
                format!("{name} is `{}`", value.display()),
                format!("set it to off, which {off}, or leave it unset"),
            )),
        };
        let replacement = value_of("KYKLOS_CUDA_IMAGE");
        if replacement.as_ref().is_some_and(|file| file.is_empty()) {
            return Err(Error::request(
                "KYKLOS_CUDA_IMAGE is empty",
                "set it to the cubin whose kernels replace others, or leave it unset",
            ));
        }
        Ok(Self {
            graphs: is_on("KYKLOS_CUDA_GRAPHS", "has profilers see every launch by itself")?,
            wgmma: is_on("KYKLOS_CUDA_WGMMA", "uses the kernels of sm_80 on every GPU")?,
            replacement: replacement.map(PathBuf::from),
            ..Self::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_changes_its_option_and_another_value_is_refused() {
        let with = |set: &'static str, value: &'static str| {
            CudaOptions::from_variables(|name| (name == set).then(|| value.into()))
        };
        let default = CudaOptions::default();
        assert_eq!(with("", ""), Ok(default.clone()));
        assert_eq!(with("KYKLOS_CUDA_GRAPHS", "off"), Ok(CudaOptions { graphs: false, ..default.clone() }));
        assert_eq!(with("KYKLOS_CUDA_WGMMA", "off"), Ok(CudaOptions { wgmma: false, ..default.clone() }));
        let replacement = Some("a/b.cubin".into());
        assert_eq!(with("KYKLOS_CUDA_IMAGE", "a/b.cubin"), Ok(CudaOptions { replacement, ..default }));
        for (name, value) in [
            ("KYKLOS_CUDA_GRAPHS", "no"),
            ("KYKLOS_CUDA_WGMMA", "0"),
            ("KYKLOS_CUDA_WGMMA", "OFF"),
            ("KYKLOS_CUDA_WGMMA", ""),
            ("KYKLOS_CUDA_IMAGE", ""),
        ] {
            let refused = with(name, value).unwrap_err();
            assert!(refused.is_request() && refused.to_string().starts_with(name), "{refused}");
        }
    }
}
