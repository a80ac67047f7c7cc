//! Planted bugs of the host side, and faults of the driver and the device.

use std::fs;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos::backend::{Backend, Extent, Layout, StateMut, StateShape};
use kyklos::{Dtype, Error, Result};
use kyklos_backend_suite::{Prepared, dense_set, run_alone};
use kyklos_cuda::{CudaBackend, CudaBuffer, CudaOptions, availability};
use kyklos_oracle::inputs::cases;
use pollster::block_on;

use crate::graphs::Token;
use crate::scenario::{Ends, HANGS_AFTER, Scenario};

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = planted();
    all.extend(endings());
    all.extend(memory());
    all.extend([
        Scenario::new("a copy to the host does not wait for later kernels", "hang_at=2", overlap),
        Scenario::new(
            "keeps kernels that were compiled at run time, and compiles again if the file is damaged",
            "",
            kernel_cache,
        ),
        Scenario::new(
            "orders overlapping operations",
            "delay_us=3000,seed=30",
            orders_overlapping_operations,
        ),
        Scenario::new("opens every device of a process", "devices=3,seed=31", || {
            let all: Vec<_> = (0..3).map(|ordinal| CudaBackend::new(ordinal).unwrap()).collect();
            all.iter().for_each(is_right);
        }),
        Scenario::new("two backends share a device", "seed=32", || {
            let (one, other) = (CudaBackend::new(0).unwrap(), CudaBackend::new(0).unwrap());
            is_right(&one);
            drop(one);
            is_right(&other);
        }),
    ]);
    all
}

/// Planted bugs. A check or the fake driver must find each of them.
fn planted() -> Vec<Scenario> {
    // Stream 0: kernels, 1: copies to the device, 2: copies to the host.
    let without_waits = |seed: u64, kind: u64| {
        let mut scenario = Scenario::new(
            &format!("a stream {kind} that ignores waits fails the check, seed {seed}"),
            &format!("ignore_waits={},delay_us=3000,seed={seed}", 1 << kind),
            || {
                is_right(&open());
                orders_overlapping_operations();
            },
        );
        scenario.ends = Ends::Failing;
        scenario
    };
    let seeds = 1..=3;
    let mut all: Vec<_> = seeds.flat_map(|seed| (0..3).map(move |kind| without_waits(seed, kind))).collect();
    let mut forgets = Scenario::new("a buffer that is left at exit is found", "", || {
        std::mem::forget(open().alloc("forgotten", 100).unwrap());
    });
    forgets.ends = Ends::LeavingSomething;
    all.push(forgets);
    all
}

/// A context that is destroyed during the work. Every call and every future returns the first
/// error, and the other device still works.
fn endings() -> Vec<Scenario> {
    let ends = [
        (
            "an illegal address",
            "sticky_at=2,sticky=700",
            "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access",
        ),
        ("a launch that fails on the device", "sticky_at=1,sticky=719", "CUDA_ERROR_LAUNCH_FAILED (719)"),
        ("a broken memory cell", "sticky_at=3,sticky=214", "CUDA_ERROR_ECC_UNCORRECTABLE (214)"),
        ("a lost device", "sticky_at=2,sticky=46", "CUDA_ERROR_DEVICE_UNAVAILABLE (46)"),
        ("a kernel that hangs", "hang_at=2", "completed nothing for 0.5 s, in reset_state: it hangs"),
    ];
    let scenario = |(name, fake, words): (&str, &str, &'static str)| {
        Scenario::new(&format!("ends with {name}"), &format!("devices=2,seed=41,{fake}"), move || {
            ends_with(words)
        })
    };
    let mut all: Vec<_> = ends.into_iter().map(scenario).collect();
    all.push(Scenario::new("goes on after a launch that is refused", "seed=42,refuse_at=1", || {
        let backend = open();
        let (mut a, mut ml) = state(&backend);
        reset(&backend, &mut a, &mut ml).unwrap();
        let refused = block_on(backend.wait()).unwrap_err().to_string();
        for word in
            ["cuda:0", "launch reset_state", "cuLaunchKernel", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)"]
        {
            assert!(refused.contains(word), "{refused}");
        }
        is_right(&backend);
    }));
    all
}

/// When a device counts as lost that is to fail with these words: soon only where it hangs.
pub(crate) fn lost_after(words: &str) -> Duration {
    if words.contains("completed nothing") { Duration::from_millis(500) } else { 2 * HANGS_AFTER }
}

fn ends_with(words: &str) {
    let other = CudaBackend::new(1).unwrap();
    let options = CudaOptions { stuck_after: lost_after(words), ..CudaOptions::default() };
    let backend = CudaBackend::with_options(0, &options).unwrap();
    let (mut a, mut ml) = state(&backend);
    for _ in 0..3 {
        // The call that gets the first error depends on timing.
        let _ = reset(&backend, &mut a, &mut ml);
    }
    let download = backend.download(&mut a, 0..SHAPE.a_bytes());
    let start = Instant::now();
    let first = block_on(backend.wait()).unwrap_err();
    assert!(first.to_string().contains(words), "{first}");
    assert!(matches!(first, Error::Device { .. }), "{first:?}");
    assert_eq!(block_on(download).unwrap_err(), first);
    assert_eq!(backend.alloc("more", 64).unwrap_err(), first);
    assert_eq!(backend.write(&mut a, 0, &[0; 4]).unwrap_err(), first);
    assert_eq!(reset(&backend, &mut a, &mut ml).unwrap_err(), first);
    assert_eq!(block_on(backend.download(&mut ml, 0..4)).unwrap_err(), first);
    drop((a, ml, backend));
    assert!(start.elapsed() < HANGS_AFTER, "{:?}", start.elapsed());
    is_right(&other);
}

fn memory() -> Vec<Scenario> {
    vec![
        Scenario::new("counts its memory", "memory_mb=64", || {
            let allowed = |result: Result<CudaBuffer>| match result {
                Err(Error::OutOfMemory { what, asked_bytes, allowed_bytes, .. }) => {
                    assert_eq!(what, "keys");
                    (asked_bytes >> 20, allowed_bytes >> 20)
                }
                other => panic!("{other:?}"),
            };
            let backend = open();
            let mib = |n: usize| backend.alloc("keys", n << 20);
            assert_eq!(allowed(mib(65)), (65, 64));
            let held = mib(40).unwrap();
            assert_eq!(allowed(mib(32)), (32, 24));
            drop(held);
            // The memory of the first buffer is freed for a buffer of another size, while the device may
            // still use it.
            let mut some = mib(14).unwrap();
            backend.write(&mut some, 0, &[7; 1 << 20]).unwrap();
            drop(some);
            drop(mib(64).unwrap());
            let again = mib(8).unwrap();
            assert_eq!(allowed(mib(60)), (60, 56));
            drop(again);
            let capped = CudaOptions { max_memory_bytes: Some(10 << 20), ..CudaOptions::default() };
            let capped = CudaBackend::with_options(0, &capped).unwrap();
            let _held = capped.alloc("keys", 8 << 20).unwrap();
            assert_eq!(allowed(capped.alloc("keys", 4 << 20)), (4, 2));
        }),
        Scenario::new("names the states of the parts if there is no memory for them", "", || {
            // Memory for the token's five buffers and its work list, but not for two more states.
            let capped = CudaOptions { max_memory_bytes: Some(150 << 10), ..CudaOptions::default() };
            let backend = CudaBackend::with_options(0, &capped).unwrap();
            match Token::new(&backend).attend(&backend, 1) {
                Err(Error::OutOfMemory { what, asked_bytes, allowed_bytes, .. }) => {
                    assert_eq!((what.as_str(), asked_bytes), ("the states of parts", 2 * (1024 + 32)));
                    assert!(allowed_bytes < asked_bytes, "{allowed_bytes}");
                }
                other => panic!("{other:?}"),
            }
            is_right(&open());
        }),
        Scenario::new("reports that the driver has no memory left, and still works", "oom_at=4", || {
            let backend = open();
            let held: Vec<_> = (0..3).map(|_| backend.alloc("held", 1000).unwrap()).collect();
            let error = backend.alloc("one more", 1000).unwrap_err();
            assert!(matches!(&error, Error::OutOfMemory { what, .. } if what == "one more"), "{error}");
            drop(held);
            assert!(backend.alloc("one more", 1000).is_ok(), "memory of dropped buffers is reused");
        }),
        Scenario::new(
            "reports that the host has no pinned memory left, and still works",
            "pinned_oom_at=1",
            || {
                let backend = open();
                let error = backend.upload("keys", Bytes::from_static(&[1; 64])).unwrap_err();
                assert!(
                    matches!(&error, Error::OutOfMemory { device, .. } if device.contains("pinned")),
                    "{error}"
                );
                let (mut a, mut ml) = state(&backend);
                reset(&backend, &mut a, &mut ml).unwrap();
                block_on(backend.wait()).unwrap();
            },
        ),
        Scenario::new("downloaded bytes outlive their backend", "seed=51", || {
            let backend = open();
            let mut buffer = backend.upload("data", Bytes::from_static(b"sixteen bytes...")).unwrap();
            let (kept, coming) = (backend.download(&mut buffer, 0..7), backend.download(&mut buffer, 8..13));
            let kept = block_on(kept).unwrap();
            drop((buffer, backend));
            assert_eq!(&kept[..], b"sixteen");
            assert_eq!(&block_on(coming).unwrap()[..], b"bytes");
        }),
    ]
}

/// The second launch never ends. A copy of a buffer from before the launch still completes.
fn overlap() {
    let options = CudaOptions { stuck_after: Duration::from_secs(3), ..CudaOptions::default() };
    let backend = CudaBackend::with_options(0, &options).unwrap();
    let mut keys = backend.upload("keys", Bytes::from_static(&[9; 4096])).unwrap();
    let mut copied = backend.alloc("copied", 4096).unwrap();
    let rows = Layout { offset: 0, batch_stride: 0, row_stride: 64, head_stride: 64 };
    let extent = Extent { batch: 1, rows: 64, heads: 1, row_bytes: 64 };
    backend.repack((&keys, rows), (&mut copied, rows), extent).unwrap();
    backend.repack((&keys, rows), (&mut copied, rows), extent).unwrap();
    assert_eq!(block_on(backend.download(&mut keys, 0..4096)).unwrap(), &[9; 4096][..]);
    // A copy to the device also completes.
    let mut more = backend.upload("keys", Bytes::from_static(&[5; 4096])).unwrap();
    assert_eq!(block_on(backend.download(&mut more, 4000..4096)).unwrap(), &[5; 96][..]);
    assert!(block_on(backend.wait()).unwrap_err().to_string().contains("hangs"));
}

/// Operations on the same buffers in all three streams, without a wait of the host between them.
fn orders_overlapping_operations() {
    let backend = open();
    let bytes = 4096;
    let data = |round: u8| Bytes::from(vec![round; bytes]);
    let rows = Layout { offset: 0, batch_stride: 0, row_stride: 64, head_stride: 64 };
    let extent = Extent { batch: 1, rows: bytes / 64, heads: 1, row_bytes: 64 };
    let mut buffer = backend.upload("buffer", data(0)).unwrap();
    let mut downloads = Vec::new();
    for round in 0..20 {
        // A kernel and a copy read the contents, then they are overwritten.
        let mut copied = backend.alloc("copied", bytes).unwrap();
        backend.repack((&buffer, rows), (&mut copied, rows), extent).unwrap();
        downloads.push((round, backend.download(&mut buffer, 0..bytes)));
        downloads.push((round, backend.download(&mut copied, 0..bytes)));
        if round % 2 == 0 {
            backend.write(&mut buffer, 0, &data(round + 1)).unwrap();
        } else {
            let next = backend.upload("next", data(round + 1)).unwrap();
            backend.repack((&next, rows), (&mut buffer, rows), extent).unwrap();
        }
    }
    for (round, download) in downloads {
        let got = block_on(download).unwrap();
        assert!(got == data(round), "round {round}: {:?}", &got[..4]);
    }
}

/// Starts this program again. Each process gets the cache folder through its environment.
fn kernel_cache() {
    const FOLDER: &str = "KYKLOS_TEST_CODE";
    let open = |folder: &str| {
        let options = CudaOptions { cache: Some(folder.into()), ..CudaOptions::default() };
        CudaBackend::with_options(0, &options).map(|backend| backend.info().kernel.clone())
    };
    if let Ok(folder) = std::env::var(FOLDER) {
        match open(&folder) {
            Ok(kernel) => println!("opened: {kernel}"),
            Err(error) => println!("refused: {error}"),
        }
        return;
    }
    availability().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let this = Scenario::new(
        "keeps kernels that were compiled at run time, and compiles again if the file is damaged",
        "",
        || {},
    );
    let run = |fake: &str, also: &[(&str, &str)]| {
        this.play(&[&[(FOLDER, path), ("KYKLOS_FAKE_CUDA", fake)], also].concat()).unwrap()
    };
    let fails = [("KYKLOS_FAKE_NVRTC_FAILS", "1")];
    let first = run("report=1", &fails);
    if first.contains("opened: wgmma and mma.sync, sm_90a\n") {
        return; // built with nvcc: nothing is compiled at run time
    }
    assert!(first.contains("refused: ") && first.contains("error: told to fail"), "{first}");
    assert_eq!(fs::read_dir(path).unwrap().count(), 0, "the result of a failed compilation is not kept");
    assert!(run("report=1", &[]).contains("sm_90a by NVRTC 13.0"));
    // A compilation would fail here, so the kernels come from the cache.
    assert!(run("report=1", &fails).contains("sm_90a by NVRTC 13.0"));
    // Each architecture has a file of its own. A device that NVRTC does not support gets PTX.
    assert!(run("report=1,capability=86", &[]).contains("sm_86 by NVRTC"));
    assert!(run("report=1,capability=103", &[]).contains("compute_100 by NVRTC"));
    assert_eq!(fs::read_dir(path).unwrap().count(), 3);
    for entry in fs::read_dir(path).unwrap() {
        let entry = entry.unwrap().path();
        let mut bytes = fs::read(&entry).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&entry, bytes).unwrap();
    }
    assert!(run("report=1", &[]).contains("sm_90a by NVRTC"), "a damaged file is not used");
    assert!(run("report=1", &fails).contains("sm_90a by NVRTC 13.0"), "and replaced");
}

fn open() -> CudaBackend {
    CudaBackend::new(0).unwrap()
}

/// A few calls that use all kinds of operations.
pub(crate) fn is_right(backend: &CudaBackend) {
    for (dtype, case) in [Dtype::Bf16, Dtype::F32].into_iter().zip(cases()) {
        let prepared = Prepared::new(case, dtype);
        let whole = block_on(run_alone(backend, &dense_set(&prepared.problem), &prepared));
        prepared.judge(&whole, "fake cuda").assert_within(&prepared.dense_limit());
    }
}

const SHAPE: StateShape = StateShape { batch: 1, rows: 20, heads: 2, dim: 64 };

fn state(backend: &CudaBackend) -> (CudaBuffer, CudaBuffer) {
    (backend.alloc("a", SHAPE.a_bytes()).unwrap(), backend.alloc("ml", SHAPE.ml_bytes()).unwrap())
}

fn reset(backend: &CudaBackend, a: &mut CudaBuffer, ml: &mut CudaBuffer) -> Result<()> {
    backend.reset_state(&mut StateMut { a, ml, shape: SHAPE })
}
