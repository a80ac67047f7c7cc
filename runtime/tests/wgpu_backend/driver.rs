//! The parts of a driver that stay in the process after its last device is closed.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kyklos::backend::wgpu::WgpuBackend;

/// The files whose code is mapped into the process.
fn code() -> BTreeSet<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux shows a process its maps");
    maps.lines()
        .filter(|line| line.contains("r-xp"))
        .filter_map(|line| line.split_once('/')?.1.split('/').next_back())
        .map(str::to_owned)
        .collect()
}

/// A driver that is unloaded while the process ends crashes the process, because its exit handlers
/// are gone.
pub(crate) fn a_driver_stays_loaded_when_its_last_device_is_closed(device: WgpuBackend) {
    let open = code();
    drop(device);
    // The device's own thread releases the driver a little later.
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        let gone: Vec<_> = open.difference(&code()).cloned().collect();
        assert!(gone.is_empty(), "unloaded: {gone:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
