//! The same on every wgpu device of this machine. Without one nothing is held, and
//! `KYKLOS_REQUIRE_GPU=1` makes that a failure.

use kyklos::backend::wgpu::{KernelChoice, WgpuBackend, WgpuOptions};
use kyklos::backend::{Device, DeviceClass};
use kyklos::{Dtype, RunOptions, Session, SessionOptions};
use kyklos_backend_suite::GradientCase;
use kyklos_oracle::inputs::{Case, CaseBias, cases};
use kyklos_oracle::oracle::{OracleMask, OracleProblem, OracleTerm};
use proptest::test_runner::TestRunner;

use super::random::sets;
use super::{assert_alone, bias, calls, ties};
use crate::amount::amount;

/// Every adapter, opened with `options`, as the program would choose its kernels and with those
/// that run everywhere. With each the head dim to which a sample of the cases is limited: a
/// software driver needs minutes to compile the kernels of all head dims.
fn devices(options: &WgpuOptions) -> Vec<(Device, Option<u32>)> {
    let portable = WgpuOptions { kernel: KernelChoice::Portable, ..options.clone() };
    [options, &portable].into_iter().flat_map(open).collect()
}

/// [`devices`]; in a sample only with the kernels that the program would choose.
fn some_devices(options: &WgpuOptions) -> Vec<(Device, Option<u32>)> {
    amount(open as fn(&WgpuOptions) -> _, devices)(options)
}

fn open(options: &WgpuOptions) -> Vec<(Device, Option<u32>)> {
    let adapters = WgpuBackend::enumerate();
    let required = std::env::var_os("KYKLOS_REQUIRE_GPU").is_some_and(|value| value == "1");
    assert!(!required || !adapters.is_empty(), "KYKLOS_REQUIRE_GPU=1, and there is no wgpu device");
    if adapters.is_empty() {
        eprintln!("no wgpu device here: gradients on wgpu are not tested");
    }
    let open = |(index, adapter): (usize, &kyklos::backend::DeviceInfo)| {
        let device = Device::from(WgpuBackend::with_options(index, options).unwrap());
        let software = adapter.class == DeviceClass::SoftwareGpu;
        (device, amount(software.then_some(32), None))
    };
    adapters.iter().enumerate().map(open).collect()
}

#[test]
fn one_wgpu_device_agrees_with_the_oracle_in_every_case() {
    for (device, only_dim) in devices(&WgpuOptions::default()) {
        for dtype in Dtype::ALL {
            // In a sample each 16-bit type runs every fourth case, and the two run different ones.
            let sparse = only_dim.is_some() && dtype != Dtype::F32;
            let (offset, step) = if sparse { (dtype as usize, 4) } else { (0, 1) };
            let chosen = cases()
                .into_iter()
                .filter(|case| only_dim.is_none_or(|dim| case.problem.head_dim == dim as usize));
            for case in chosen.skip(offset).step_by(step) {
                assert_alone(&GradientCase::new(case, dtype).with_bias_gradient(), &device);
            }
        }
    }
}

#[test]
fn equal_logits_of_any_size_have_equal_shares_of_the_gradients_on_wgpu_devices() {
    for (device, _) in devices(&WgpuOptions::default()) {
        ties::every_size(&device);
    }
}

/// With logits of 100, a logit that is rounded otherwise than in the log-sum-exp changes its weight
/// by 1e-5. Heads of 64 and more too, because how a logit is added up depends on the head dim.
#[test]
fn gradients_of_large_logits_on_wgpu_agree_with_the_oracle() {
    for (device, _) in some_devices(&WgpuOptions::default()) {
        for case in cases().into_iter().filter(|case| case.name.starts_with("thirty times")) {
            assert_alone(&GradientCase::new(case, Dtype::F32), &device);
        }
        let dims: &[usize] = amount(&[][..], &[8, 72, 96, 128][..]);
        for dim in dims {
            let mut large = case("large logits", [1, 65, 65], [2, 1, *dim], OracleMask::full());
            large.problem.scale *= 30.0;
            assert_alone(&GradientCase::new(large, Dtype::F32), &device);
        }
    }
}

/// Several regions of rows and of keys.
#[test]
fn gradients_of_tensors_beyond_one_binding_agree_with_the_oracle() {
    let small = WgpuOptions { max_binding_bytes: Some(1 << 16), ..WgpuOptions::default() };
    for (device, _) in some_devices(&small) {
        let heads = [4, 2, 32];
        let documents = OracleMask::full().and(OracleTerm::Documents(vec![0, 20, 270, 300]));
        let bias = CaseBias { additive: true, batch: 1, heads: 1, shared_rows: false, stand_in: false };
        let of_rows = CaseBias { batch: 2, heads: 4, shared_rows: true, ..bias };
        for case in [
            case("full", [2, 300, 300], heads, OracleMask::full()),
            case("causal", [1, 500, 600], heads, OracleMask::causal()),
            case("documents", [2, 300, 300], heads, documents),
            Case { bias: Some(bias), ..case("bias", [1, 200, 200], heads, OracleMask::causal()) },
            Case { bias: Some(bias), ..case("bias", [2, 300, 300], heads, OracleMask::full()) },
            Case {
                bias: Some(of_rows),
                ..case("bias of all rows", [2, 300, 300], heads, OracleMask::full())
            },
        ] {
            assert_alone(&GradientCase::new(case, Dtype::F32).with_bias_gradient(), &device);
        }
    }
}

#[test]
fn every_random_world_of_wgpu_devices_agrees_with_the_oracle() {
    for (device, only_dim) in some_devices(&WgpuOptions::default()) {
        // Of a software driver always one head dim: it compiles those of 64 elements for seconds each, and
        // plan sets need dozens.
        let dims: &[usize] =
            if device.info().class == DeviceClass::SoftwareGpu { &[24] } else { &[8, 24, 64] };
        let dtypes: &[Dtype] = if only_dim.is_some() { &[Dtype::F32, Dtype::Bf16] } else { &Dtype::ALL };
        TestRunner::new(crate::cases(24, 300)).run(&sets(dims, dtypes), |call| call.check(&device)).unwrap();
    }
}

#[test]
fn the_same_backward_pass_on_wgpu_gives_the_same_bytes_and_reads_no_memory_that_no_step_wrote() {
    for (device, _) in some_devices(&WgpuOptions::default()) {
        calls::poison_changes_nothing(|transport, poison| {
            let run = RunOptions { poison, ..RunOptions::default() };
            Session::with_options(
                transport,
                device.clone(),
                SessionOptions { run, ..SessionOptions::default() },
            )
        });
    }
}

/// A case without softcap, sinks and bias.
fn case(name: &'static str, [batch, q_len, kv_len]: [usize; 3], heads: [usize; 3], mask: OracleMask) -> Case {
    let [q_heads, kv_heads, head_dim] = heads;
    let problem = OracleProblem {
        batch,
        q_len,
        kv_len,
        q_heads,
        kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f64).sqrt(),
        softcap: None,
        mask,
        q_offset: (kv_len - q_len) as u64,
        sinks: Vec::new(),
    };
    Case { name, seed: 11, problem, poison: Vec::new(), bias: None }
}

/// Rows and keys that are no multiples of tiles, logits far beyond the softcap, sinks far above all
/// logits, large heads.
#[test]
fn odd_shapes_on_wgpu_agree_with_the_oracle() {
    let window = OracleTerm::Window { left: 70, right: -1 };
    for (device, only_dim) in some_devices(&WgpuOptions::default()) {
        let mut sinks = case("far sinks", [1, 190, 192], [4, 1, 32], OracleMask::causal());
        sinks.problem.sinks = vec![3.0, 30.0, -200.0, 1.0];
        let mut capped = case("logits at five caps", [1, 97, 97], [6, 3, 32], OracleMask::causal());
        capped.problem.scale *= 10.0;
        capped.problem.softcap = Some(2.0);
        let mut cases = vec![
            case("keys 64 mod 128", [3, 37, 192], [6, 2, 32], OracleMask::full()),
            sinks,
            capped,
            case("a window over tiles", [2, 301, 301], [4, 2, 32], OracleMask::causal().and(window.clone())),
        ];
        let dims: &[usize] = if only_dim.is_none() { &[72, 128, 192, 256, 264, 512] } else { &[] };
        for dim in dims {
            cases.push(case("large heads", [1, 41, 70], [4, 2, *dim], OracleMask::causal()));
            let bias = CaseBias { additive: true, batch: 1, heads: 4, shared_rows: false, stand_in: false };
            let plain = case("large heads with a bias", [1, 41, 70], [4, 2, *dim], OracleMask::causal());
            cases.push(Case { bias: Some(bias), ..plain });
        }
        let dtypes: &[Dtype] = if only_dim.is_some() { &[Dtype::F32] } else { &Dtype::ALL };
        for case in cases {
            for dtype in dtypes.iter().copied() {
                assert_alone(&GradientCase::new(case.clone(), dtype).with_bias_gradient(), &device);
            }
        }
    }
}

/// Both kinds of kernels also in a sample.
#[test]
fn every_shape_of_bias_has_its_gradient_on_wgpu() {
    for (device, only_dim) in devices(&WgpuOptions::default()) {
        bias::every_shape_agrees_with_the_oracle(&device, only_dim.is_none());
        bias::every_shape_has_the_same_bytes_again(&device);
        bias::rows_without_keys_add_nothing(&device);
    }
}

/// More query heads than a subgroup has lanes, and several for each KV head. Without a head axis
/// each head is a dispatch of its own.
#[test]
fn a_bias_of_many_heads_has_its_gradient_on_wgpu() {
    for (device, _) in some_devices(&WgpuOptions::default()) {
        for (heads, shared_rows) in [(1, false), (1, true), (42, false), (42, true)] {
            let bias = CaseBias { additive: true, batch: 1, heads, shared_rows, stand_in: false };
            let plain = case("many heads", [2, 41, 70], [42, 14, 32], OracleMask::causal());
            let case = Case { bias: Some(bias), ..plain };
            assert_alone(&GradientCase::new(case, Dtype::F32).with_bias_gradient(), &device);
        }
    }
}
