//! `kyklos bench`.

use crate::support::*;

#[test]
fn every_combination_is_timed_and_checked() {
    let output = kyklos(&[
        "bench",
        "--device",
        "cpu",
        "--shape",
        "1,96,4,2,32",
        "--shape",
        "2,33,2,1,64",
        "--mask",
        "causal",
        "--mask",
        "window:8,0",
        "--dtype",
        "f32",
        "--dtype",
        "bf16",
        "--repeat",
        "2",
        "--json",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let lines = lines.as_array().unwrap();
    assert_eq!(lines.len(), 8);
    for line in lines {
        let number = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("{name} in {line}"));
        assert!(0.0 < number("min_ms") && number("min_ms") <= number("median_ms"));
        assert!(number("median_ms") <= number("max_ms") && number("gflop_per_s") > 0.0);
        assert!(number("max_abs_error") <= number("tolerance") && number("tolerance") < 0.1);
        assert!(line["error"].is_null());
    }
}

#[test]
fn calls_are_repeated_for_a_time() {
    let words =
        ["bench", "--device", "cpu", "--shape", "1,64,1,1,32", "--mask", "full", "--dtype", "f32", "--json"];
    let elapsed = |ms: &str| {
        let began = std::time::Instant::now();
        let output = kyklos(&[&words[..], &["--duration-ms", ms]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let lines: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(lines[0]["median_ms"].as_f64().unwrap() > 0.0);
        began.elapsed().as_millis()
    };
    elapsed("1");
    assert!(elapsed("400") >= 600, "half of the time more for runs that are not timed");
    assert_eq!(
        kyklos(&[&words[..], &["--duration-ms", "9", "--repeat", "2"]].concat()).status.code(),
        Some(2)
    );
}

#[test]
fn the_last_tokens_alone_are_queries() {
    let output = kyklos(&[
        "bench",
        "--device",
        "cpu",
        "--shape",
        "1,300,4,1,64",
        "--mask",
        "causal",
        "--dtype",
        "f16",
        "--queries",
        "1",
        "--repeat",
        "1",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.contains("1,300,4,1,64") && text.contains("tolerance"), "{text}");
}

#[test]
fn a_backward_pass_is_timed_and_its_gradients_are_held_to_the_oracle() {
    let output = kyklos(&[
        "bench",
        "--backward",
        "--device",
        "cpu",
        "--shape",
        "2,200,6,2,40",
        "--mask",
        "window:30,0//valid:120",
        "--dtype",
        "f32,f16",
        "--repeat",
        "1",
        "--json",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(lines.len(), 2);
    for line in lines {
        let number = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("{name} in {line}"));
        // Gradients of a right kernel are never exact: an error of 0 would mean that nothing was compared.
        assert!(0.0 < number("max_abs_error") && number("max_abs_error") <= number("tolerance"), "{line}");
    }
}

#[test]
fn a_kernel_that_a_device_has_not_is_told_once_and_fails() {
    let output = kyklos(&[
        "bench",
        "--device",
        "cpu",
        "--kernel",
        "auto,portable",
        "--shape",
        "1,16,2,2,8",
        "--dtype",
        "f32",
        "--repeat",
        "1",
    ]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.matches("use --kernel auto").count(), 1, "{text}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("2 of 4 combinations"));
}

#[test]
fn every_row_is_held_to_the_device_in_f32() {
    let common = [
        "bench",
        "--device",
        "cpu",
        "--shape",
        "2,150,4,2,24",
        "--mask",
        "causal",
        "--repeat",
        "1",
        "--verify",
    ];
    let run = |more: &[&str]| kyklos(&[&common[..], more].concat());
    let output = run(&["--dtype", "f16", "--dtype", "bf16", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for line in lines.as_array().unwrap() {
        assert_eq!(line["every_row"]["rows"], 1200, "{line}");
        assert!(
            line["every_row"]["max_abs_error"].as_f64() >= line["max_abs_error"].as_f64().map(|e| e / 2.0)
        );
    }
    let refused = run(&["--dtype", "f32"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("add --dtype f16 or --dtype bf16"));
}

#[test]
fn another_program_takes_turns_and_is_told_the_case() {
    let folder = tempfile::tempdir().unwrap();
    let peer = folder.path().join("peer.sh");
    std::fs::write(
        &peer,
        "[ \"$1\" = 1,4:64,2,1,16,causal,f32 ] && [ \"$2\" = 2 ] || { echo \"told $*\" >&2; exit 1; }\n\
         echo '{\"first_ms\":5,\"times_ms\":[1,2,3],\"max_abs_error\":1e-7}'\n",
    )
    .unwrap();
    let against = format!("other=sh {}", peer.display());
    let common = ["bench", "--shape", "1,64,2,1,16", "--mask", "causal", "--dtype", "f32", "--queries", "4"];
    let run =
        |more: &[&str]| kyklos(&[&common[..], &["--repeat", "2", "--against", &against], more].concat());
    let output = run(&["--device", "cpu", "--rounds", "2", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let cases: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(cases[0]["left_out"].as_array().map(Vec::len), Some(0), "{cases}");
    let programs = cases[0]["programs"].as_array().unwrap();
    assert_eq!([&programs[0]["name"], &programs[1]["name"]], ["kyklos", "other"]);
    assert_eq!(programs[1]["medians_ms"], serde_json::json!([2.0, 2.0]));
    for (wrong, named) in [
        (&["--device", "cpu", "--kernel", "auto,portable"][..], "2 kernels"),
        (&["--device", "cpu", "--against", "nameless"], "NAME=COMMAND"),
    ] {
        let output = run(wrong);
        assert_eq!(output.status.code(), Some(2));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains(named), "{text}");
    }
}

/// A vector operation that the compiler leaves out of line runs as a call through memory: the
/// kernel takes 1.5 times as long, and computes the same. The program's own symbol table shows it.
#[test]
#[cfg(not(debug_assertions))]
fn no_vector_instruction_of_the_cpu_kernels_is_a_call() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_kyklos")).unwrap();
    let has = |name: &[u8]| program.windows(name.len()).any(|bytes| bytes == name);
    assert!(has(b"imp_fastcall") || cfg!(not(target_arch = "x86_64")), "the program has no symbols");
    let intrinsics = b"9core_arch";
    let calls: std::collections::BTreeSet<String> = (0..program.len() - intrinsics.len())
        .filter(|at| program[*at..].starts_with(intrinsics))
        .map(|at| program[at..].iter().map(|byte| char::from(*byte)))
        .map(|name| name.take(80).take_while(|byte| byte.is_ascii_alphanumeric() || *byte == '_').collect())
        .filter(|name: &String| ["avx", "fma", "sse", "neon"].iter().any(|set| name.contains(set)))
        .collect();
    assert!(calls.is_empty(), "{calls:?}: use a loop, not a closure, where these are used (cpu/panel.rs)");
}

#[test]
fn lists_are_joined_by_commas_or_repeated() {
    let count = |lists: &[&str]| {
        let common = [
            "bench",
            "--shape",
            "1,64,2,1,16",
            "--mask",
            "causal",
            "--device",
            "cpu",
            "--repeat",
            "1",
            "--json",
        ];
        json(&kyklos(&[&common, lists].concat())).as_array().unwrap().len()
    };
    assert_eq!(count(&["--dtype", "f32,f16"]), 2);
    assert_eq!(count(&["--dtype", "f32", "--dtype", "f16"]), 2);
}

#[test]
fn planning_proving_and_voting_are_timed_by_the_number_of_ranks() {
    let run = json(&kyklos(&[
        "bench",
        "plans",
        "--ranks",
        "4,8,32",
        "--ulysses",
        "2",
        "--repeat",
        "1",
        "--most-voters",
        "8",
        "--json",
    ]));
    let plans = run["plans"].as_array().unwrap();
    let of = |strategy: &str, ranks: u64| {
        plans.iter().find(|row| row["strategy"] == strategy && row["ranks"] == ranks).unwrap()
    };
    for ranks in [4, 8, 32] {
        // Each rank sends its keys on in all hops but the last one.
        assert_eq!(of("ring", ranks)["messages"], ranks * (ranks - 1));
        // One message to each other rank there, and one back.
        assert_eq!(of("ulysses", ranks)["messages"], 2 * ranks * (ranks - 1));
        // Both ways inside a pair, and round a ring of pairs.
        assert_eq!(of("unified", ranks)["messages"], ranks * (2 + ranks / 2 - 1));
        assert_eq!(of("unified", ranks)["mesh"], format!("2x{}", ranks / 2));
    }
    assert_eq!(plans.len(), 9);
    for row in plans {
        assert!(row["plan_s"].as_f64().unwrap() > 0.0 && row["prove_s"].as_f64().unwrap() > 0.0, "{row}");
    }
    let growth = run["growth"].as_array().unwrap();
    assert_eq!(growth.len(), 9, "three strategies, three times");
    let votes: Vec<&serde_json::Value> =
        run["votes"].as_array().unwrap().iter().map(|vote| &vote["ranks"]).collect();
    assert_eq!(votes, [4, 8]);
}
