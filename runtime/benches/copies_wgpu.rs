//! Time of copies to and from a wgpu device, as CSV, compared with one copy inside the host's
//! memory.
//!
//! `--device N` picks a device. `download` copies a buffer to the host and drops the bytes;
//! `upload` makes a buffer of bytes and waits for the device. Wall time in milliseconds and,
//! because a shared machine wobbles, processor time of this process (all threads; on a software
//! driver that is the whole copy).

use std::time::Instant;

use bytes::Bytes;
use kyklos::Error;
use kyklos::backend::Backend;
use kyklos::backend::wgpu::WgpuBackend;
use pollster::block_on;

const SIZES: &[usize] = &[4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let device = arguments
        .iter()
        .position(|argument| argument == "--device")
        .and_then(|at| arguments.get(at + 1)?.parse().ok())
        .unwrap_or(0);
    if WgpuBackend::enumerate().is_empty() {
        println!("# no wgpu device");
        return Ok(());
    }
    let backend = WgpuBackend::new(device)?;
    let info = backend.info();
    println!("# {} ({})", info.name, info.driver);
    println!("what,bytes,repeats,median_ms,min_ms,max_ms,cpu_ms,gib_per_s_median");
    for bytes in SIZES {
        let data = Bytes::from((0..*bytes).map(|i| i.to_le_bytes()[0]).collect::<Vec<_>>());
        measure("host copy", *bytes, || {
            std::hint::black_box(Bytes::copy_from_slice(std::hint::black_box(&data)));
            Ok(())
        })?;
        let mut buffer = backend.upload("data", data.clone())?;
        measure("download", *bytes, || {
            std::hint::black_box(block_on(backend.download(&mut buffer, 0..*bytes))?);
            Ok(())
        })?;
        measure("upload", *bytes, || {
            std::hint::black_box(backend.upload("data", data.clone())?);
            block_on(backend.wait())
        })?;
    }
    Ok(())
}

fn measure(what: &str, bytes: usize, mut call: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
    let repeats = ((256 << 20) / bytes).clamp(15, 101);
    call()?;
    let cpu = cpu_s();
    let mut samples = Vec::new();
    for _ in 0..repeats {
        let start = Instant::now();
        call()?;
        samples.push(start.elapsed().as_secs_f64());
    }
    let cpu_ms = (cpu_s() - cpu) * 1e3 / samples.len() as f64;
    samples.sort_by(f64::total_cmp);
    let (min, median, max) = (samples[0], samples[repeats / 2], samples[repeats - 1]);
    println!(
        "{what},{bytes},{repeats},{:.3},{:.3},{:.3},{cpu_ms:.3},{:.2}",
        median * 1e3,
        min * 1e3,
        max * 1e3,
        bytes as f64 / median / f64::from(1 << 30)
    );
    Ok(())
}

/// Processor seconds of this process so far; 0 if /proc does not have them.
fn cpu_s() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0.0;
    };
    // Nanoseconds on a processor, thread by thread: finer than the clock ticks of /proc/self/stat.
    tasks
        .filter_map(|task| {
            let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<f64>().ok()
        })
        .sum::<f64>()
        / 1e9
}
