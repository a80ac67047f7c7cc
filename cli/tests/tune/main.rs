//! `kyklos tune` from outside, and its effect on other commands.
//!
//! Without a driver the tests that need one are reported as ignored; `KYKLOS_REQUIRE_GPU=1` makes
//! that a failure.
#![expect(
    clippy::unwrap_used,
    reason = "a test: without the standard harness clippy does not see that it is one"
)]

#[path = "../cli/support.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod support;

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use kyklos::Dtype;
use kyklos::backend::StateShape;
use kyklos::backend::wgpu::{AttendVariant, TuningEntry, TuningTable, WgpuBackend};
use libtest_mimic::{Arguments, Failed, Trial};
use support::{command, finish, stderr, stdout};

/// A small shape, and its state.
const SHAPE: &str = "1,40,2,1,16";
const STATE: StateShape = StateShape { batch: 1, rows: 40, heads: 2, dim: 16 };

fn main() {
    let arguments = Arguments::from_args();
    let wgpu: [(&str, fn()); 4] = [
        ("candidates_are_timed_and_checked_and_the_choice_is_kept", timed_checked_and_kept),
        ("a_kept_choice_is_used_until_it_is_switched_off", used_until_switched_off),
        ("a_file_that_cannot_be_used_is_reported_once_and_stops_nothing", unusable_file),
        ("an_exceeded_budget_leaves_the_choices_alone", over_budget),
    ];
    let there = !WgpuBackend::enumerate().is_empty();
    let required = std::env::var_os("KYKLOS_REQUIRE_GPU").is_some_and(|value| value == "1");
    let mut trials: Vec<Trial> = wgpu
        .into_iter()
        .map(|(name, test)| {
            let run = move || {
                if !there {
                    return Err(Failed::from("no Vulkan, Metal or DX12 driver here"));
                }
                test();
                Ok(())
            };
            Trial::test(name, run).with_ignored_flag(!there && !required)
        })
        .collect();
    for (name, test) in [
        ("wrong_requests_name_the_remedy", wrong_requests as fn()),
        ("without_a_driver_there_is_nothing_to_tune", no_driver),
    ] {
        trials.push(Trial::test(name, move || {
            test();
            Ok(())
        }));
    }
    libtest_mimic::run(&arguments, trials).exit();
}

/// Runs the program with its cache in `folder`.
fn kyklos(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = command(arguments);
    command.env_remove("KYKLOS_TUNE").env("KYKLOS_CACHE_DIR", folder);
    command.envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().unwrap(), Duration::from_secs(120))
}

/// The kernel that `bench` uses for the small shape.
fn kernel(folder: &Path, variables: &[(&str, &str)]) -> (String, String) {
    let arguments = [
        "bench", "--device", "wgpu:0", "--shape", SHAPE, "--mask", "causal", "--dtype", "f32", "--repeat",
        "1", "--json",
    ];
    let output = kyklos(folder, &arguments, variables);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let lines: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let error = lines[0]["max_abs_error"].as_f64().unwrap();
    assert!(error <= lines[0]["tolerance"].as_f64().unwrap());
    (lines[0]["kernel"].as_str().unwrap().to_owned(), stderr(&output))
}

/// A choice for the small shape that is not the built-in one, kept as the program keeps it.
fn keep_another(folder: &Path) -> AttendVariant {
    let backend = WgpuBackend::new(0).unwrap();
    let variant = backend.attend_choices(Dtype::F32, STATE.dim).unwrap()[1];
    let mut table = TuningTable::default();
    table.set(TuningEntry { key: backend.tuning_key(Dtype::F32, STATE).unwrap(), variant });
    let contents = serde_json::json!({ "version": 1, "entries": table });
    fs::write(folder.join("tuning.json"), contents.to_string()).unwrap();
    variant
}

fn timed_checked_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let tune =
        ["tune", "--device", "wgpu:0", "--shape", SHAPE, "--dtype", "f32", "--budget-s", "3", "--json"];
    let output = kyklos(folder.path(), &[&tune[..], &["--dry-run"]].concat(), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "a dry run keeps nothing");

    let output = kyklos(folder.path(), &tune, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let kept = folder.path().join("tuning.json");
    assert_eq!(report["kept_in"].as_str(), kept.to_str());
    let case = &report["cases"][0];
    let candidates = case["candidates"].as_array().unwrap();
    assert!(candidates.len() >= 3, "{case}");
    for candidate in candidates {
        assert_eq!(candidate["wrong"], false, "{candidate}");
        if let Some(error) = candidate["max_abs_error"].as_f64() {
            assert!(error <= candidate["tolerance"].as_f64().unwrap(), "{candidate}");
        }
    }
    // A test cannot know the fastest variant. It can check that the file has the reported winner.
    let file: serde_json::Value = serde_json::from_slice(&fs::read(&kept).unwrap()).unwrap();
    let entries = file["entries"].as_array().unwrap();
    match case["winner"].as_str() {
        Some(winner) if winner != candidates[0]["variant"] => {
            assert_eq!(entries.len(), 1);
            assert_eq!(entries[0]["variant"], winner);
        }
        _ => assert!(entries.is_empty(), "{file}"),
    }
}

fn used_until_switched_off() {
    let folder = tempfile::tempdir().unwrap();
    let (built_in, _) = kernel(folder.path(), &[]);
    let variant = keep_another(folder.path());
    let (tuned, notes) = kernel(folder.path(), &[]);
    assert_eq!(tuned, format!("{} (tuned)", variant.name()), "{notes}");
    let (off, _) = kernel(folder.path(), &[("KYKLOS_TUNE", "off")]);
    assert_eq!(off, built_in);
    let output = kyklos(folder.path(), &["bench", "--device", "wgpu:0"], &[("KYKLOS_TUNE", "no")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("KYKLOS_TUNE is `no`"), "{}", stderr(&output));
}

fn unusable_file() {
    let folder = tempfile::tempdir().unwrap();
    let (built_in, notes) = kernel(folder.path(), &[]);
    assert!(!notes.contains("ignored"), "{notes}");
    keep_another(folder.path());
    let path = folder.path().join("tuning.json");
    let good = fs::read_to_string(&path).unwrap();
    for bad in [&good[..good.len() / 2], &good.replace("\"version\":1", "\"version\":0")] {
        fs::write(&path, bad).unwrap();
        let (kernel, notes) = kernel(folder.path(), &[]);
        assert_eq!(kernel, built_in);
        assert_eq!(notes.matches("is ignored").count(), 1, "{notes}");
    }
    // The cache folder is a regular file. The command keeps no result, and reports this.
    fs::write(folder.path().join("file"), "").unwrap();
    let tune = ["tune", "--device", "wgpu:0", "--shape", SHAPE, "--dtype", "f32", "--budget-s", "1"];
    let output = kyklos(&folder.path().join("file"), &tune, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("are not kept"), "{}", stderr(&output));
}

fn over_budget() {
    let folder = tempfile::tempdir().unwrap();
    keep_another(folder.path());
    let path = folder.path().join("tuning.json");
    let tune =
        ["tune", "--device", "wgpu:0", "--shape", "1,600,8,8,128", "--dtype", "f32", "--budget-s", "1"];
    let output = kyklos(folder.path(), &tune, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(
        text.contains("too few to judge") || text.contains("the time was over") || text.contains("built-in"),
        "{text}"
    );
    let file: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let dims: Vec<_> =
        file["entries"].as_array().unwrap().iter().map(|entry| &entry["key"]["head_dim"]).collect();
    assert!(dims.iter().any(|dim| **dim == 16), "what was not measured stays: {file}");
}

fn wrong_requests() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, words) in [
        (&["tune", "--device", "cpu"][..], &["one kernel", "wgpu"][..]),
        (&["tune", "--kernel", "portable-2x4"], &["nothing to choose", "portable"]),
        (&["tune", "--kernel", "fast"], &["fast", "subgroup"]),
        (&["tune", "--head-dim", "64", "--shape", SHAPE], &["--shape"]),
        (&["tune", "--budget-s", "0"], &["--budget-s"]),
    ] {
        let output = kyklos(folder.path(), arguments, &[]);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(
            words.iter().all(|word| stderr(&output).contains(word)),
            "{arguments:?}: {}",
            stderr(&output)
        );
    }
    let output = kyklos(folder.path(), &["tune"], &[("KYKLOS_TUNE", "off")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--dry-run"), "{}", stderr(&output));
}

/// The variables give the loader of Vulkan drivers no driver.
fn no_driver() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let nowhere = [("VK_DRIVER_FILES", "/nonexistent"), ("VK_ICD_FILENAMES", "/nonexistent")];
    for arguments in [&["tune"][..], &["tune", "--device", "auto"]] {
        let output = kyklos(folder.path(), arguments, &nowhere);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains("install the GPU's driver"), "{}", stderr(&output));
    }
}
