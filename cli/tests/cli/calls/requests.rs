//! Requests: help, plans without a device, described clusters, and environments of launchers.

use crate::support::*;

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
    assert_eq!(missing.status.code(), Some(2), "{}", stderr(&missing));
}

#[test]
fn a_launchers_environment_is_read_and_ranks_comes_before_it() {
    let run = |variables: &[(&str, &str)], arguments: &[&str]| {
        let mut command = command(arguments);
        command.envs(variables.iter().copied());
        command.output().unwrap()
    };
    let attend = ["attend", "--shape", "1,64,8,2,64", "--device", "cpu", "--json"];
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
