//! Attention in one process.

use std::process::Stdio;
use std::time::Duration;

use crate::support::*;

#[test]
fn every_strategy_passes_its_own_verification() {
    for (mesh, placement, mask) in [
        ("1x1", "auto", "causal"),
        ("1x3", "zigzag", "causal"),
        ("2x1", "striped", "window:30,0"),
        ("2x2", "contiguous", "causal+valid:180"),
        ("1x4", "striped", "documents:0,50,200"),
        ("2x2", "zigzag", "slices:0..200x0..20,60..200x50..130/causal,0..40x90..120+valid:190"),
    ] {
        let output = kyklos(&[
            "attend",
            "--shape",
            "1,200,4,2,16",
            "--mesh",
            mesh,
            "--placement",
            placement,
            "--mask",
            mask,
            "--verify",
            "--json",
            "--device",
            "cpu",
        ]);
        let json = json(&output);
        assert_eq!(stderr(&output), "", "quiet in a pipe");
        assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap(), "{json}");
        assert_eq!(json["mesh"], mesh);
    }
}

#[test]
fn a_form_on_the_wire_is_verified_and_its_error_expected() {
    for (wire, dtype) in [("f16", "f32"), ("f16", "f16"), ("int8", "f32"), ("int8", "f16"), ("int8", "bf16")]
    {
        let problem = ["--shape", "1,300,4,2,64", "--wire", wire, "--dtype", dtype, "--mesh", "1x2"];
        let attend = kyklos(&[&["attend", "--verify", "--json", "--device", "cpu"], &problem[..]].concat());
        let attended = json(&attend);
        let error = attended["max_abs_error"].as_f64().unwrap();
        assert!(error <= attended["tolerance"].as_f64().unwrap(), "{attended}");
        assert!(dtype != "f32" || error > 1e-6, "nothing was rounded: {attended}");

        let plan = kyklos(&[&["plan"], &problem[..]].concat());
        succeeds(&plan);
        let says = stdout(&plan).contains(&format!("as {wire}, rounded once: on normal data about "));
        assert_eq!(says, wire != dtype, "{}", stdout(&plan));
        let planned = json(&kyklos(&[&["plan", "--json"], &problem[..]].concat()));
        let expected = planned["wire_expected_error"].as_f64().unwrap();
        let range = match wire {
            _ if wire == dtype => 0.0..=0.0,
            "f16" => 2e-4..=4e-4,
            _ => 8e-3..=9e-3,
        };
        assert!(range.contains(&expected), "{wire} {dtype}: {expected}");
    }
}

#[test]
fn the_json_object_has_the_fields_that_scripts_use() {
    let output = kyklos(&[
        "attend",
        "--shape",
        "2,64,4,2,8",
        "--ranks",
        "2",
        "--strategy",
        "ring",
        "--device",
        "cpu",
        "--json",
    ]);
    let json = json(&output);
    let mut fields: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    fields.sort_unstable();
    assert_eq!(
        fields,
        [
            "devices",
            "max_abs_error",
            "mesh",
            "per_rank",
            "placement",
            "predicted_s",
            "ranks",
            "strategy",
            "tolerance",
            "wall_s"
        ]
    );
    assert_eq!(
        (&json["ranks"], &json["mesh"], &json["strategy"]),
        (&2.into(), &"1x2".into(), &"ring".into())
    );
    assert!(json["max_abs_error"].is_null() && json["predicted_s"].is_null());
    assert_eq!(json["devices"].as_array().unwrap().len(), 2);
    for rank in json["per_rank"].as_array().unwrap() {
        let mut fields: Vec<&str> = rank.as_object().unwrap().keys().map(String::as_str).collect();
        fields.sort_unstable();
        assert_eq!(
            fields,
            ["bytes_sent", "compute_s", "copy_s", "messages_sent", "peak_bytes", "tokens", "wait_s"]
        );
        // One hop of 32 keys and values for 2 batch entries, each with 2 heads of 8 f32.
        assert_eq!(rank["bytes_sent"], 2 * 2 * 32 * 2 * 8 * 4);
        assert_eq!((&rank["messages_sent"], &rank["tokens"]), (&1.into(), &32.into()));
    }
}

#[test]
fn auto_takes_the_mesh_that_sends_least_and_what_the_mesh_says() {
    let of = |arguments: &[&str]| {
        let mut all = vec!["attend", "--device", "cpu", "--json"];
        all.extend(arguments);
        let json = json(&kyklos(&all));
        ["mesh", "strategy", "placement"].map(|field| json[field].as_str().unwrap().to_owned())
    };
    assert_eq!(of(&["--shape", "1,64,4,2,8"]), ["1x1", "dense", "contiguous"]);
    assert_eq!(
        of(&["--shape", "1,64,4,2,8", "--mesh", "2x2", "--mask", "causal"]),
        ["2x2", "unified", "zigzag"]
    );
    assert_eq!(of(&["--shape", "1,64,1,1,8", "--ranks", "2", "--mask", "causal"]), ["1x2", "ring", "zigzag"]);
    assert_eq!(
        of(&["--shape", "1,64,4,2,8", "--ranks", "2", "--strategy", "ulysses"]),
        ["2x1", "ulysses", "contiguous"]
    );
}

#[test]
fn loopback_quic_gives_the_bytes_that_channels_give() {
    let folder = tempfile::tempdir().unwrap();
    let result = |transport: &str| {
        let path = folder.path().join(transport);
        let output = kyklos(&[
            "attend",
            "--shape",
            "1,96,4,2,16",
            "--mesh",
            "2x2",
            "--mask",
            "causal",
            "--transport",
            transport,
            "--device",
            "cpu",
            "--output",
            path.to_str().unwrap(),
        ]);
        succeeds(&output);
        std::fs::read(path).unwrap()
    };
    assert!(result("quic") == result("in-process"));
}

#[test]
fn uneven_splits_give_each_rank_its_tokens() {
    let tokens = |options: &str| -> Vec<u64> {
        let shape = "attend --shape 1,100,2,2,8 --ranks 3 --strategy ring --device cpu,cpu --json --verify";
        let arguments: Vec<&str> = shape.split(' ').chain(options.split(' ')).collect();
        json(&kyklos(&arguments))["per_rank"]
            .as_array()
            .unwrap()
            .iter()
            .map(|rank| rank["tokens"].as_u64().unwrap())
            .collect()
    };
    assert_eq!(tokens("--split 2,1,1"), [50, 25, 25]);
    assert_eq!(tokens("--tokens 0,99,1"), [0, 99, 1]);
    assert_eq!(tokens("--q-tokens 0,99,1 --kv-tokens 50,0,50 --mask causal"), [0, 99, 1]);
    let replicated = "--q-tokens 1,0,99 --kv-tokens 50,0,30 --replicated 10..30 --placement zigzag";
    assert_eq!(tokens(replicated), [1, 0, 99]);
}

#[test]
fn a_fixed_order_runs_in_the_placement_that_fits_it() {
    let placement = |options: &str| -> String {
        let call = "attend --mask causal --fixed-order --device cpu --json --verify";
        let arguments: Vec<&str> = call.split(' ').chain(options.split(' ')).collect();
        let report = json(&kyklos(&arguments));
        format!("{} {}", report["mesh"].as_str().unwrap(), report["placement"].as_str().unwrap())
    };
    assert_eq!(placement("--shape 1,768,2,2,16 --ranks 3"), "1x3 contiguous");
    assert_eq!(placement("--shape 1,768,2,2,16 --mesh 1x3"), "1x3 contiguous");
    assert_eq!(placement("--shape 1,530,4,2,8 --mesh 1x4 --tokens 256,0,256,18"), "1x4 contiguous");
    assert_eq!(placement("--shape 1,2048,2,2,16 --mesh 1x2"), "1x2 zigzag");
}

#[test]
fn a_token_of_joint_attention_has_one_owner() {
    let arguments: Vec<&str> =
        "plan --shape 1,100,4,4,8 --replicated 0..20 --mesh 1x4 --json".split(' ').collect();
    let plans = json(&kyklos(&arguments))["plans"].clone();
    for (rank, plan) in plans.as_array().unwrap().iter().enumerate() {
        let tokens = |name: &str| -> Vec<u64> {
            let buffers = plan["buffers"].as_array().unwrap();
            let buffer = buffers.iter().find(|buffer| buffer["name"] == name).unwrap();
            let number = |run: &serde_json::Value, field: &str| run[field].as_u64().unwrap();
            let runs = buffer["tokens"].as_array().unwrap().iter();
            runs.flat_map(|run| {
                let (start, stride) = (number(run, "start"), number(run, "stride"));
                (0..number(run, "count")).map(move |i| start + i * stride)
            })
            .collect()
        };
        let own = 20 + 20 * rank as u64..40 + 20 * rank as u64;
        let prompt = 5 * rank as u64..5 + 5 * rank as u64;
        assert_eq!(tokens("q"), prompt.chain(own.clone()).collect::<Vec<_>>());
        assert_eq!(tokens("kv"), (0..20).chain(own).collect::<Vec<_>>());
    }
}

#[test]
fn the_table_names_ranks_devices_and_the_verdict() {
    let output = kyklos(&[
        "attend",
        "--shape",
        "1,128,4,2,16",
        "--ranks",
        "2",
        "--mask",
        "causal",
        "--device",
        "cpu",
        "--verify",
    ]);
    succeeds(&output);
    let text = stdout(&output);
    for word in
        ["128 tokens", "mask causal", "rank", "computed", "waited", "copied", "sent", "verified", "tolerance"]
    {
        assert!(text.contains(word), "`{word}` is not in:\n{text}");
    }
}

#[test]
fn progress_lines_and_traces_are_json() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let output = kyklos(&[
        "attend",
        "--shape",
        "1,64,4,2,8",
        "--ranks",
        "2",
        "--strategy",
        "ring",
        "--repeat",
        "2",
        "--device",
        "cpu",
        "--progress",
        "json",
        "--trace",
        trace.to_str().unwrap(),
    ]);
    succeeds(&output);
    let mut seen = std::collections::BTreeSet::new();
    for line in stderr(&output).lines() {
        let event: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(event["pid"].is_u64(), "{event}");
        if event["event"] == "step" {
            assert!(event["step"].as_u64() < event["of"].as_u64() && event["doing"].is_string());
        }
        seen.insert((event["event"].to_string(), event["rank"].as_u64(), event["op"].as_u64()));
    }
    assert_eq!(seen.len(), 8, "step and done of 2 ranks in 2 runs: {seen:?}");
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..2 {
        for category in ["compute", "wait", "send", "receive"] {
            assert!(
                events.iter().any(|event| event["pid"] == rank && event["cat"] == category),
                "{category} of rank {rank}"
            );
        }
    }
}

#[test]
fn a_trace_of_several_processes_is_on_one_clock() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let attend = ["launch", "-n", "3", "--", "attend", "--shape", "1,600,4,2,64", "--strategy", "ring"];
    let output = kyklos(&[&attend[..], &["--device", "cpu", "--trace", trace.to_str().unwrap()]].concat());
    succeeds(&output);
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let within_us = |rank: u64| -> f64 {
        let name = |event: &&serde_json::Value| event["name"] == "process_name" && event["pid"] == rank;
        let name = events.iter().find(name).unwrap()["args"]["name"].as_str().unwrap();
        let within = name.split("clock within ").nth(1).and_then(|text| text.strip_suffix(" µs"));
        assert_eq!(within.is_some(), rank != 0, "{name}");
        within.map_or(0.0, |text| text.parse().unwrap())
    };
    // For each message: the time of its post and the time of its arrival, by the clocks of the two
    // ranks.
    let ends = |category: &str, phase: &str| -> Vec<(u64, String, f64)> {
        let these = events.iter().filter(|event| event["cat"] == category && event["ph"] == phase);
        let one = |event: &serde_json::Value| {
            let name = event["name"].as_str().unwrap().to_owned();
            (event["pid"].as_u64().unwrap(), name, event["ts"].as_f64().unwrap())
        };
        these.map(one).collect()
    };
    let (posted, came) = (ends("send", "b"), ends("receive", "e"));
    assert_eq!((posted.len(), came.len()), (6, 6), "two hops of three ranks");
    for (from, name, posted_us) in posted {
        let (message, asked) = name.split_once(", requested after ").unwrap();
        assert!(asked.strip_suffix(" us").unwrap().parse::<u64>().is_ok(), "{asked}");
        let (bytes, tag) = (message.split(' ').next().unwrap(), message.split_once(", ").unwrap().1);
        let to: u64 = (from + 1) % 3;
        let expected = format!("{bytes} B from rank {from}, {tag}");
        let (_, _, came_us) = came.iter().find(|(rank, name, _)| *rank == to && *name == expected).unwrap();
        let slack_us = within_us(from) + within_us(to);
        assert!(came_us + slack_us > posted_us, "{expected} came at {came_us}, posted at {posted_us}");
        assert!(slack_us < 5e6, "clocks of one machine are compared within {slack_us} µs");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = command(&["plan", "--shape", "1,4096,8,2,64", "--mesh", "1x64", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = finish(child, Duration::from_secs(60));
    succeeds(&output);
    assert_eq!(stderr(&output), "");
}

#[test]
#[cfg(target_os = "linux")]
fn sixteen_thousand_tokens_stay_far_below_the_memory_of_a_laptop() {
    let child =
        command(&["attend", "--shape", "1,16384,8,2,64", "--mask", "causal", "--device", "cpu", "--json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
    let status = format!("/proc/{}/status", child.id());
    let watcher = std::thread::spawn(move || {
        let mut peak_kib = 0;
        while let Ok(text) = std::fs::read_to_string(&status) {
            let line = text.lines().find(|line| line.starts_with("VmHWM:"));
            // A process has no memory after its end, even if its parent has not waited for it yet.
            let Some(line) = line else { break };
            peak_kib = line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        peak_kib
    });
    succeeds(&finish(child, Duration::from_secs(120)));
    let peak_kib = watcher.join().unwrap();
    assert!(peak_kib < 512 << 10, "{peak_kib} KiB");
}

#[test]
fn rows_that_see_only_their_sink_are_verified() {
    // All rows, and the rows between two documents, whose slice hides all keys.
    for (mask, flags) in [
        ("valid:0", "--ranks 1"),
        ("documents:0,32,64,96+slices:0..96x0..40", "--ranks 3 --strategy tree"),
        ("documents:0,32,64,96+slices:0..96x0..40", "--ranks 3 --strategy line"),
        ("documents:0,32,64,96+slices:0..96x0..40", "--ranks 3 --strategy gather"),
    ] {
        let call =
            format!("attend --shape 1,96,2,2,8 --mask {mask} --sinks --verify --json --device cpu {flags}");
        let report = json(&kyklos(&call.split(' ').collect::<Vec<_>>()));
        assert!(report["max_abs_error"].as_f64().unwrap() < 1e-5, "{call}: {report}");
    }
}
