//! Which adapters are listed: one for each physical GPU.

use std::cmp::Reverse;

use wgpu::{AdapterInfo, Backend, DeviceType};

/// The positions in `adapters` of those that are listed, in their order.
///
/// Several drivers can offer one GPU: those of Vulkan and DX12, or two of Vulkan. It is listed
/// once, through the API that comes first in [`preference`]. Adapters with the same vendor and
/// device number are compared:
///
/// - Through one API they are one GPU if both have the same PCI address, and else several GPUs of
///   one model. A DX12 adapter has the address of the first GPU of its model, so addresses of DX12
///   count only against those of other APIs.
/// - Through several APIs, those of the preferred API are listed. If another API offers more GPUs
///   of that model, so many more of its adapters are listed, first those at other addresses.
///
/// Software drivers are never compared: two of them are two implementations, whatever numbers they
/// give.
pub(in crate::backend::wgpu) fn distinct(adapters: &[AdapterInfo]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..adapters.len()).collect();
    order.sort_by_key(|&index| preference(adapters[index].backend));
    let mut listed: Vec<usize> = Vec::new();
    for (at, &index) in order.iter().enumerate() {
        let adapter = &adapters[index];
        if adapter.device_type == DeviceType::Cpu || adapter.vendor == 0 {
            listed.push(index);
            continue;
        }
        let is_like = |other: &AdapterInfo| {
            other.device_type != DeviceType::Cpu
                && (other.vendor, other.device) == (adapter.vendor, adapter.device)
        };
        // All adapters of one API are treated together, when its first one is met.
        let of_this_api =
            |&other: &usize| adapters[other].backend == adapter.backend && is_like(&adapters[other]);
        if order[..at].iter().any(of_this_api) {
            continue;
        }
        let known: Vec<usize> = listed.iter().copied().filter(|&other| is_like(&adapters[other])).collect();
        let address =
            |index: usize| Some(adapters[index].device_pci_bus_id.as_str()).filter(|id| !id.is_empty());
        let mut offered: Vec<usize> = Vec::new();
        for candidate in order[at..].iter().copied().filter(of_this_api) {
            let same = |&other: &usize| address(other).is_some() && address(other) == address(candidate);
            if adapter.backend == Backend::Dx12 || !offered.iter().any(same) {
                offered.push(candidate);
            }
        }
        let more = offered.len().saturating_sub(known.len());
        // Stable: `false`, an address that is known, comes last.
        offered.sort_by_key(|&candidate| {
            Reverse(
                !known.iter().any(|&other| address(other).is_some() && address(other) == address(candidate)),
            )
        });
        listed.extend(offered.into_iter().take(more));
    }
    listed.sort_unstable();
    listed
}

/// The APIs in the order in which they are preferred for a GPU that several offer.
fn preference(api: Backend) -> usize {
    const ORDER: [Backend; 3] = [Backend::Vulkan, Backend::Metal, Backend::Dx12];
    ORDER.iter().position(|known| *known == api).unwrap_or(ORDER.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An adapter of NVIDIA's `device` at PCI bus `bus`; 0 where the driver does not tell it.
    fn gpu(backend: Backend, device: u32, bus: u32) -> AdapterInfo {
        let address = if bus == 0 { String::new() } else { format!("0000:{bus:02x}:00.0") };
        let info = AdapterInfo::new(DeviceType::DiscreteGpu, backend);
        AdapterInfo { vendor: 0x10de, device, device_pci_bus_id: address, ..info }
    }

    fn software(name: &str, backend: Backend) -> AdapterInfo {
        let info = AdapterInfo::new(DeviceType::Cpu, backend);
        AdapterInfo { name: name.to_owned(), vendor: 0x10005, device: 0, ..info }
    }

    use Backend::{Dx12, Metal, Vulkan};

    #[test]
    fn a_gpu_with_two_apis_is_listed_once_through_vulkan() {
        assert_eq!(distinct(&[gpu(Vulkan, 7, 1), gpu(Dx12, 7, 1)]), [0]);
        assert_eq!(distinct(&[gpu(Dx12, 7, 1), gpu(Vulkan, 7, 1)]), [1]);
        // Without an address, vendor and device tell it.
        assert_eq!(distinct(&[gpu(Vulkan, 7, 0), gpu(Dx12, 7, 1)]), [0]);
        assert_eq!(distinct(&[gpu(Dx12, 7, 1)]), [0]);
        assert_eq!(distinct(&[gpu(Metal, 7, 0)]), [0]);
        assert_eq!(distinct(&[]), [0_usize; 0]);
    }

    #[test]
    fn two_vulkan_drivers_of_a_gpu_list_it_once() {
        assert_eq!(distinct(&[gpu(Vulkan, 7, 1), gpu(Vulkan, 7, 1), gpu(Vulkan, 7, 2)]), [0, 2]);
    }

    #[test]
    fn two_gpus_of_one_model_stay_two() {
        assert_eq!(distinct(&[gpu(Vulkan, 7, 1), gpu(Vulkan, 7, 2)]), [0, 1]);
        assert_eq!(distinct(&[gpu(Vulkan, 7, 0), gpu(Vulkan, 7, 0)]), [0, 1]);
        // wgpu gives all DX12 adapters of one model the address of the first.
        let both = [gpu(Vulkan, 7, 1), gpu(Vulkan, 7, 2), gpu(Dx12, 7, 1), gpu(Dx12, 7, 1)];
        assert_eq!(distinct(&both), [0, 1]);
        assert_eq!(distinct(&both[2..]), [0, 1]);
    }

    #[test]
    fn a_gpu_that_only_one_api_offers_is_listed() {
        assert_eq!(distinct(&[gpu(Vulkan, 7, 1), gpu(Dx12, 7, 1), gpu(Dx12, 8, 2)]), [0, 2]);
        assert_eq!(distinct(&[gpu(Vulkan, 7, 1), gpu(Dx12, 7, 1), gpu(Dx12, 7, 2)]), [0, 2]);
    }

    #[test]
    fn software_drivers_are_devices_of_their_own() {
        let drivers = [
            software("llvmpipe", Vulkan),
            software("SwiftShader", Vulkan),
            software("Microsoft Basic Render Driver", Dx12),
            gpu(Vulkan, 7, 1),
        ];
        assert_eq!(distinct(&drivers), [0, 1, 2, 3]);
        assert_eq!(distinct(&[software("llvmpipe", Vulkan), software("llvmpipe", Vulkan)]), [0, 1]);
        // A hardware adapter with the numbers of a software driver is no software driver.
        let hardware = AdapterInfo { device_type: DeviceType::Other, ..software("llvmpipe", Vulkan) };
        assert_eq!(distinct(&[software("llvmpipe", Vulkan), hardware]), [0, 1]);
    }
}
