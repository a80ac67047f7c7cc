//! A Vulkan device that compiles, and what its driver says about a compiled pipeline.

use std::collections::BTreeMap;
use std::ffi::CStr;

use ash::{ext, khr, vk};

/// An open device: the first one that the driver lists. It lives as long as the process.
pub(crate) struct Device {
    /// Name, as the driver gives it.
    pub(crate) name: String,
    /// Name and version of the driver.
    pub(crate) driver: String,
    raw: ash::Device,
    executables: khr::pipeline_executable_properties::Device,
    _entry: ash::Entry,
    _instance: ash::Instance,
}

/// What a driver says about one compiled pipeline.
#[derive(Debug, Default)]
pub(crate) struct Compiled {
    /// Statistics by the driver's names.
    pub(crate) statistics: BTreeMap<String, f64>,
    /// Texts by the driver's names: intermediate code and machine code.
    pub(crate) texts: BTreeMap<String, String>,
    /// Lanes of a subgroup.
    pub(crate) subgroup_size: u32,
}

const VENDOR_QUEUE: [f32; 1] = [1.0];

impl Device {
    /// Opens the device with what wgpu enables there.
    ///
    /// # Errors
    /// What is missing, or the driver's error.
    pub(crate) fn open() -> Result<Self, String> {
        // SAFETY: the loader is the system's, and it is called from this thread only, before any other
        // thread starts.
        let entry = unsafe { ash::Entry::load() }.map_err(|error| error.to_string())?;
        let application = vk::ApplicationInfo::default()
            .application_name(c"kyklos-vendors")
            // Drivers change their compilers' settings for some engines. wgpu's name is this one.
            .engine_name(c"wgpu-hal")
            .engine_version(2)
            .api_version(vk::API_VERSION_1_3);
        let create = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: `create` and all that it points to live through the call; so it is in every call below.
        let instance = unsafe { entry.create_instance(&create, None) }
            .map_err(|error| format!("no instance: {error}"))?;
        // SAFETY: the instance is alive.
        let physical = unsafe { instance.enumerate_physical_devices() }
            .map_err(|error| format!("no devices: {error}"))?
            .into_iter()
            .next()
            .ok_or("the driver lists no device")?;
        let mut driver = vk::PhysicalDeviceDriverProperties::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut driver);
        // SAFETY: the chain is alive.
        unsafe { instance.get_physical_device_properties2(physical, &mut properties) };
        let name = text(&properties.properties.device_name);
        let driver = format!("{} {}", text(&driver.driver_name), text(&driver.driver_info));

        // SAFETY: the device is the instance's.
        let listed = unsafe { instance.enumerate_device_extension_properties(physical) }
            .map_err(|error| format!("no list of extensions: {error}"))?;
        let has = |name: &CStr| listed.iter().any(|one| one.extension_name_as_c_str() == Ok(name));
        if !has(khr::pipeline_executable_properties::NAME) {
            return Err(format!("{name} has no VK_KHR_pipeline_executable_properties"));
        }
        let wanted = [
            khr::pipeline_executable_properties::NAME,
            ext::robustness2::NAME,
            khr::cooperative_matrix::NAME,
        ];
        let extensions: Vec<_> = wanted.into_iter().filter(|name| has(name)).map(CStr::as_ptr).collect();
        let mut executable = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default();
        let mut robustness = vk::PhysicalDeviceRobustness2FeaturesEXT::default();
        let mut matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
        let mut v11 = vk::PhysicalDeviceVulkan11Features::default();
        let mut v12 = vk::PhysicalDeviceVulkan12Features::default();
        let mut v13 = vk::PhysicalDeviceVulkan13Features::default();
        let mut features = vk::PhysicalDeviceFeatures2::default()
            .push_next(&mut executable)
            .push_next(&mut v11)
            .push_next(&mut v12)
            .push_next(&mut v13);
        if has(ext::robustness2::NAME) {
            features = features.push_next(&mut robustness);
        }
        if has(khr::cooperative_matrix::NAME) {
            features = features.push_next(&mut matrices);
        }
        // SAFETY: the chain is alive.
        unsafe { instance.get_physical_device_features2(physical, &mut features) };
        let core = vk::PhysicalDeviceFeatures::default()
            .robust_buffer_access(true)
            .shader_int16(features.features.shader_int16 == vk::TRUE);
        // The chain is made anew: wgpu enables the robustness of buffers without null descriptors.
        for next in
            [&mut executable.p_next, &mut v11.p_next, &mut v12.p_next, &mut v13.p_next, &mut matrices.p_next]
        {
            *next = std::ptr::null_mut();
        }
        robustness = vk::PhysicalDeviceRobustness2FeaturesEXT::default()
            .robust_buffer_access2(robustness.robust_buffer_access2 == vk::TRUE)
            .robust_image_access2(robustness.robust_image_access2 == vk::TRUE);
        let queue = [vk::DeviceQueueCreateInfo::default().queue_priorities(&VENDOR_QUEUE)];
        let mut features = vk::PhysicalDeviceFeatures2::default().features(core);
        features =
            features.push_next(&mut executable).push_next(&mut v11).push_next(&mut v12).push_next(&mut v13);
        if has(ext::robustness2::NAME) {
            features = features.push_next(&mut robustness);
        }
        if has(khr::cooperative_matrix::NAME) {
            features = features.push_next(&mut matrices);
        }
        let create = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queue)
            .enabled_extension_names(&extensions)
            .push_next(&mut features);
        // SAFETY: as above; the features are those that the device lists.
        let raw = unsafe { instance.create_device(physical, &create, None) }
            .map_err(|error| format!("{name} cannot be opened: {error}"))?;
        let executables = khr::pipeline_executable_properties::Device::new(&instance, &raw);
        Ok(Self { name, driver, raw, executables, _entry: entry, _instance: instance })
    }

    /// Compiles `words` with these bindings of group 0.
    ///
    /// # Errors
    /// The driver's error.
    pub(crate) fn compile(
        &self,
        words: &[u32],
        bindings: &[vk::DescriptorType],
        subgroups: bool,
    ) -> Result<Compiled, String> {
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: vk::Result| format!("{what}: {error}")
        };
        let module = vk::ShaderModuleCreateInfo::default().code(words);
        let slots: Vec<_> = (0..)
            .zip(bindings)
            .map(|(binding, ty)| {
                vk::DescriptorSetLayoutBinding::default()
                    .binding(binding)
                    .descriptor_type(*ty)
                    .descriptor_count(1)
                    .stage_flags(vk::ShaderStageFlags::COMPUTE)
            })
            .collect();
        let set = vk::DescriptorSetLayoutCreateInfo::default().bindings(&slots);
        // SAFETY: the device is alive, and the module is what naga wrote for it.
        let module = unsafe { self.raw.create_shader_module(&module, None) }.map_err(failed("the module"))?;
        // SAFETY: as above.
        let set =
            [unsafe { self.raw.create_descriptor_set_layout(&set, None) }.map_err(failed("the bindings"))?];
        let layout = vk::PipelineLayoutCreateInfo::default().set_layouts(&set);
        // SAFETY: as above.
        let layout =
            unsafe { self.raw.create_pipeline_layout(&layout, None) }.map_err(failed("the layout"))?;
        let mut stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(c"main");
        if subgroups {
            stage = stage.flags(vk::PipelineShaderStageCreateFlags::ALLOW_VARYING_SUBGROUP_SIZE);
        }
        let flags = vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR
            | vk::PipelineCreateFlags::CAPTURE_INTERNAL_REPRESENTATIONS_KHR;
        let create = [vk::ComputePipelineCreateInfo::default().flags(flags).stage(stage).layout(layout)];
        // SAFETY: as above.
        let pipelines =
            unsafe { self.raw.create_compute_pipelines(vk::PipelineCache::null(), &create, None) }
                .map_err(|(_, error)| format!("the pipeline: {error}"))?;
        let compiled = self.describe(pipelines[0]).map_err(failed("the statistics"));
        // SAFETY: nothing uses them any more.
        unsafe {
            self.raw.destroy_pipeline(pipelines[0], None);
            self.raw.destroy_pipeline_layout(layout, None);
            self.raw.destroy_descriptor_set_layout(set[0], None);
            self.raw.destroy_shader_module(module, None);
        }
        compiled
    }

    fn describe(&self, pipeline: vk::Pipeline) -> Result<Compiled, vk::Result> {
        let info = vk::PipelineInfoKHR::default().pipeline(pipeline);
        // SAFETY: the pipeline is alive and captures statistics.
        let executables = unsafe { self.executables.get_pipeline_executable_properties(&info) }?;
        let mut compiled = Compiled::default();
        // A driver that compiles a kernel for several subgroup sizes (Intel) lists each; it runs the last
        // one that fits.
        for (index, executable) in (0..).zip(&executables) {
            compiled.subgroup_size = executable.subgroup_size;
            let info = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline).executable_index(index);
            // SAFETY: as above.
            for one in unsafe { self.executables.get_pipeline_executable_statistics(&info) }? {
                // SAFETY: the format says which member of the union the driver has written.
                let value = unsafe {
                    match one.format {
                        vk::PipelineExecutableStatisticFormatKHR::BOOL32 => f64::from(one.value.b32),
                        vk::PipelineExecutableStatisticFormatKHR::INT64 => one.value.i64 as f64,
                        vk::PipelineExecutableStatisticFormatKHR::UINT64 => one.value.u64 as f64,
                        _ => one.value.f64,
                    }
                };
                compiled.statistics.insert(text(&one.name), value);
            }
            // SAFETY: as above; the pipeline captures representations.
            compiled.texts = unsafe { self.representations(&info) }?;
        }
        Ok(compiled)
    }

    /// # Safety
    /// The pipeline is alive and captures representations.
    unsafe fn representations(
        &self,
        info: &vk::PipelineExecutableInfoKHR<'_>,
    ) -> Result<BTreeMap<String, String>, vk::Result> {
        let read = self.executables.fp().get_pipeline_executable_internal_representations_khr;
        let device = self.raw.handle();
        let mut count = 0;
        // SAFETY: the caller's; the first call asks for the count, the second for sizes, the third for the
        // texts.
        unsafe { read(device, info, &mut count, std::ptr::null_mut()) }.result()?;
        let mut all = vec![vk::PipelineExecutableInternalRepresentationKHR::default(); count as usize];
        // SAFETY: as above.
        unsafe { read(device, info, &mut count, all.as_mut_ptr()) }.result()?;
        let mut texts: Vec<Vec<u8>> = all.iter().map(|one| vec![0; one.data_size]).collect();
        for (one, text) in all.iter_mut().zip(&mut texts) {
            one.p_data = text.as_mut_ptr().cast();
        }
        // SAFETY: as above.
        unsafe { read(device, info, &mut count, all.as_mut_ptr()) }.result()?;
        Ok(all
            .iter()
            .zip(&texts)
            .map(|(one, bytes)| {
                (text(&one.name), String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned())
            })
            .collect())
    }
}

fn text(chars: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
