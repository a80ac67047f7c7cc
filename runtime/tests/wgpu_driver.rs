//! What the process keeps of a driver once its last device is closed.
#![cfg(all(target_os = "linux", feature = "wgpu"))]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kyklos::backend::wgpu::{WgpuBackend, WgpuOptions};

/// The files that the process has code of.
fn code() -> BTreeSet<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux shows a process its maps");
    maps.lines()
        .filter(|line| line.contains("r-xp"))
        .filter_map(|line| line.split('/').next_back())
        .map(str::to_owned)
        .collect()
}

/// A driver that is unloaded while the process ends takes the process with it: its exit handlers are gone.
#[test]
fn a_driver_stays_loaded_when_its_last_device_is_closed() {
    let Ok(device) = WgpuBackend::with_options(0, &WgpuOptions::default()) else {
        let required = std::env::var_os("KYKLOS_REQUIRE_GPU").is_some_and(|value| value == "1");
        assert!(!required, "KYKLOS_REQUIRE_GPU=1, and there is no wgpu device");
        return;
    };
    let open = code();
    drop(device);
    // The device's own thread lets go of it a little later.
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        let gone: Vec<_> = open.difference(&code()).cloned().collect();
        assert!(gone.is_empty(), "unloaded: {gone:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
