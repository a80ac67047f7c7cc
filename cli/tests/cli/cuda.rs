//! `--device cuda` on the fake driver, whose kernels are emulated: small shapes.

use std::process::{Output, Stdio};
use std::time::Duration;

use crate::support::*;

/// The emulated GPUs have unlike names and speeds: by their speed, some get no tokens.
const EVEN: &[&str] = &["--split", "even"];

/// Runs the program with the fake driver as its CUDA driver.
fn with_driver(fake: &str, arguments: &[&str]) -> Output {
    with_switches(fake, &[], arguments)
}

fn with_switches(fake: &str, switches: &[(&str, &str)], arguments: &[&str]) -> Output {
    let cache = tempfile::tempdir().unwrap();
    let child = command(arguments)
        .env("LD_LIBRARY_PATH", kyklos_fake_cuda::library_path())
        .env("KYKLOS_FAKE_CUDA", fake)
        .env("KYKLOS_CACHE_DIR", cache.path())
        .envs(switches.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    finish(child.unwrap(), Duration::from_secs(120))
}

#[test]
fn ranks_share_the_gpus_of_a_machine_and_the_result_is_right() {
    for (more, names) in [
        (&["--ranks", "2", "--device", "cuda"][..], ["Fake GPU 0", "Fake GPU 1"]),
        (
            &["--ranks", "2", "--device", "cuda:1", "--transport", "quic", "--dtype", "bf16"],
            ["Fake GPU 1"; 2],
        ),
        (&["--mesh", "2x1", "--device", "cuda:1,cuda:0", "--dtype", "f16"], ["Fake GPU 1", "Fake GPU 0"]),
    ] {
        let attend = ["attend", "--shape", "1,150,4,2,64", "--mask", "causal", "--verify", "--json"];
        let output = with_driver("devices=2", &[&attend[..], more, EVEN].concat());
        succeeds(&output);
        let json = json(&output);
        assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap(), "{json}");
        let devices = json["devices"].as_array().unwrap();
        let found: Vec<_> = devices.iter().map(|device| device["name"].as_str().unwrap()).collect();
        assert_eq!(found, names, "{json}");
    }
}

#[test]
fn the_gradient_of_a_bias_is_verified() {
    crate::calls::bias_gradients::verified("cuda", |arguments| {
        with_driver("capability=80", &[arguments, EVEN].concat())
    });
}

#[test]
fn keys_go_round_in_another_form_and_the_result_is_as_right_as_that_allows() {
    for (fake, more) in [
        ("capability=90", &["--mesh", "1x2", "--wire", "f16", "--device", "cuda"][..]),
        ("capability=80", &["--mesh", "1x2", "--wire", "int8", "--device", "cuda", "--dtype", "bf16"]),
        ("capability=90", &["--mesh", "2x2", "--wire", "int8", "--device", "cuda"]),
        // One backend makes the codes, and another backend decodes them.
        (
            "capability=90",
            &["--mesh", "1x3", "--wire", "int8", "--device", "cuda,cpu,cuda", "--dtype", "f16"],
        ),
        ("capability=80", &["--mesh", "1x2", "--wire", "f16", "--device", "cpu,cuda"]),
    ] {
        let attend = ["attend", "--shape", "1,150,4,2,64", "--mask", "causal", "--verify", "--json"];
        let output = with_driver(&format!("devices=2,{fake}"), &[&attend[..], more, EVEN].concat());
        succeeds(&output);
        let json = json(&output);
        let error = json["max_abs_error"].as_f64().unwrap();
        assert!(error <= json["tolerance"].as_f64().unwrap(), "{more:?}: {json}");
        // With f32 the error would be at most 1e-6. A larger error shows that the format rounds.
        assert!(error > 1e-5, "{more:?}: {json}");
    }
}

#[test]
fn with_a_fixed_order_one_gpu_and_several_give_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in ["f32", "bf16"] {
        let outputs = [&["--ranks", "1"][..], &["--ranks", "2"], &["--mesh", "2x2"]].map(|mesh| {
            let file = folder.path().join(format!("{dtype}-{}.safetensors", mesh.concat()));
            let output = ["--output", file.to_str().unwrap(), "--dtype", dtype];
            let call = [
                "attend",
                "--shape",
                "1,1024,2,2,16",
                "--mask",
                "causal",
                "--device",
                "cuda",
                "--fixed-order",
            ];
            let placed = ["--placement", "auto", "--split", "even"];
            succeeds(&with_driver("devices=4", &[&call[..], mesh, &output, &placed].concat()));
            std::fs::read(file).unwrap()
        });
        assert!(
            outputs[0].len() > 1024 * 2 * 16 * 2 && outputs.iter().all(|one| *one == outputs[0]),
            "{dtype}"
        );
    }
}

#[test]
fn a_gpu_and_a_cpu_share_a_ring() {
    let more = ["--mask", "causal", "--ranks", "3", "--device", "cuda:0,cpu,cuda:1", "--verify", "--json"];
    let more = [&more[..], EVEN].concat();
    let output = with_driver("devices=2", &[&["attend", "--shape", "1,90,2,2,32"][..], &more].concat());
    succeeds(&output);
    let json = json(&output);
    assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap(), "{json}");
}

#[test]
fn the_list_of_devices_says_why_it_has_no_gpu() {
    for (fake, why) in
        [("version=11080", "the driver supports CUDA 11.8"), ("devices=0", "CUDA_ERROR_NO_DEVICE")]
    {
        let output = with_driver(fake, &["devices"]);
        succeeds(&output);
        let text = stdout(&output);
        let line = text.lines().find(|line| line.starts_with("no device of cuda: ")).unwrap_or_default();
        assert!(line.contains(why), "{fake}: {text}");
    }
    let text = stdout(&with_driver("devices=1", &["devices"]));
    assert!(text.contains("cuda:0") && !text.contains("no device of cuda"), "{text}");
}

#[test]
fn a_gpu_that_hangs_is_in_the_list_of_devices_with_its_error() {
    let output = with_driver("devices=2,capability=90,hang_at=2", &["devices", "--json"]);
    succeeds(&output);
    let json = json(&output);
    let of = |id: &str| json.as_array().unwrap().iter().find(|device| device["id"] == id).unwrap();
    let hangs = of("cuda:0");
    let error = hangs["error"].as_str().unwrap();
    // After the time of measurements, not that of other calls; with the name of the kernel.
    assert!(
        error.contains("cuda:0: ") && error.contains(" completed nothing for 10 s, in finalize_f32: "),
        "{error}"
    );
    assert!(hangs["gflops"].is_null(), "{hangs}");
    for other in ["cuda:1", "cpu"] {
        assert!(of(other)["gflops"].as_f64().unwrap() > 0.0 && of(other)["error"].is_null(), "{json}");
    }
}

#[test]
fn the_list_of_devices_says_which_kernels_are_switched_off_or_replaced() {
    let two = concat!(env!("CARGO_MANIFEST_DIR"), "/../cuda-backend/src/images/two.cubin");
    for (switches, begin, end, error) in [
        (&[][..], "wgmma and mma.sync, sm_90a", "", None),
        (&[("KYKLOS_CUDA_WGMMA", "off")], "mma.sync (wgmma is off), sm_90a", "", None),
        (&[("KYKLOS_CUDA_IMAGE", two)], "wgmma and mma.sync, sm_90a", "): attend_f32, repack", None),
        (
            &[("KYKLOS_CUDA_IMAGE", "none.cubin")],
            "",
            "",
            Some("none.cubin replaces no kernels: it cannot be read"),
        ),
    ] {
        let output = with_switches("capability=90", switches, &["devices", "--json"]);
        succeeds(&output);
        let json = json(&output);
        let device = json.as_array().unwrap().iter().find(|device| device["id"] == "cuda:0").unwrap();
        let kernel = device["kernel"].as_str().unwrap();
        assert!(kernel.starts_with(begin) && kernel.ends_with(end), "{device}");
        assert_eq!(kernel.contains("; from two.cubin (BLAKE3 "), !end.is_empty(), "{device}");
        match error {
            None => assert!(device["error"].is_null(), "{device}"),
            Some(words) => assert!(device["error"].as_str().unwrap().contains(words), "{device}"),
        }
    }
}

#[test]
fn what_is_not_there_is_refused_with_the_reason() {
    let attend = |device| ["attend", "--shape", "1,16,2,2,8", "--device", device];
    for (fake, device, code, words) in [
        ("devices=2", "cuda:2", 2, &["cuda:2", "has 2", "kyklos devices"][..]),
        ("devices=0", "cuda", 2, &["CUDA_ERROR_NO_DEVICE (100)", "nvidia-smi", "wgpu"]),
        ("version=11080", "cuda", 2, &["11.8", "12.0", "525", "wgpu"]),
        ("version=12040", "cuda", 2, &["12.4", "13.0", "580", "NVRTC"]),
        ("capability=75", "cuda", 2, &["7.5", "8.0", "wgpu"]),
        ("sticky_at=2", "cuda", 1, &["cuda:0", "CUDA_ERROR_ILLEGAL_ADDRESS (700)", "illegal memory access"]),
        ("memory_mb=0", "cuda", 1, &["cuda:0", "needs", "allowed are 0"]),
    ] {
        let output = with_driver(fake, &attend(device));
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{fake}: {text}");
        for word in words {
            assert!(text.contains(word), "{fake}: `{word}` is not in: {text}");
        }
    }
}
