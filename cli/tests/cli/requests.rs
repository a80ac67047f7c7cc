//! Wrong requests: exit code 2, and one line that names a right request.

use crate::support::*;

#[test]
fn wrong_requests_are_refused_on_one_line() {
    let cases: &[(&str, &[&str])] = &[
        ("attend", &["--input", "--shape"]),
        ("bench --device cpu --kernel fast", &["fast", "cooperative"]),
        ("bench --device cpu --shape 1,16,2,2,8 --queries 17", &["--queries 17", "16 tokens"]),
        ("bench --device cpu --shape 1,16,3,2,8", &["3 query heads", "2 kv heads"]),
        ("bench --device cpu --repeat 0", &["--repeat"]),
        ("attend --shape 1,64,8,3,64", &["8 query heads", "3 kv heads"]),
        ("attend --shape 1,64,8,2,60", &["head dim 60", "multiple of 8"]),
        ("attend --shape 0,64,8,2,64", &["batch is 0"]),
        ("attend --shape 1,64,8,2", &["4 numbers", "five"]),
        ("attend --shape 1,64,8,2,64,1", &["6 numbers"]),
        ("attend --shape 1,-64,8,2,64", &["-64"]),
        ("attend --shape 1,99999999999,8,2,64", &["99999999999"]),
        ("attend --shape 1,4294967295,8,2,64", &["position"]),
        ("attend --shape 4294967295,1073741824,1048576,1,512", &["elements"]),
        ("attend --shape 1,2000000000,64,64,512", &["machine has"]),
        ("attend --shape 1,64,3,3,64 --mesh 4x1", &["ulysses = 4", "4 query heads", "has 3", "--mesh"]),
        ("attend --shape 1,64,8,2,64 --mesh 0x4", &["0x4"]),
        ("attend --shape 1,64,8,2,64 --mesh 2", &["UxR"]),
        ("attend --shape 1,64,8,2,64 --mesh 100000x100000", &["at most"]),
        ("attend --shape 1,64,8,2,64 --mesh 32x64", &["at most 256"]),
        ("attend --shape 1,64,8,2,64 --ranks 3 --mesh 2x2", &["4 ranks", "3 ranks"]),
        ("attend --shape 1,64,8,2,64 --ranks 0", &["--ranks"]),
        ("attend --shape 1,64,8,2,64 --ranks 1000000", &["1000000"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --strategy dense", &["dense"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --split work:1", &["1 weights", "2 ranks"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --split work:1,x", &["--split", "x"]),
        ("attend --shape 1,64,8,2,64 --mesh 2x1 --wire f16", &["f16 on the wire", "2x1"]),
        (
            "attend --shape 1,64,8,2,64 --mesh 1x2 --wire f16 --strategy pass-q",
            &["f16 on the wire", "pass-q"],
        ),
        ("attend --shape 1,64,8,2,64 --mesh 2x1 --wire int8", &["int8 on the wire", "2x1"]),
        (
            "attend --shape 1,64,8,2,64 --mesh 1x2 --wire int8 --strategy pass-q",
            &["int8 on the wire", "pass-q"],
        ),
        ("attend --shape 1,64,8,2,64 --mesh 1x2 --wire bf16", &["bf16", "on the wire", "f16 or int8"]),
        ("attend --shape 1,64,8,2,64 --mesh 1x2 --wire f16 --dtype bf16", &["f16 on the wire", "bf16"]),
        ("attend --shape 1,64,8,2,64 --mesh 2x2 --strategy ring", &["ring", "2x2"]),
        ("attend --shape 1,64,8,2,64 --strategy spiral", &["spiral", "unified"]),
        ("attend --shape 1,64,8,2,64 --mesh 2x1 --strategy bidirectional", &["bidirectional", "2x1"]),
        ("attend --shape 1,64,8,2,64 --placement diagonal", &["diagonal", "zigzag"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --split 1", &["1 weights", "2 ranks"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --split 0,0", &["weights"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --split 1,x", &["`x`"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --split 1,nan", &["weights"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --tokens 30,30", &["60", "64"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --tokens 32,32 --split 1,1", &["--tokens", "--split"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --q-tokens 32,32", &["--kv-tokens"]),
        ("attend --shape 1,64,8,2,64 --ranks 2 --kv-tokens 32,32", &["--q-tokens"]),
        (
            "attend --shape 1,64,8,2,64 --ranks 2 --q-tokens 32,32 --kv-tokens 32,32 --tokens 32,32",
            &["--q-tokens", "--tokens"],
        ),
        (
            "attend --shape 1,64,8,2,64 --ranks 2 --q-tokens 32,32 --kv-tokens 32,32 --split 1,1",
            &["--q-tokens", "--split"],
        ),
        (
            "attend --shape 1,64,8,2,64 --ranks 2 --q-tokens 30,30 --kv-tokens 32,32",
            &["60", "64", "--q-tokens"],
        ),
        (
            "attend --shape 1,64,8,2,64 --ranks 2 --q-tokens 32,32 --kv-tokens 32,33",
            &["65", "64", "--kv-tokens"],
        ),
        ("attend --shape 1,64,8,2,64 --mask casual", &["casual", "causal"]),
        ("attend --shape 1,64,8,2,64 --mask window:1", &["two numbers"]),
        ("attend --shape 1,64,8,2,64 --mask documents:0,32", &["32", "64"]),
        ("attend --shape 1,64,8,2,64 --mask valid:65", &["65"]),
        ("attend --shape 2,64,8,2,64 --mask valid:1,2,3", &["3 values", "2 entries"]),
        ("attend --shape 3,64,8,2,64 --mask causal//full", &["2 masks", "3 entries"]),
        ("attend --shape 1,64,8,2,64 --mask bias", &["bias"]),
        ("attend --shape 1,64,8,2,64 --dtype f64", &["f64", "bf16"]),
        ("attend --shape 1,64,8,2,64 --scale inf", &["scale"]),
        ("attend --shape 1,64,8,2,64 --softcap -1", &["softcap"]),
        ("attend --shape 1,64,8,2,64 --repeat 0", &["--repeat"]),
        ("attend --shape 1,64,8,2,64 --device cuda:", &["cuda:", "number"]),
        ("attend --shape 1,64,8,2,64 --device tpu", &["tpu"]),
        ("attend --shape 1,64,8,2,64 --device wgpu:x", &["wgpu:x"]),
        ("attend --shape 1,64,8,2,64 --device cpu,cpu", &["2 devices", "1 ranks"]),
        ("attend --shape 1,64,8,2,64 --transport tcp", &["tcp", "quic"]),
        ("attend --shape 1,64,8,2,64 --progress loud", &["loud", "json"]),
        ("attend --shape 1,64,8,2,64 --input x", &["--input", "--shape"]),
        ("attend --input x --seed 1", &["--input", "--seed"]),
        ("attend --shape 1,64,8,2,64 --sinks=x", &["--sinks"]),
        ("attend --input x --sinks", &["--input", "--sinks"]),
        ("attend --shape 1,64,8,2,64 --bias x", &["--bias"]),
        ("attend --shape 1,64,8,2,64 --output /", &["file name"]),
        ("attend --shape 1,64,8,2,64 more", &["more"]),
        ("plan", &["--input", "--shape"]),
        ("plan --shape 1,64,8,2,64 --rank 1", &["--rank 1"]),
        ("plan --shape 1,64,8,2,64 --verify", &["--verify"]),
        ("plan --shape 1,64,8,2,64 --explain", &["--hardware", "--probe"]),
        ("plan --shape 1,64,8,2,64 --probe", &["--explain"]),
        ("plan --shape 1,64,8,2,64 --explain --measure 1", &["--probe"]),
        ("plan --shape 1,64,8,2,64 --explain --probe --ranks 65", &["65 ranks", "at most 64"]),
        ("plan --shape 1,64,8,2,64 --explain --probe --hardware x", &["--hardware"]),
        ("plan --shape 1,64,8,2,64 --explain --rank 0 --probe", &["--rank 0"]),
        ("launch -n 2", &["attend"]),
        ("launch -- attend --shape 1,64,8,2,64", &["--ranks <N>"]),
        ("launch -n 0 -- attend --shape 1,64,8,2,64", &["--ranks <N>"]),
        ("launch -n 9999 -- attend --shape 1,64,8,2,64", &["at most 256"]),
        ("launch -n 2 -- devices", &["attend"]),
        ("launch -n 2 -- attend --shape 1,64,8,2,64 --ranks 2", &["--ranks"]),
        ("launch -n 2 -- attend --shape 1,64,8,2,64 --transport in-process", &["in-process"]),
        ("launch -n 2 -- attend --shape 1,64,8,2,64 --mesh 2x2", &["4 ranks", "2 ranks"]),
        ("launch -n 2 -- attend --shape 1,64,8,3,64", &["3 kv heads"]),
        ("launch -n 2 -- attend --shape 1,64,8,2,64 --nonsense", &["--nonsense"]),
        ("fly", &["fly"]),
        ("--nonsense", &["--nonsense"]),
    ];
    for (line, words) in cases {
        let arguments: Vec<&str> = line.split(' ').collect();
        let output = kyklos(&arguments);
        eprintln!("{line}\n  {}", stderr(&output));
        refused(&output, words);
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in [&["--help"][..], &["--version"], &["attend", "--help"], &["launch", "--help"]] {
        let output = kyklos(arguments);
        succeeds(&output);
        assert!(!stdout(&output).is_empty());
    }
}

#[test]
fn plans_are_explained_and_proved_without_a_device() {
    let arguments = ["plan", "--shape", "1,4096,8,2,64", "--mask", "causal", "--mesh", "2x2"];
    let output = kyklos(&arguments);
    succeeds(&output);
    let text = stdout(&output);
    for word in ["unified", "2x2", "peak", "steps of rank 0", "steps of rank 3", "exchange", "attend"] {
        assert!(text.contains(word), "`{word}` is not in:\n{text}");
    }
    let json = json(&kyklos(&[&arguments[..], &["--json"]].concat()));
    assert_eq!(json["plans"].as_array().unwrap().len(), 4);
    assert!(json["plans"][0]["check"]["peak_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn plans_are_priced_on_a_described_cluster_and_what_does_not_fit_is_refused() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../clusters");
    let two_hosts = format!("{folder}/two-hosts-1gbe.toml");
    let shape = |tokens: &str| format!("1,{tokens},16,4,128");
    let small = shape("16384");
    let arguments =
        ["plan", "--explain", "--shape", &small, "--ranks", "2", "--dtype", "f16", "--hardware", &two_hosts];
    let output = kyklos(&arguments);
    succeeds(&output);
    for word in ["ring", "ulysses", "is first", "what bounds it: bytes on links", "machine-0 ethernet"] {
        assert!(stdout(&output).contains(word), "`{word}` is not in:\n{}", stdout(&output));
    }
    let json = json(&kyklos(&[&arguments[..], &["--json"]].concat()));
    assert_eq!(json["bound"], "link");
    assert_eq!(json["plans"][0]["plan"]["strategy"], "pipelined");
    assert!(json["plans"][0]["predicted_s"].as_f64().unwrap() > 0.0);
    let large = shape("8388608");
    let arguments =
        ["plan", "--explain", "--shape", &large, "--ranks", "2", "--dtype", "f16", "--hardware", &two_hosts];
    refused(&kyklos(&arguments), &["refused", "bytes, allowed are 8589934592"]);
}

#[test]
fn a_run_on_a_described_cluster_takes_the_fastest_plan_and_says_what_was_predicted() {
    let loopback = concat!(env!("CARGO_MANIFEST_DIR"), "/../clusters/loopback-2-cores.toml");
    let arguments = ["attend", "--shape", "1,512,8,2,64", "--ranks", "4", "--device", "cpu", "--json"];
    let report = json(&kyklos(&[&arguments[..], &["--hardware", loopback, "--verify"]].concat()));
    let predicted_s = report["predicted_s"].as_f64().unwrap();
    let explain =
        ["plan", "--explain", "--shape", "1,512,8,2,64", "--ranks", "4", "--hardware", loopback, "--json"];
    let plans = json(&kyklos(&explain));
    assert_eq!(plans["plans"][0]["predicted_s"].as_f64().unwrap(), predicted_s);
    assert_eq!(plans["plans"][0]["plan"]["mesh"], report["mesh"]);
    assert!(json(&kyklos(&arguments))["predicted_s"].is_null());
    let missing = kyklos(&[&arguments[..], &["--hardware", "/nowhere.toml"]].concat());
    assert_eq!(missing.status.code(), Some(1));
}

#[test]
fn a_launchers_environment_is_read_or_refused() {
    let run = |variables: &[(&str, &str)], arguments: &[&str]| {
        let mut command = command(arguments);
        command.envs(variables.iter().copied());
        command.output().unwrap()
    };
    let attend = ["attend", "--shape", "1,64,8,2,64", "--device", "cpu", "--json"];
    refused(&run(&[("RANK", "0")], &attend), &["WORLD_SIZE"]);
    refused(&run(&[("RANK", "2"), ("WORLD_SIZE", "2")], &attend), &["RANK=2"]);
    refused(&run(&[("RANK", "0"), ("WORLD_SIZE", "2")], &attend), &["MASTER_ADDR"]);
    succeeds(&run(&[("RANK", "0"), ("WORLD_SIZE", "1")], &attend));
    let output = run(&[("RANK", "0"), ("WORLD_SIZE", "2")], &[&attend[..], &["--ranks", "2"]].concat());
    assert_eq!(json(&output)["ranks"], 2);
    assert!(stderr(&output).contains("WORLD_SIZE=2"), "{}", stderr(&output));
    // --ranks takes precedence over all variables, even over invalid ones.
    for (variable, value) in [("RANK", "0"), ("WORLD_SIZE", "2"), ("RANK", "first")] {
        let output = run(&[(variable, value)], &[&attend[..], &["--ranks", "2"]].concat());
        assert_eq!(json(&output)["ranks"], 2);
        let warning = stderr(&output);
        assert!(warning.starts_with("warning: --ranks "), "{warning}");
        assert!(warning.contains(&format!("{variable}={value}")), "{warning}");
    }
}
