//! The stand-ins for GPUs, and how this program runs over one.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::table::Kernels;

/// A GPU without hardware: a Vulkan driver over a no-op kernel driver.
#[derive(Debug)]
pub(crate) struct Stand {
    /// Its name in the table.
    pub(crate) name: &'static str,
    /// The Vulkan driver: `libvulkan_DRIVER.so`.
    driver: &'static str,
    /// The kernel driver: `libSHIM_noop_drm_shim.so`.
    shim: &'static str,
    /// What chooses the GPU.
    environment: Option<(&'static str, &'static str)>,
    /// Whether it is among those that every change is held against.
    pub(crate) smoke: bool,
}

const fn stand(
    name: &'static str,
    driver: &'static str,
    shim: &'static str,
    environment: Option<(&'static str, &'static str)>,
    smoke: bool,
) -> Stand {
    Stand { name, driver, shim, environment, smoke }
}

/// The GPUs of the table. Debian's package has no stand-in for Intel's.
#[rustfmt::skip]
pub(crate) const DEVICES: [Stand; 13] = [
    stand("vega20", "radeon", "amdgpu", Some(("AMDGPU_GPU_ID", "vega20")), false),
    stand("rdna2", "radeon", "amdgpu", Some(("AMDGPU_GPU_ID", "navi21")), false),
    stand("rdna3", "radeon", "amdgpu", Some(("AMDGPU_GPU_ID", "navi31")), true),
    stand("rdna4", "radeon", "amdgpu", Some(("AMDGPU_GPU_ID", "gfx1201")), true),
    stand("ampere", "nouveau", "nouveau", Some(("NOUVEAU_CHIPSET", "0x172")), true),
    stand("ada", "nouveau", "nouveau", Some(("NOUVEAU_CHIPSET", "0x192")), false),
    stand("blackwell", "nouveau", "nouveau", Some(("NOUVEAU_CHIPSET", "0x1b2")), false),
    stand("m1", "asahi", "asahi", None, true),
    stand("adreno630", "freedreno", "freedreno", Some(("FD_GPU_ID", "630")), false),
    stand("adreno740", "freedreno", "freedreno", Some(("FD_CHIP_ID", "0x43050a01")), true),
    stand("tigerlake", "intel", "intel", Some(("INTEL_STUB_GPU_PLATFORM", "tgl")), false),
    stand("arc-a", "intel", "intel", Some(("INTEL_STUB_GPU_PLATFORM", "dg2")), false),
    stand("arc-b", "intel", "intel", Some(("INTEL_STUB_GPU_PLATFORM", "bmg")), true),
];

/// The devices of these names; of no names all.
pub(crate) fn named(names: &[&str]) -> Result<Vec<&'static Stand>, String> {
    if names.is_empty() {
        return Ok(DEVICES.iter().collect());
    }
    names
        .iter()
        .map(|name| {
            DEVICES.iter().find(|device| device.name == *name).ok_or_else(|| {
                let all: Vec<_> = DEVICES.iter().map(|device| device.name).collect();
                format!("{name} is not known: there are {}", all.join(", "))
            })
        })
        .collect()
}

/// A compiler that takes longer than this for the kernels of a device is stopped. The slowest takes
/// half a minute.
const LIMIT: Duration = Duration::from_secs(600);

impl Stand {
    /// What is not there of what it needs.
    pub(crate) fn missing(&self, mesa: &Path) -> Option<String> {
        [self.shim(mesa), self.library(mesa)]
            .into_iter()
            .find(|file| !file.exists())
            .map(|file| format!("{} is not there", file.display()))
    }

    /// Compiles the kernels that Kyklos chooses on this device.
    pub(crate) fn measure(&self, mesa: &Path) -> Result<Kernels, String> {
        let text = self.run_self(mesa, &["device", self.name])?;
        toml::from_str(&text).map_err(|error| format!("{}: {error}\n{text}", self.name))
    }

    /// Runs this program over the stand-in, and returns what it prints.
    pub(crate) fn run_self(&self, mesa: &Path, arguments: &[&str]) -> Result<String, String> {
        let program = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
        self.run(mesa, &program, arguments).map(|(text, _)| text)
    }

    /// Runs `program` over the stand-in, and returns what it prints, and its errors.
    pub(crate) fn run(
        &self,
        mesa: &Path,
        program: &Path,
        arguments: &[&str],
    ) -> Result<(String, String), String> {
        let failed = |what: std::io::Error| format!("{}: {what}", self.name);
        let libraries = libraries(mesa);
        let driver = std::env::temp_dir().join(format!("kyklos-vendors-{}.json", std::process::id()));
        let library = self.library(mesa);
        let json = format!(
            r#"{{"file_format_version": "1.0.1", "ICD": {{"api_version": "1.4.0", "library_path": "{}"}}}}"#,
            library.display()
        );
        std::fs::write(&driver, json).map_err(failed)?;
        // The loader of the unpacked system, because its C library is newer than this machine's.
        let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
        command.arg("--preload").arg(self.shim(mesa)).arg("--library-path").arg(&libraries);
        command.arg(program).args(arguments);
        command.env("VK_DRIVER_FILES", &driver).env("VK_ICD_FILENAMES", &driver);
        command.env("XDG_RUNTIME_DIR", std::env::temp_dir()).env("MESA_SHADER_CACHE_DISABLE", "true");
        command.envs(self.environment);
        // Through files: a pipe that nobody reads would stop the child.
        let [out, err] = ["out", "err"].map(|end| driver.with_extension(end));
        command.stdout(std::fs::File::create(&out).map_err(failed)?);
        command.stderr(std::fs::File::create(&err).map_err(failed)?);
        let mut child = command.stdin(Stdio::null()).spawn().map_err(failed)?;
        let start = Instant::now();
        let status = loop {
            match child.try_wait().map_err(failed)? {
                Some(status) => break status.to_string(),
                None if start.elapsed() > LIMIT => {
                    child.kill().and_then(|()| child.wait()).map_err(failed)?;
                    break format!("stopped after {} s", LIMIT.as_secs());
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
        let (text, errors) = (read(&out), read(&err));
        for file in [&driver, &out, &err] {
            // A file that is left behind does no harm.
            let _ = std::fs::remove_file(file);
        }
        if status == "exit status: 0" {
            return Ok((text, errors));
        }
        Err(format!("{} over {} ended with {status}:\n{errors}", self.name, self.driver))
    }

    fn shim(&self, mesa: &Path) -> PathBuf {
        libraries(mesa).join(format!("lib{}_noop_drm_shim.so", self.shim))
    }

    fn library(&self, mesa: &Path) -> PathBuf {
        libraries(mesa).join(format!("libvulkan_{}.so", self.driver))
    }
}

fn libraries(mesa: &Path) -> PathBuf {
    let mesa = mesa.canonicalize().unwrap_or_else(|_| mesa.to_owned());
    mesa.join("tree/usr/lib/x86_64-linux-gnu")
}
