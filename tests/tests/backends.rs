//! The suite for the `Backend` trait, run over every backend of this machine.
//!
//! All but the first are erased devices, as sessions have them, so that the suite is compiled for
//! two types.
//!
//! A backend that cannot run here is reported as ignored with its reason, and fails under
//! `KYKLOS_REQUIRE_GPU=1`.

#[path = "../amount.rs"]
mod amount;

use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::wgpu::{KernelChoice, WgpuBackend, WgpuOptions};
use kyklos::backend::{Device, DeviceClass};
use kyklos_backend_suite::{Suite, only_head_dim};
use kyklos_cuda::{CudaBackend, CudaOptions};

fn main() {
    // A software driver needs several minutes to compile all kernels. So a sample has the cases of one
    // head dim, of all kinds. The tests of the wgpu backend have every head dim, and the CPU
    // backend has every case.
    if WgpuBackend::enumerate().iter().all(|adapter| adapter.class == DeviceClass::SoftwareGpu)
        && kyklos_cuda::availability().is_err()
    {
        only_head_dim(amount::amount(Some(32), None));
    }
    let suite = Suite::new()
        .backend("cpu", || Ok(CpuBackend::new()))
        .backend("cpu as an erased device", || Ok(Device::cpu()))
        .backend("cpu behind the protocol of tabs", || {
            kyklos_tab::loopback(
                || Ok(Device::cpu()),
                kyklos_tab::Limits { buffer_bytes: 1 << 30, total_bytes: 1 << 30, state_bytes: None },
            )
            .map(Device::from)
        });
    with_cuda(with_wgpu(suite)).run()
}

/// Adds every kernel variant of every adapter. Without an adapter, each claim is ignored, with the
/// reason. Under `KYKLOS_REQUIRE_GPU=1` it fails instead.
fn with_wgpu(mut suite: Suite) -> Suite {
    let adapters = WgpuBackend::enumerate();
    if adapters.is_empty() {
        let reason =
            "no Vulkan, Metal or DX12 driver here: scripts/test.sh installs a software one on Debian";
        return suite.absent("wgpu", reason, is_set("KYKLOS_REQUIRE_GPU"));
    }
    for (index, adapter) in adapters.iter().enumerate() {
        let exactly = |name: &str| KernelChoice::Exactly(name.parse().expect("the name of a variant"));
        for (variant, kernel) in [
            ("portable", KernelChoice::Portable),
            // What no software driver runs by itself: gradients as on most GPUs and as on NVIDIA's, and
            // shuffles.
            ("portable-shuffles-2x4", exactly("portable-shuffles-2x4")),
            ("portable-shuffles-4x4", exactly("portable-shuffles-4x4")),
            ("subgroup", KernelChoice::SubgroupBroadcast),
            ("cooperative", KernelChoice::Cooperative),
        ] {
            let open = move || {
                let options = WgpuOptions { kernel, ..WgpuOptions::default() };
                WgpuBackend::with_options(index, &options).map(Device::from)
            };
            // Not every adapter has the subgroups or the matrices that a kernel needs.
            if open().is_ok() {
                suite = suite.backend(&format!("wgpu {index} {variant} ({})", adapter.name), open);
            }
        }
        // With small bindings, a converted tensor spans several of them.
        let name = format!("wgpu {index} small bindings ({})", adapter.name);
        suite = suite.claims(&name, &["converts as", "encodes int8"], move || {
            let options = WgpuOptions { max_binding_bytes: Some(1 << 16), ..WgpuOptions::default() };
            WgpuBackend::with_options(index, &options).map(Device::from)
        });
    }
    suite
}

/// Adds every CUDA device. Without a device, each claim is ignored, with the reason. Under
/// `KYKLOS_REQUIRE_CUDA=1` it fails instead.
fn with_cuda(suite: Suite) -> Suite {
    match kyklos_cuda::availability().and_then(|()| kyklos_cuda::devices()) {
        Ok(devices) => {
            let usable = devices.iter().enumerate().filter(|(_, device)| device.refused.is_none());
            usable.fold(suite, |suite, (index, device)| {
                suite.backend(&format!("cuda {index} ({})", device.info.name), move || {
                    CudaBackend::with_options(index, &CudaOptions::from_environment()?).map(Device::from)
                })
            })
        }
        Err(why) => suite.absent("cuda", &why.to_string(), is_set("KYKLOS_REQUIRE_CUDA")),
    }
}

fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| value == "1")
}
