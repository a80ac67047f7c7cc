//! The suite for the `Backend` trait, run over every backend of this machine.
//!
//! A backend that cannot run here is reported as ignored with its reason, and fails under `KYKLOS_REQUIRE_GPU=1`.

#![expect(clippy::unwrap_used, reason = "a check that cannot go on fails")]

#[path = "../amount.rs"]
mod amount;

use std::sync::atomic::Ordering;

use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::wgpu::{KernelChoice, WgpuBackend, WgpuOptions};
use kyklos::backend::{Backend, Device, DeviceClass, Threaded};
use kyklos_cuda::CudaBackend;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let arguments = Arguments::from_args();
    // A software driver needs several minutes to compile all kernels. So a sample has the cases of one head dim, of all
    // kinds. The tests of the wgpu backend have every head dim, and the CPU backend has every case.
    if WgpuBackend::enumerate().iter().all(|adapter| adapter.class == DeviceClass::SoftwareGpu)
        && kyklos_cuda::availability().is_err()
    {
        kyklos_backend_suite::ONLY_HEAD_DIM.store(amount::amount(32, 0), Ordering::Relaxed);
    }
    let mut trials = suite("cpu", || Ok(CpuBackend::new()));
    trials.extend(suite("cpu as an erased device", || Ok(Device::cpu())));
    trials.extend(wgpu_trials());
    trials.extend(cuda_trials());
    libtest_mimic::run(&arguments, trials).exit();
}

/// The suite for one backend; `make` returns the reason when the backend cannot be made.
fn suite<B: Backend + Threaded + 'static>(
    who: &'static str,
    make: impl Fn() -> Result<B, String> + Clone + Send + 'static,
) -> Vec<Trial>
where
    B::Buffer: Threaded + 'static,
{
    let layers = make.clone();
    let resident = Trial::test(format!("{who}: keeps forty layers on the device"), move || {
        kyklos_backend_suite::resident::layers_stay_on_the_device(layers().map_err(Failed::from)?, 40);
        Ok(())
    });
    let checks = kyklos_backend_suite::conformance::checks::<B>();
    let trials = checks.into_iter().map(|(claim, check)| {
        let make = make.clone();
        Trial::test(format!("{who}: {claim}"), move || {
            let backend = make().map_err(Failed::from)?;
            pollster::block_on(check(&backend, who));
            Ok(())
        })
    });
    trials.chain([resident]).collect()
}

/// The suite for every kernel variant of every adapter. Without an adapter, each claim is ignored, with the reason.
/// Under `KYKLOS_REQUIRE_GPU=1` it fails instead.
fn wgpu_trials() -> Vec<Trial> {
    let adapters = WgpuBackend::enumerate();
    if adapters.is_empty() {
        let promised = std::env::var_os("KYKLOS_REQUIRE_GPU").is_some_and(|value| value == "1");
        let reason =
            "no Vulkan, Metal or DX12 driver here: scripts/test.sh installs a software one on Debian";
        let claims = kyklos_backend_suite::conformance::checks::<WgpuBackend>();
        let trials = claims.into_iter().map(|(claim, _)| {
            Trial::test(format!("wgpu: {claim} [{reason}]"), move || Err(Failed::from(reason)))
                .with_ignored_flag(!promised)
        });
        return trials.collect();
    }
    let mut trials = Vec::new();
    for (index, adapter) in adapters.iter().enumerate() {
        for (variant, kernel) in [
            ("portable", KernelChoice::Portable),
            ("subgroup", KernelChoice::SubgroupBroadcast),
            ("cooperative", KernelChoice::Cooperative),
        ] {
            let make = move || {
                WgpuBackend::with_options(index, &WgpuOptions { kernel, ..WgpuOptions::default() })
                    .map_err(|error| error.to_string())
            };
            // Not every adapter has the subgroups or the matrices that a kernel needs.
            if make().is_ok() {
                let who: &'static str = format!("wgpu {index} {variant} ({})", adapter.name).leak();
                trials.extend(suite(who, make));
            }
        }
        // With small bindings, a converted tensor spans several of them.
        let make = move || {
            let options = WgpuOptions { max_binding_bytes: Some(1 << 16), ..WgpuOptions::default() };
            WgpuBackend::with_options(index, &options).map_err(|error| error.to_string())
        };
        let who: &'static str = format!("wgpu {index} small bindings ({})", adapter.name).leak();
        let converts =
            |trial: &Trial| ["converts as", "encodes int8"].iter().any(|claim| trial.name().contains(claim));
        trials.extend(suite(who, make).into_iter().filter(converts));
    }
    trials
}

/// The suite for every CUDA device. Without a device, each claim is ignored, with the reason. Under
/// `KYKLOS_REQUIRE_CUDA=1` it fails instead.
fn cuda_trials() -> Vec<Trial> {
    let devices = kyklos_cuda::availability().and_then(|()| kyklos_cuda::devices());
    match devices {
        Ok(devices) => {
            let usable = (0..devices.len()).filter(|index| devices[*index].refused.is_none());
            let of = |index: usize| {
                let who: &'static str = format!("cuda {index} ({})", devices[index].info.name).leak();
                suite(who, move || CudaBackend::new(index).map_err(|error| error.to_string()))
            };
            usable.flat_map(of).collect()
        }
        Err(why) => {
            let promised = std::env::var_os("KYKLOS_REQUIRE_CUDA").is_some_and(|value| value == "1");
            let claims = kyklos_backend_suite::conformance::checks::<CudaBackend>().into_iter();
            let trial = |(claim, _)| {
                let why = why.to_string();
                Trial::test(format!("cuda: {claim} [{why}]"), move || Err(Failed::from(why)))
                    .with_ignored_flag(!promised)
            };
            claims.map(trial).collect()
        }
    }
}
