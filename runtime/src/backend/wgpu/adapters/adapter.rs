//! Finding devices, and opening one.

#[cfg(not(target_arch = "wasm32"))]
use std::path::PathBuf;
use std::sync::Arc;

#[cfg(not(target_arch = "wasm32"))]
use kyklos_plan::Dtype;
#[cfg(not(target_arch = "wasm32"))]
use kyklos_shaders::Kernel;

use super::class::class;
#[cfg(not(target_arch = "wasm32"))]
use super::hidden::remark;
#[cfg(not(target_arch = "wasm32"))]
use super::instance::every_adapter;
#[cfg(not(target_arch = "wasm32"))]
use super::listing::distinct;
use crate::backend::wgpu::backend::WgpuBackend;
use crate::backend::wgpu::device::{Gpu, OpenedBy};
#[cfg(not(target_arch = "wasm32"))]
use crate::backend::wgpu::numbers::{checked_dim, storage};
#[cfg(not(target_arch = "wasm32"))]
use crate::backend::wgpu::probe::{Candidates, Probe, Prober, measure::measure};
use crate::backend::wgpu::running::pieces::Pace;
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::wgpu::storage::memory::Budget;
use crate::backend::wgpu::tuning::{AdapterKey, Tuned, TuningTable};
use crate::backend::wgpu::variant::{KernelChoice, Variants};
use crate::backend::{DeviceClass, DeviceInfo};
use crate::error::{Error, Result};
#[cfg(not(target_arch = "wasm32"))]
use crate::machine::can_load_drivers;

/// Settings with which a device is opened.
#[derive(Clone, Debug)]
pub struct WgpuOptions {
    /// Which attention kernels it may use.
    pub kernel: KernelChoice,
    /// Largest binding to use, in bytes, where that is less than the device allows. For tests on
    /// large devices.
    pub max_binding_bytes: Option<u64>,
    /// Most bytes of all buffers of the backend together; more is [`Error::OutOfMemory`]. By
    /// default the host's memory, for devices that compute in it, and as much as the driver
    /// gives for other devices.
    pub max_memory_bytes: Option<u64>,
    /// Kernel variants that were measured to be fast. Entries for other devices, drivers, kernels
    /// or kernel texts are ignored. Without a table the built-in choices are used.
    pub tuned: Option<TuningTable>,
    /// Folder in which the backend keeps what it measured itself: by default
    /// [`cache_folder`](crate::machine::cache_folder). `None`: each process measures again.
    #[cfg(not(target_arch = "wasm32"))]
    pub cache: Option<PathBuf>,
    /// Whether [`KernelChoice::Auto`] may compare kernels on the device; otherwise it takes those
    /// that it takes without matrix units. True by default.
    pub compare: bool,
    /// Whether to record times of compute passes by the device's own clock, where it has one; see
    /// [`WgpuBackend::device_seconds`].
    pub timestamps: bool,
}

impl Default for WgpuOptions {
    fn default() -> Self {
        Self {
            kernel: KernelChoice::Auto,
            max_binding_bytes: None,
            max_memory_bytes: None,
            tuned: None,
            #[cfg(not(target_arch = "wasm32"))]
            cache: crate::machine::cache_folder(),
            compare: true,
            timestamps: false,
        }
    }
}

impl WgpuBackend {
    /// The devices of this machine, in the order in which [`Self::new`] counts them; none where
    /// there is no driver.
    ///
    /// A GPU that several APIs offer is listed once, through Vulkan if that is one of them. The
    /// environment variable `WGPU_BACKEND` of wgpu (`vulkan`, `dx12`, `metal`, or several with
    /// commas) limits the APIs, and so chooses another. wgpu's variables for flags of instances,
    /// such as `WGPU_VALIDATION`, work as wgpu documents them; adapters that wgpu leaves out are
    /// named by [`Self::left_out`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn enumerate() -> Vec<DeviceInfo> {
        adapters().iter().map(|adapter| describe(adapter.get_info(), Variants::auto(adapter), 0)).collect()
    }

    /// Names the GPUs that [`Self::enumerate`] leaves out because their drivers do not claim to
    /// conform to Vulkan, and the variable of the environment that lets it list them. `None` where
    /// there are none. Asks the drivers again, which may take a second.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn left_out() -> Option<String> {
        remark()
    }

    /// The kernels that a device of [`Self::enumerate`] uses for these tensors when nothing was
    /// measured on it: attention (two where a comparison on the device will decide), decoding of
    /// one row and of as many rows and heads as a workgroup takes, and gradients; without
    /// softcap and bias. The device is not opened.
    ///
    /// # Errors
    /// [`Error::Request`] when there is no such device, or no kernels for heads of `head_dim`
    /// elements.
    ///
    /// ```
    /// use kyklos::Dtype;
    /// use kyklos::backend::wgpu::WgpuBackend;
    ///
    /// if !WgpuBackend::enumerate().is_empty() {
    ///     let kernels = WgpuBackend::built_in_kernels(0, Dtype::F16, 128)?;
    ///     assert!(kernels[0].name().starts_with("attend-"));
    /// }
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    #[cfg(not(target_arch = "wasm32"))]
    pub fn built_in_kernels(index: usize, dtype: Dtype, head_dim: usize) -> Result<Vec<Kernel>> {
        let head_dim = checked_dim(head_dim)?;
        with_adapter(index, |adapter| Ok(Variants::auto(adapter).kernels(storage(dtype), head_dim)))
    }

    /// Opens the device of this index.
    ///
    /// # Errors
    /// [`Error::Request`] when there is no such device, [`Error::Device`] when it cannot be opened.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn new(index: usize) -> Result<Self> {
        Self::with_options(index, &WgpuOptions::default())
    }

    /// Opens the device of this index with the settings in `options`.
    ///
    /// # Errors
    /// As [`Self::new`]; [`Error::Request`] when the device cannot run the kernel asked for.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn with_options(index: usize, options: &WgpuOptions) -> Result<Self> {
        with_adapter(index, |adapter| pollster::block_on(Self::open(adapter, options)))
    }

    /// Opens the device that the browser prefers.
    ///
    /// # Errors
    /// [`Error::Device`] when there is none or it cannot be opened.
    #[cfg(target_arch = "wasm32")]
    pub async fn request(options: &WgpuOptions) -> Result<Self> {
        let instance = instance();
        let adapter = instance
            .request_adapter(&wgpu::RequestAdapterOptions {
                power_preference: wgpu::PowerPreference::HighPerformance,
                ..Default::default()
            })
            .await
            .map_err(|error| Error::Device {
                device: "wgpu".to_owned(),
                operation: "find an adapter".to_owned(),
                native: error.to_string(),
            })?;
        Self::open(&adapter, options).await
    }

    /// Opens the device behind `adapter`.
    ///
    /// # Errors
    /// As [`Self::with_options`].
    pub async fn open(adapter: &wgpu::Adapter, options: &WgpuOptions) -> Result<Self> {
        let variants = Variants::chosen(adapter, options.kernel)?;
        let Some(plainer) = variants.plainer() else {
            return Self::open_for(adapter, options, variants).await;
        };
        if options.compare
            && let Ok(opened) = Self::open_for(adapter, options, variants).await
        {
            return Ok(opened);
        }
        Self::open_for(adapter, options, plainer).await
    }

    async fn open_for(adapter: &wgpu::Adapter, options: &WgpuOptions, variants: Variants) -> Result<Self> {
        let native = adapter.get_info();
        let class = class(&native);
        let mut features = variants.features() | shared_memory_features(adapter, class);
        if options.timestamps {
            features |= adapter.features() & wgpu::Features::TIMESTAMP_QUERY;
        }
        let mut limits = adapter.limits();
        if let Some(most) = options.max_binding_bytes {
            limits.max_storage_buffer_binding_size = limits.max_storage_buffer_binding_size.min(most);
        }
        let opened = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("kyklos"),
                required_features: features,
                experimental_features: variants.experimental(),
                required_limits: limits,
                ..Default::default()
            })
            .await;
        let (device, queue) = opened.map_err(|error| Error::Device {
            device: native.name.clone(),
            operation: "open the device".to_owned(),
            native: error.to_string(),
        })?;
        #[cfg(target_arch = "wasm32")]
        let native = wgpu::AdapterInfo { name: web_name(&device), ..native };
        let key = AdapterKey::new(&native);
        let tuned = Tuned::new(options.tuned.as_ref(), &key, variants);
        let info = describe(native, variants, tuned.len());
        Ok(Self {
            gpu: Gpu::new(
                Arc::from(info.name.as_str()),
                device,
                queue,
                Budget::new(options.max_memory_bytes, class),
                OpenedBy::Us,
            ),
            pace: Pace::new(class),
            info,
            variants,
            key,
            tuned,
            #[cfg(not(target_arch = "wasm32"))]
            prober: Some(Prober::new(
                {
                    let adapter = adapter.clone();
                    move |candidates| compare(&adapter, candidates)
                },
                options.cache.clone(),
            )),
        })
    }

    /// A backend on a device that the caller has opened, beside the caller's own work: the two
    /// share the queue, in the order of submission. The device's callbacks for errors and for
    /// its loss stay the caller's. Kernels use subgroups if the device has the feature and they
    /// suit it.
    ///
    /// # Errors
    /// [`Error::Request`] if the device was opened with limits below those of WebGPU that kernels
    /// need.
    pub fn from_device(device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Self> {
        let limits = device.limits();
        let needed = wgpu::Limits::default();
        for (name, has, needs) in [
            (
                "max_storage_buffers_per_shader_stage",
                limits.max_storage_buffers_per_shader_stage,
                needed.max_storage_buffers_per_shader_stage,
            ),
            (
                "max_compute_invocations_per_workgroup",
                limits.max_compute_invocations_per_workgroup,
                needed.max_compute_invocations_per_workgroup,
            ),
            (
                "max_compute_workgroup_storage_size",
                limits.max_compute_workgroup_storage_size,
                needed.max_compute_workgroup_storage_size,
            ),
            (
                "max_compute_workgroup_size_x",
                limits.max_compute_workgroup_size_x,
                needed.max_compute_workgroup_size_x,
            ),
            (
                "max_compute_workgroups_per_dimension",
                limits.max_compute_workgroups_per_dimension,
                needed.max_compute_workgroups_per_dimension,
            ),
        ] {
            if has < needs {
                return Err(Error::request(
                    format!("a wgpu device with {name} = {has}"),
                    format!("open it with at least {needs}, as in wgpu::Limits::default()"),
                ));
            }
        }
        let native = device.adapter_info();
        let class = class(&native);
        let variants = Variants::of_opened(device);
        let key = AdapterKey::new(&native);
        let tuned = Tuned::new(None, &key, variants);
        let info = describe(native, variants, tuned.len());
        let gpu = Gpu::new(
            Arc::from(info.name.as_str()),
            device.clone(),
            queue.clone(),
            Budget::new(None, class),
            OpenedBy::Caller,
        );
        Ok(Self {
            gpu,
            pace: Pace::new(class),
            info,
            variants,
            key,
            tuned,
            #[cfg(not(target_arch = "wasm32"))]
            prober: None,
        })
    }

    /// A caller's buffer of this device, as the memory of a tensor of `bytes` bytes. The caller
    /// does not write to it while a call uses it.
    ///
    /// # Errors
    /// [`Error::Request`] unless its size is a multiple of 16 and at least `bytes`, and its usages
    /// are `STORAGE` and `COPY_SRC` or more.
    pub fn adopt(&self, buffer: wgpu::Buffer, bytes: usize) -> Result<WgpuBuffer> {
        self.gpu.adopt(buffer, bytes)
    }
}

/// Compares two kernels, each on a device of its own.
#[cfg(not(target_arch = "wasm32"))]
fn compare(adapter: &wgpu::Adapter, candidates: Candidates) -> Result<Probe> {
    measure(candidates, |kernel| {
        let options = WgpuOptions { kernel, cache: None, ..WgpuOptions::default() };
        pollster::block_on(WgpuBackend::open(adapter, &options))
    })
}

/// A device's name in a browser: vendor and architecture. wgpu takes only the description, which is
/// mostly empty.
#[cfg(target_arch = "wasm32")]
fn web_name(device: &wgpu::Device) -> String {
    let said = device.as_webgpu().map(|device| device.adapter_info());
    let parts =
        said.map_or_else(Vec::new, |info| vec![info.vendor(), info.architecture(), info.description()]);
    match parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>() {
        parts if parts.is_empty() => "a WebGPU device".to_owned(),
        parts => parts.join(" "),
    }
}

#[cfg(target_arch = "wasm32")]
fn instance() -> wgpu::Instance {
    wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle())
}

#[cfg(not(target_arch = "wasm32"))]
fn adapters() -> Vec<wgpu::Adapter> {
    let all = every_adapter();
    let listed = distinct(&all.iter().map(wgpu::Adapter::get_info).collect::<Vec<_>>());
    all.into_iter()
        .enumerate()
        .filter(|(index, _)| listed.contains(index))
        .map(|(_, adapter)| adapter)
        .collect()
}

#[cfg(not(target_arch = "wasm32"))]
fn with_adapter<T>(index: usize, use_it: impl FnOnce(&wgpu::Adapter) -> Result<T>) -> Result<T> {
    let adapters = adapters();
    let Some(adapter) = adapters.get(index) else {
        let count = adapters.len();
        let hidden = remark().map_or_else(String::new, |remark| format!("; {remark}"));
        return Err(Error::request(
            format!("there is no wgpu device {index}: this machine has {count}{hidden}"),
            match count.checked_sub(1) {
                Some(last) => format!("use 0 to {last}"),
                None if can_load_drivers() => {
                    "install a Vulkan, Metal or DX12 driver, or use the CPU".to_owned()
                }
                None => "a static program loads no driver: link it dynamically, or use the CPU".to_owned(),
            },
        ));
    };
    use_it(adapter)
}

/// `tuned` is the number of measured choices that apply to the device.
fn describe(info: wgpu::AdapterInfo, variants: Variants, tuned: usize) -> DeviceInfo {
    let driver = [info.backend.to_str(), &info.driver, &info.driver_info]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    let kernel = match tuned {
        0 => variants.name(),
        1 => format!("{}, tuned for 1 case", variants.name()),
        n => format!("{}, tuned for {n} cases", variants.name()),
    };
    DeviceInfo { backend: "wgpu", class: class(&info), driver, kernel, name: info.name }
}

/// The feature to map any buffer, on devices that share the host's memory. On other devices such
/// memory is slow.
fn shared_memory_features(adapter: &wgpu::Adapter, class: DeviceClass) -> wgpu::Features {
    match class {
        DeviceClass::SoftwareGpu | DeviceClass::IntegratedGpu => {
            adapter.features() & wgpu::Features::MAPPABLE_PRIMARY_BUFFERS
        }
        _ => wgpu::Features::empty(),
    }
}
