//! Subgroups of a device, as kernels use them.

use kyklos_shaders::AttendVariant;

use crate::backend::DeviceClass;
use crate::backend::wgpu::adapters::class::class;

/// Fewest and most lanes of a subgroup. wgpu does not ask Metal, which tells only of compiled
/// kernels, and says 4 to 64. Every GPU of Apple has 32; those of others in older Macs, for which
/// wgpu lists matrices too, have as many as it says.
pub(super) fn sizes(info: &wgpu::AdapterInfo) -> [u32; 2] {
    match info.backend {
        wgpu::Backend::Metal if info.name.starts_with("Apple") => [32, 32],
        _ => [info.subgroup_min_size, info.subgroup_max_size],
    }
}

/// Whether the portable kernel may find row maxima by shuffles: whether in subgroups of every size
/// that the driver may choose, 8 threads of a row are neighbours, and 64 threads are full
/// subgroups. Vulkan promises full ones only on a flag that wgpu does not set; drivers make them.
/// Browsers do not get that kernel.
pub(super) fn can_shuffle(info: &wgpu::AdapterInfo, features: wgpu::Features) -> bool {
    let [least, most] = sizes(info);
    cfg!(not(target_arch = "wasm32"))
        && features.contains(wgpu::Features::SUBGROUP)
        && 8 <= least
        && most <= 64
}

/// The subgroup size for the kernels with broadcasts, on devices where they pay: drivers that
/// compute on the host's cores.
pub(super) fn of_software(info: &wgpu::AdapterInfo, features: wgpu::Features) -> Option<u32> {
    let [least, most] = sizes(info);
    (class(info) == DeviceClass::SoftwareGpu
        && features.contains(wgpu::Features::SUBGROUP)
        && least == most
        && AttendVariant::SUBGROUP_SIZES.contains(&most))
    .then_some(most)
}

#[cfg(test)]
mod tests {
    use wgpu::{AdapterInfo, Backend, DeviceType, Features};

    use super::*;

    fn gpu(name: &str, backend: Backend, [subgroup_min_size, subgroup_max_size]: [u32; 2]) -> AdapterInfo {
        let info = AdapterInfo::new(DeviceType::IntegratedGpu, backend);
        AdapterInfo { name: name.to_owned(), subgroup_min_size, subgroup_max_size, ..info }
    }

    #[test]
    fn on_metal_only_gpus_of_apple_have_subgroups_of_a_known_size() {
        let sizes = |name: &str, backend| sizes(&gpu(name, backend, [4, 64]));
        assert_eq!(sizes("Apple M1", Backend::Metal), [32, 32]);
        assert_eq!(sizes("AMD Radeon Pro 5500M", Backend::Metal), [4, 64]);
        assert_eq!(sizes("Apple M1 (G13G A0)", Backend::Vulkan), [4, 64]);
    }

    #[test]
    fn rows_are_shuffled_where_8_threads_and_64_are_whole_in_every_subgroup() {
        let can = |lanes| can_shuffle(&gpu("GPU", Backend::Vulkan, lanes), Features::SUBGROUP);
        // Intel, AMD, NVIDIA; an older Mali, Qualcomm, and drivers that do not tell.
        assert_eq!([[8, 32], [32, 64], [32, 32]].map(can), [true; 3]);
        assert_eq!([[4, 4], [64, 128], [4, 128]].map(can), [false; 3]);
        assert!(!can_shuffle(&gpu("GPU", Backend::Vulkan, [32, 32]), Features::empty()));
    }
}
