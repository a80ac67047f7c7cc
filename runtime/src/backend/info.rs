//! What a device says of itself.

/// A device in words, for reports and for the choice of a device.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// Name of the backend: `cpu`, `wgpu` or `cuda`.
    pub backend: &'static str,
    /// The device's own name.
    pub name: String,
    /// Driver or instruction set, for reports.
    pub driver: String,
    /// Kind of device.
    pub class: DeviceClass,
    /// Kernel variant in use, for reports.
    pub kernel: String,
}

/// Kind of device, in the order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceClass {
    /// A GPU with its own memory.
    DiscreteGpu,
    /// A GPU that shares the host's memory.
    IntegratedGpu,
    /// A GPU behind a hypervisor, or a GPU whose kind the driver does not report.
    OtherGpu,
    /// The cores of the host.
    Cpu,
    /// A graphics driver that computes on the host's cores.
    SoftwareGpu,
}

impl DeviceClass {
    /// The places of the devices of the best class among those of one machine, which its ranks take
    /// in turn.
    ///
    /// ```
    /// use kyklos::backend::DeviceClass::{self, DiscreteGpu, IntegratedGpu};
    ///
    /// assert_eq!(DeviceClass::best(&[IntegratedGpu, DiscreteGpu, DiscreteGpu]), [1, 2]);
    /// ```
    pub fn best(classes: &[Self]) -> Vec<usize> {
        let best = classes.iter().min();
        (0..classes.len()).filter(|place| classes.get(*place) == best).collect()
    }
}

/// The time of kernels that were submitted together.
///
/// ```
/// use kyklos::backend::{Backend, KernelTime, cpu::CpuBackend};
///
/// let backend = CpuBackend::new();
/// backend.measure_kernels(true);
/// // … work, and a wait for the device …
/// let times: Vec<KernelTime> = backend.kernel_times()?;
/// assert!(times.is_empty(), "a CPU is measured by the caller's clock");
/// # Ok::<(), kyklos::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Names of the kernels, in the order in which they ran.
    pub kernels: Vec<String>,
    /// Milliseconds of the device, from the end of what was before to the end of the last kernel.
    pub ms: f64,
}
