//! The attention kernels against the oracle.

use half::{bf16, f16};
use kyklos::Dtype;
use kyklos_tests::inputs::cases;
use kyklos_tests::inputs::Case;

use crate::call::{Call, Keys};
use crate::job::Timing;
use crate::program::emulator;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

fn call(case: Case, dtype: Dtype) -> Call {
    match dtype {
        Dtype::F32 => Call::new::<f32>(case, dtype),
        Dtype::F16 => Call::new::<f16>(case, dtype),
        Dtype::Bf16 => Call::new::<bf16>(case, dtype),
    }
}

/// Judges calls on all cores; says all that failed.
fn judge_all(calls: Vec<(Call, Keys, Timing)>) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let failures = std::sync::Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((call, keys, timing)) =
                    calls.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                {
                    if let Err(failure) = call.judge(emulator(), *keys, *timing) {
                        failures.lock().unwrap().push(failure);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} of {} calls failed:\n{}", failures.len(), calls.len(), failures.join("\n\n"));
}

#[test]
fn every_case_of_the_project_is_right_in_every_type() {
    // Timings and ways to cut keys take turns: each case meets all timings over the three types.
    let mut calls = Vec::new();
    for (n, case) in cases().into_iter().enumerate() {
        for (i, dtype) in DTYPES.into_iter().enumerate() {
            let keys = [Keys::Whole, Keys::Split, Keys::Whole, Keys::Merged][(n + i) % 4];
            calls.push((call(case.clone(), dtype), keys, Timing::ALL[(n + i) % 3]));
        }
    }
    judge_all(calls);
}
