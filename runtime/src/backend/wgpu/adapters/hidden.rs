//! Vulkan adapters that wgpu hides: their drivers do not claim to conform to Vulkan, as dzn, the
//! driver of GPUs in WSL2. They are named where a user looks for a GPU, and used only if the user
//! asks for them by wgpu's variable.

use std::sync::OnceLock;

use wgpu::{AdapterInfo, InstanceDescriptor, InstanceFlags};

use super::instance::{apis, descriptor, every_adapter, on};

/// wgpu's variable that shows them: any value but 0.
const SHOW: &str = "WGPU_ALLOW_UNDERLYING_NONCOMPLIANT_ADAPTER";

/// Names the adapters that are hidden and the variable that shows them. Asks the drivers a second
/// time, so only explanations call it.
pub(in crate::backend::wgpu) fn remark() -> Option<String> {
    static REMARK: OnceLock<Option<String>> = OnceLock::new();
    REMARK.get_or_init(ask).clone()
}

fn ask() -> Option<String> {
    let InstanceDescriptor { flags, .. } = descriptor();
    let vulkan = apis() & wgpu::Backends::VULKAN;
    if vulkan.is_empty() || flags.contains(InstanceFlags::ALLOW_UNDERLYING_NONCOMPLIANT_ADAPTER) {
        return None;
    }
    let flags = flags | InstanceFlags::ALLOW_UNDERLYING_NONCOMPLIANT_ADAPTER;
    let instance = wgpu::Instance::new(InstanceDescriptor { flags, backends: vulkan, ..descriptor() });
    let all: Vec<_> = on(&instance).iter().map(wgpu::Adapter::get_info).collect();
    // Never dropped, as the other one.
    std::mem::forget(instance);
    let listed: Vec<_> = every_adapter().iter().map(wgpu::Adapter::get_info).collect();
    words(&left_out(all, &listed))
}

/// Those of `all` that are not among `listed`; of equal ones as many as are missing. A GPU that is
/// listed through another API is not left out: on Windows DX12 offers the GPU of dzn.
fn left_out(all: Vec<AdapterInfo>, listed: &[AdapterInfo]) -> Vec<AdapterInfo> {
    let is_offered = |info: &AdapterInfo| {
        let through_another = |other: &AdapterInfo| {
            other.backend != info.backend && (other.vendor, other.device) == (info.vendor, info.device)
        };
        info.vendor != 0 && listed.iter().any(through_another)
    };
    let key = |info: &AdapterInfo| {
        let AdapterInfo { name, vendor, device, driver, driver_info, backend, .. } = info.clone();
        (name, vendor, device, driver, driver_info, backend)
    };
    let mut keys: Vec<_> = listed.iter().map(key).collect();
    let mut is_listed = |info: &AdapterInfo| {
        let place = keys.iter().position(|other| *other == key(info));
        place.map(|place| keys.swap_remove(place)).is_some()
    };
    all.into_iter().filter(|info| !is_listed(info) && !is_offered(info)).collect()
}

fn words(hidden: &[AdapterInfo]) -> Option<String> {
    let name = |info: &AdapterInfo| match &info.driver[..] {
        "" => info.name.clone(),
        driver => format!("{} (driver {driver})", info.name),
    };
    let names: Vec<String> = hidden.iter().map(name).collect();
    if names.is_empty() {
        return None;
    }
    Some(format!(
        "{} is left out, because its Vulkan driver does not claim to conform to Vulkan: {SHOW}=1 in the environment \
         lets wgpu use it; compare its results with those of the CPU before you trust them",
        names.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;

    fn adapter(name: &str, driver: &str) -> AdapterInfo {
        let info = AdapterInfo::new(wgpu::DeviceType::DiscreteGpu, wgpu::Backend::Vulkan);
        AdapterInfo { name: name.to_owned(), driver: driver.to_owned(), ..info }
    }

    #[test]
    fn adapters_that_are_only_in_the_longer_list_are_left_out() {
        let [dzn, llvmpipe] = [adapter("Direct3D12 (GPU)", "Dozen"), adapter("llvmpipe", "llvmpipe")];
        let all = || vec![dzn.clone(), llvmpipe.clone(), dzn.clone()];
        assert_eq!(left_out(all(), from_ref(&llvmpipe)), [dzn.clone(), dzn.clone()]);
        assert_eq!(left_out(all(), &[llvmpipe.clone(), dzn.clone()]), from_ref(&dzn));
        assert!(left_out(all(), &all()).is_empty());
        assert!(left_out(Vec::new(), &all()).is_empty());
    }

    #[test]
    fn a_gpu_that_another_api_offers_is_not_left_out() {
        let of = |vendor, device, info: AdapterInfo| AdapterInfo { vendor, device, ..info };
        let dx12 = AdapterInfo::new(wgpu::DeviceType::DiscreteGpu, wgpu::Backend::Dx12);
        let dzn = || adapter("Direct3D12 (GPU)", "Dozen");
        assert!(left_out(vec![of(7, 1, dzn())], &[of(7, 1, dx12.clone())]).is_empty());
        let other = of(7, 2, dzn());
        assert_eq!(left_out(vec![other.clone()], &[of(7, 1, dx12.clone())]), [other]);
        // Numbers that the driver does not tell say nothing.
        assert_eq!(left_out(vec![dzn()], &[dx12]), [dzn()]);
    }

    #[test]
    fn the_remark_names_them_and_the_variable() {
        assert_eq!(words(&[]), None);
        let text = words(&[adapter("Direct3D12 (GPU)", "Dozen"), adapter("other", "")]).unwrap();
        assert!(text.starts_with("Direct3D12 (GPU) (driver Dozen), other is left out"), "{text}");
        assert!(text.contains("WGPU_ALLOW_UNDERLYING_NONCOMPLIANT_ADAPTER=1"), "{text}");
    }

    #[test]
    fn the_flag_is_that_of_the_variable() {
        let has = descriptor().flags.contains(InstanceFlags::ALLOW_UNDERLYING_NONCOMPLIANT_ADAPTER);
        match std::env::var(SHOW) {
            Ok(value) => assert_eq!(has, value != "0"),
            Err(_) => {
                assert!(!has);
                // The environment of a process cannot be changed while others may read it.
                for value in ["0", "1"] {
                    let me = std::env::current_exe().unwrap();
                    let name = "backend::wgpu::adapters::hidden::tests::the_flag_is_that_of_the_variable";
                    let child =
                        std::process::Command::new(me).args(["--exact", name]).env(SHOW, value).output();
                    let output = child.unwrap();
                    let text = String::from_utf8_lossy(&output.stdout);
                    assert!(output.status.success() && text.contains("1 passed"), "{text}");
                }
            }
        }
    }
}
