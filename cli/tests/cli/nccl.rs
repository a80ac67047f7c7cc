//! `--collective nccl` with the fake NCCL on the fake driver.

use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::*;

const CALL: &[&str] = &[
    "attend",
    "--shape",
    "1,150,4,2,64",
    "--mask",
    "causal",
    "--device",
    "cuda",
    "--split",
    "even",
    "--verify",
    "--json",
];

/// Runs the program with `gpus` fake GPUs and settings of the fake NCCL.
fn with_nccl(gpus: u32, nccl: &str, arguments: &[&str]) -> Output {
    let cache = tempfile::tempdir().unwrap();
    let child = command(arguments)
        .env("LD_LIBRARY_PATH", kyklos_fake_cuda::library_path())
        .env("KYKLOS_FAKE_CUDA", format!("devices={gpus},memory_mb=512,report=1"))
        .env("KYKLOS_FAKE_NCCL", nccl)
        .env("KYKLOS_CACHE_DIR", cache.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    finish(child.unwrap(), Duration::from_secs(120))
}

fn is_right(output: &Output, ranks: u64) {
    succeeds(output);
    let json = json(output);
    assert_eq!(json["ranks"], ranks);
    assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap(), "{json}");
    let text = stderr(output);
    assert!(text.contains("messages go by NCCL 2.21.5; this has never been tried on a GPU"), "{text}");
}

#[test]
fn ranks_of_one_process_exchange_messages_by_nccl() {
    for more in [
        &["--ranks", "3"][..],
        &["--mesh", "2x2", "--transport", "quic", "--dtype", "bf16"],
        &["--mesh", "1x2", "--wire", "int8", "--dtype", "bf16"],
        &["--mesh", "2x1", "--grad"],
    ] {
        let ranks = if more.contains(&"2x2") {
            4
        } else if more.contains(&"3") {
            3
        } else {
            2
        };
        let output = with_nccl(4, "report=1", &[CALL, more, &["--collective", "nccl"]].concat());
        is_right(&output, ranks);
        // One communicator for each rank, and no byte of a message went through the host's way.
        let text = stderr(&output);
        assert!(text.contains("0 communicators aborted") && !text.contains(" 0 groups run"), "{text}");
    }
}

#[test]
fn every_strategy_runs_with_messages_by_nccl() {
    const STRATEGIES: [(&str, &str, u64); 13] = [
        ("dense", "1x1", 1),
        ("ring", "1x3", 3),
        ("ulysses", "2x1", 2),
        ("unified", "2x2", 4),
        ("chunked", "2x2", 4),
        ("bidirectional", "1x4", 4),
        ("pipelined", "1x3", 3),
        ("two-way", "1x4", 4),
        ("line", "1x3", 3),
        ("gather", "1x3", 3),
        ("pass-q", "1x3", 3),
        ("tree", "1x4", 4),
        ("relay", "2x2", 4),
    ];
    let call =
        ["attend", "--shape", "1,90,8,2,32", "--mask", "causal", "--device", "cuda", "--verify", "--json"];
    for (strategy, mesh, ranks) in STRATEGIES {
        let more = ["--split", "even", "--collective", "nccl", "--strategy", strategy, "--mesh", mesh];
        is_right(&with_nccl(4, "report=1", &[&call[..], &more].concat()), ranks);
    }
}

#[test]
fn launched_ranks_exchange_messages_by_nccl() {
    let launch = [&["launch", "-n", "3", "--"][..], CALL, &["--collective", "auto"]].concat();
    is_right(&with_nccl(3, "", &launch), 3);
}

#[test]
fn messages_go_by_nccl_between_some_ranks_and_through_the_host_to_the_others() {
    let call =
        ["attend", "--shape", "1,150,4,2,64", "--mask", "causal", "--split", "even", "--verify", "--json"];
    let mixed = ["--device", "cuda:0,cpu,cuda:1", "--collective", "auto"];
    let words = "messages go by NCCL 2.21.5 between ranks 0, 2; through host memory from and to rank 1 (its device is ";
    for more in [
        &["--ranks", "3"][..],
        &["--ranks", "3", "--transport", "quic", "--grad"],
        &["--mesh", "1x3", "--strategy", "two-way", "--dtype", "bf16"],
    ] {
        let output = with_nccl(2, "report=1", &[&call, &mixed[..], more].concat());
        succeeds(&output);
        let (json, text) = (json(&output), stderr(&output));
        assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap(), "{json}");
        assert!(text.contains(words), "{text}");
        assert!(text.contains("0 communicators aborted") && !text.contains(" 0 groups run"), "{text}");
    }
}

#[test]
fn a_software_gpu_shares_a_ring_with_cores_and_two_gpus_that_use_nccl() {
    if !stdout(&kyklos(&["devices"])).contains("wgpu:0") {
        assert_ne!(std::env::var("KYKLOS_REQUIRE_GPU").as_deref(), Ok("1"), "there is no wgpu device");
        return;
    }
    let call =
        ["attend", "--shape", "1,150,4,2,64", "--mask", "causal", "--split", "even", "--verify", "--json"];
    let mixed = ["--ranks", "4", "--device", "cuda:0,wgpu,cuda:1,cpu", "--collective", "auto"];
    let output = with_nccl(2, "report=1", &[&call[..], &mixed].concat());
    succeeds(&output);
    let (json, text) = (json(&output), stderr(&output));
    assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap(), "{json}");
    assert!(
        text.contains("NCCL 2.21.5 between ranks 0, 2; through host memory from and to rank 1 ("),
        "{text}"
    );
    assert!(!text.contains(" 0 groups run"), "{text}");
}

/// The result is right, and messages went from device to device between `ranks`.
fn copies(output: &Output, ranks: &str) {
    succeeds(output);
    let (json, text) = (json(output), stderr(output));
    assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap(), "{json}");
    let words = format!("messages go by copies from device to device between {ranks}");
    assert!(text.contains(&words) && text.contains("never been tried on a GPU"), "{text}");
    assert!(text.contains(" bytes copied between devices"), "{text}");
    assert!(!text.contains("fake driver: 0 bytes copied between devices"), "{text}");
}

#[test]
fn without_nccl_the_gpus_of_a_process_copy_from_device_to_device() {
    const TOO_OLD: &str = "version=21602";
    for (devices, more, ranks) in [
        ("cuda:0,cuda:1,cuda:2,cuda:3", &["--mesh", "2x2", "--dtype", "bf16"][..], "ranks 0, 1, 2, 3;"),
        ("cuda:0,cuda:1", &["--mesh", "2x1", "--transport", "quic", "--grad"], "ranks 0, 1;"),
        ("cuda:0,cpu,cuda:1", &["--ranks", "3"], "ranks 0, 2; all other messages through host memory;"),
    ] {
        let call = [
            "attend",
            "--shape",
            "1,150,4,2,64",
            "--device",
            devices,
            "--split",
            "even",
            "--verify",
            "--json",
        ];
        copies(&with_nccl(4, TOO_OLD, &[&call, more, &["--collective", "auto"]].concat()), ranks);
    }
    // Two processes with one GPU each have none in common.
    let launch = [&["launch", "-n", "2", "--"][..], CALL, &["--collective", "auto"]].concat();
    let output = with_nccl(2, TOO_OLD, &launch);
    succeeds(&output);
    let text = stderr(&output);
    assert!(text.contains("2.16.2") && text.contains("; messages go through host memory"), "{text}");
}

#[test]
fn without_two_ranks_that_have_nccl_no_rank_uses_it() {
    let mixed =
        ["attend", "--shape", "1,90,2,2,32", "--ranks", "2", "--device", "cuda,cpu", "--split", "even"];
    let output = with_nccl(1, "", &[&mixed[..], &["--collective", "auto", "--verify"]].concat());
    succeeds(&output);
    let text = stderr(&output);
    assert!(text.contains("NCCL is not used: rank 1: its device is "), "{text}");
    assert!(text.contains("not a CUDA device; messages go through host memory"), "{text}");
    // Two ranks on one GPU, and a communicator that fails.
    for (gpus, nccl, words, exit) in [
        (1, "", "Duplicate GPU detected", 1),
        (2, "fault_rank=1,init_fails=1,code=2", "rank 1: cuda:1: make a communicator of NCCL failed", 1),
        (2, "version=21602", "its version is 2.16.2, the oldest that works is 2.18.0", 2),
    ] {
        let ranks = ["--ranks", "2"];
        let output = with_nccl(gpus, nccl, &[CALL, &ranks, &["--collective", "nccl"]].concat());
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(exit), "{text}");
        assert!(text.contains("NCCL is not used") && text.contains(words), "{text}");
        assert!(text.contains(": use --collective host"), "{text}");
        let output = with_nccl(gpus, nccl, &[CALL, &ranks, &["--collective", "auto"]].concat());
        copies(&output, "ranks 0, 1;");
    }
}

#[test]
fn records_and_the_doctor_tell_what_nccl_did() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let call = [CALL, &["--ranks", "3", "--collective", "nccl", "--record", path]].concat();
    let state = || {
        // It ends with 1 where it finds something.
        let report: serde_json::Value =
            serde_json::from_slice(&kyklos(&["doctor", path, "--json"]).stdout).unwrap();
        let of_rank = |rank: &serde_json::Value| rank["messages"]["nccl"].clone();
        let states: Vec<_> = report["ranks"].as_array().unwrap().iter().map(of_rank).collect();
        (states, report)
    };
    is_right(&with_nccl(3, "", &call), 3);
    let (states, report) = state();
    assert_eq!(report["findings"], serde_json::json!([]));
    for nccl in &states {
        assert_eq!((&nccl["version"], &nccl["ranks"]), (&"2.21.5".into(), &serde_json::json!([0, 1, 2])));
        assert_eq!((&nccl["posted"], &nccl["ended"]), (&2.into(), &2.into()), "{nccl}");
        assert!(
            nccl["library"].as_str().unwrap().ends_with("libnccl.so.2") && nccl["failure"].is_null(),
            "{nccl}"
        );
    }
    let text = stdout(&kyklos(&["doctor", path]));
    assert!(text.contains("messages of ranks 0, 1, 2 went by NCCL 2.21.5 (/"), "{text}");
    // The second group of rank 1 fails.
    let output = with_nccl(3, "fault_rank=1,async_at=2,code=6", &call);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let (states, report) = state();
    assert_eq!((&states[1]["posted"], &states[1]["ended"]), (&2.into(), &1.into()), "{states:?}");
    assert!(states[1]["failure"].as_str().unwrap().contains("told to fail"), "{states:?}");
    let findings = report["findings"].as_array().unwrap();
    let of_nccl = findings.iter().find(|finding| finding["what"] == "nccl").unwrap();
    assert!(of_nccl["text"].as_str().unwrap().contains("NCCL 2.21.5 was aborted"), "{of_nccl}");
}

#[test]
fn a_rank_that_dies_ends_the_call_of_all() {
    let launch = [&["launch", "-n", "3", "--"][..], CALL, &["--collective", "nccl"]].concat();
    for nccl in ["fault_rank=1,die_at=1", "fault_rank=1,die_at=2,sees_death=1"] {
        let start = Instant::now();
        let output = with_nccl(3, nccl, &launch);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("rank 1"), "{text}");
        assert!(start.elapsed() < Duration::from_secs(100), "{:?}: {text}", start.elapsed());
    }
}

#[test]
fn survivors_start_again_with_a_communicator_of_their_own() {
    // Rank 2, so that no rank of the next group has its number.
    let more = ["--collective", "nccl", "--on-loss", "shrink"];
    let launch = [&["launch", "-n", "3", "--"][..], CALL, &more].concat();
    let output = with_nccl(3, "fault_rank=2,die_at=1", &launch);
    is_right(&output, 2);
    let text = stderr(&output);
    assert!(text.contains("2 ranks start again"), "{text}");
    assert_eq!(text.matches("messages go by NCCL").count(), 2, "{text}");
}

#[test]
fn strategies_are_timed_with_messages_by_nccl_and_apart_from_those_through_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().to_str().unwrap();
    let bench = [
        "bench",
        "strategies",
        "--shape",
        "64,2,2,16",
        "--batch",
        "1",
        "--strategy",
        "ring,ulysses",
        "--placement",
        "contiguous",
        "--repeat",
        "1",
        "--ranks",
        "2",
        "--device",
        "cuda",
        // Without a description rank 0 would measure the emulated kernels, which are slow.
        "--hardware",
        concat!(env!("CARGO_MANIFEST_DIR"), "/../clusters/h100-infiniband.toml"),
        "--output",
        output,
    ];
    let by_nccl = with_nccl(2, "report=1", &[&bench[..], &["--collective", "nccl"]].concat());
    succeeds(&by_nccl);
    let text = stderr(&by_nccl);
    assert!(text.contains("messages go by NCCL 2.21.5") && !text.contains(" 0 groups run"), "{text}");
    assert!(stdout(&by_nccl).contains("links / plan"), "{}", stdout(&by_nccl));
    moved_what_the_plans_send(folder.path(), "NCCL 2.21.5");
    // Without NCCL the devices of one process copy to each other.
    let copies = tempfile::tempdir().unwrap();
    let with_copies =
        [&bench[..bench.len() - 1], &[copies.path().to_str().unwrap(), "--collective", "auto"]].concat();
    succeeds(&with_nccl(2, "version=21602", &with_copies));
    moved_what_the_plans_send(copies.path(), "copies from device to device");
    // The same cells through the host are others: the folder is refused.
    let through_host = with_nccl(2, "", &bench);
    assert_eq!(through_host.status.code(), Some(2), "{}", stderr(&through_host));
    assert!(stderr(&through_host).contains("with messages by NCCL 2.21.5"), "{}", stderr(&through_host));
    // A rank on cores: refused before anything runs.
    let on_cores = [
        "bench",
        "strategies",
        "--ranks",
        "2",
        "--device",
        "cpu",
        "--collective",
        "nccl",
        "--output",
        output,
    ];
    let refused = with_nccl(2, "", &on_cores);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("--collective nccl with --device cpu"), "{}", stderr(&refused));
}

/// Both cells of a bench with two ranks have run with messages of this way, and what has moved to
/// the other rank is what the plan sends.
fn moved_what_the_plans_send(folder: &Path, way: &str) {
    let cells = std::fs::read_to_string(folder.join("cells.jsonl")).unwrap();
    let lines = || cells.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let header = lines().find_map(|line| line.get("header").cloned()).unwrap();
    assert!(header["messages"].as_str().unwrap().starts_with(way), "{header}");
    // Ring on 1x2 and Ulysses on 2x1; each refuses the other mesh.
    let ended = lines().filter_map(|line| line.get("ended").cloned());
    let done: Vec<_> = ended.filter(|cell| cell["state"] == "done").collect();
    assert_eq!(done.len(), 2, "{cells}");
    for (number, rank) in
        done.iter().flat_map(|cell| (0..).zip(cell["measured"]["per_rank"].as_array().unwrap()))
    {
        let links = rank["links"].as_array().unwrap();
        assert_eq!((links.len(), &links[0]["to"]), (1, &(1 - number).into()), "{rank}");
        assert_eq!((&links[0]["bytes"], &links[0]["plan_bytes"]), (&rank["bytes_sent"], &rank["bytes_sent"]));
        // The time of the rank's kernels beside that of the call, and the bytes that it has sent.
        assert!(rank["compute_s"].as_f64().unwrap() > 0.0, "{rank}");
        assert!(rank["compute_s"].as_f64().unwrap() <= rank["wall_s"].as_f64().unwrap(), "{rank}");
        assert!(rank["bytes_sent"].as_u64().unwrap() > 0, "{rank}");
    }
}
