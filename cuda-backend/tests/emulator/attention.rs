//! The attention kernels against the oracle.

use half::{bf16, f16};
use kyklos::Dtype;
use kyklos_cuda::AttendKernel;
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::OracleMask;

use crate::call::{Call, Kernel, Keys};
use crate::job::Timing;
use crate::parallel::in_parallel;
use crate::program::emulator;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

fn call(case: Case, dtype: Dtype) -> Call {
    match dtype {
        Dtype::F32 => Call::new::<f32>(case, dtype),
        Dtype::F16 => Call::new::<f16>(case, dtype),
        Dtype::Bf16 => Call::new::<bf16>(case, dtype),
    }
}

#[test]
fn every_case_agrees_with_the_oracle_in_every_type() {
    // Timings and divisions of the keys alternate: each case runs with all timings over the three
    // types.
    let mut calls = Vec::new();
    for (n, case) in cases().into_iter().enumerate() {
        for (i, dtype) in DTYPES.into_iter().enumerate() {
            let keys = [Keys::Whole, Keys::Split, Keys::Whole, Keys::Merged][(n + i) % 4];
            calls.push((call(case.clone(), dtype), Kernel::Tiled, keys, Timing::ALL[(n + i) % 3]));
        }
    }
    judge(&calls);
}

#[test]
fn every_case_without_mask_or_bias_tensor_agrees_with_the_oracle_on_hopper() {
    let mut calls = Vec::new();
    for (n, case) in cases().into_iter().filter(|case| case.bias.is_none()).enumerate() {
        for (i, dtype) in [Dtype::F16, Dtype::Bf16].into_iter().enumerate() {
            let keys = [Keys::Whole, Keys::Finished, Keys::Split, Keys::Merged][(n + i) % 4];
            let with = Kernel::Hopper([1, 2, 3][n % 3]);
            calls.push((call(case.clone(), dtype), with, keys, Timing::ALL[(n / 2 + i) % 3]));
        }
        // The kernel with larger tiles, which computes any mask too.
        let (dtype, timing) = ([Dtype::F16, Dtype::Bf16][n % 2], Timing::ALL[n % 3]);
        let mut case = case;
        case.problem.head_dim = [72, 96, 128][n % 3];
        calls.push((call(case, dtype), Kernel::Wide(1 + n % 2), Keys::Finished, timing));
    }
    judge(&calls);
}

#[test]
fn every_case_agrees_with_the_oracle_with_split_keys() {
    let mut calls = Vec::new();
    for (n, case) in cases().into_iter().enumerate() {
        let dtype = [Dtype::Bf16, Dtype::F16, Dtype::F32][n % 3];
        let keys = [Keys::Whole, Keys::Split][n / 2 % 2];
        // From fewer parts than tiles of keys to parts without tiles.
        let parts = [1, 2, 3, 7][n % 4];
        calls.push((call(case, dtype), Kernel::Decode(parts), keys, Timing::ALL[n % 3]));
    }
    judge(&calls);
}

/// Compares calls with the oracle and lists all that failed.
fn judge(calls: &[(Call, Kernel, Keys, Timing)]) {
    let judge = |n: usize| {
        let (call, with, keys, timing) = &calls[n];
        call.judge(emulator(), *with, *keys, *timing).err()
    };
    let failures = in_parallel(calls.len(), judge);
    assert!(
        failures.is_empty(),
        "{} of {} calls failed:\n{}",
        failures.len(),
        calls.len(),
        failures.join("\n\n")
    );
}

/// Sizes around the tile shape of every head dim, with a GQA group of three and masks that make
/// tiles full, partial and empty.
#[test]
fn every_head_dim_agrees_with_the_oracle_around_its_tile_sizes() {
    let plain = cases().into_iter().find(|case| case.name == "one row beyond a tile").unwrap();
    let mut calls = Vec::new();
    for (n, dim) in [64, 96, 128, 192, 256].into_iter().enumerate() {
        let tile = AttendKernel::tiled(Dtype::F16, dim).unwrap().tile;
        let [rows, keys] = [tile.q_rows, tile.kv_cols].map(|n| n as usize);
        let sizes = [(rows, 2 * keys), (rows + 1, 3 * keys - 1), (1, keys + 1), (17, 1)];
        for (i, (q_len, kv_len)) in sizes.into_iter().enumerate() {
            let mut case = plain.clone();
            let problem = &mut case.problem;
            (problem.head_dim, problem.q_len, problem.kv_len) = (dim as usize, q_len, kv_len);
            (problem.q_heads, problem.kv_heads) = (3, 1);
            problem.scale = f64::from(dim).sqrt().recip();
            if i == 1 {
                // The first rows see all keys of a tile except one. Later tiles are empty for them.
                (problem.mask, problem.q_offset) = (OracleMask::causal(), keys as u64 - 2);
            }
            // Types alternate; tile shapes are the same in both.
            let dtype = [Dtype::F16, Dtype::Bf16][(n + i) % 2];
            calls.push((call(case, dtype), Kernel::Tiled, Keys::Whole, Timing::ALL[(n + i) % 3]));
        }
    }
    judge(&calls);
}

/// Enough full tiles to use every stage twice, tiles that need mask tests, empty tiles, and items
/// whose tile has missing rows.
#[test]
fn every_head_dim_agrees_with_the_oracle_around_its_tile_sizes_on_hopper() {
    let plain = cases().into_iter().find(|case| case.name == "one row beyond a tile").unwrap();
    let mut calls = Vec::new();
    let wide = [(96, true), (128, true)];
    let dims = [64, 96, 128, 192, 256].map(|dim| (dim, false)).into_iter().chain(wide);
    for (n, (dim, wide)) in dims.enumerate() {
        for (i, dtype) in [Dtype::F16, Dtype::Bf16].into_iter().enumerate() {
            let (kernel, with) = if wide {
                (AttendKernel::hopper_wide(dtype, dim), Kernel::Wide(1 + i))
            } else {
                (AttendKernel::hopper(dtype, dim), Kernel::Hopper(1 + i))
            };
            let tile = kernel.unwrap().tile;
            let [rows, keys] = [tile.q_rows, tile.kv_cols].map(|n| n as usize);
            let mut case = plain.clone();
            let problem = &mut case.problem;
            (problem.q_len, problem.kv_len) = [(rows + 1, 5 * keys + 3), (7, 6 * keys)][i];
            (problem.head_dim, problem.q_heads, problem.kv_heads) = (dim as usize, 2, 1);
            problem.scale = f64::from(dim).sqrt().recip();
            if i == 0 {
                (problem.mask, problem.q_offset) = (OracleMask::causal(), 4 * keys as u64);
            }
            let keys = [Keys::Whole, Keys::Finished][i];
            calls.push((call(case, dtype), with, keys, Timing::ALL[(n + i) % 3]));
        }
    }
    judge(&calls);
}

/// A few rows over many keys: rows of several heads in a tile, groups that do not divide it, parts
/// of unequal length.
#[test]
fn few_rows_over_many_keys_agree_with_the_oracle_with_split_keys() {
    let plain = cases().into_iter().find(|case| case.name == "one row beyond a tile").unwrap();
    let mut calls = Vec::new();
    // Head dim, rows, query and KV heads.
    let shapes = [
        (64, 1, 8, 1),
        (64, 3, 6, 2),
        (40, 30, 8, 4),
        (96, 1, 1, 1),
        (128, 1, 4, 2),
        (128, 17, 4, 1),
        (192, 5, 9, 3),
        (256, 1, 70, 1),
    ];
    for (n, (dim, q_len, q_heads, kv_heads)) in shapes.into_iter().enumerate() {
        let mut case = plain.clone();
        let problem = &mut case.problem;
        (problem.head_dim, problem.q_len, problem.kv_len) = (dim, q_len, 389);
        (problem.q_heads, problem.kv_heads) = (q_heads, kv_heads);
        (problem.mask, problem.q_offset) = (OracleMask::causal(), 389 - q_len as u64);
        problem.scale = (dim as f64).sqrt().recip();
        for dtype in [[Dtype::F16, Dtype::Bf16][n % 2], Dtype::F32] {
            calls.push((call(case.clone(), dtype), Kernel::Decode(3), Keys::Whole, Timing::ALL[n % 3]));
        }
    }
    judge(&calls);
}
