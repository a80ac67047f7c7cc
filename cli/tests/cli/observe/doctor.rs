//! Records of runs that end in different ways, and the findings of the doctor.

use std::path::Path;
use std::process::Output;

use crate::groups::launch::{LongJob, signal};
use crate::support::*;

fn doctor(folder: &Path, arguments: &[&str]) -> Output {
    kyklos(&[&["doctor", folder.to_str().unwrap()], arguments].concat())
}

fn findings(folder: &Path) -> (Option<i32>, Vec<serde_json::Value>) {
    let output = doctor(folder, &["--json"]);
    let json: serde_json::Value = serde_json::from_str(&stdout(&output))
        .unwrap_or_else(|_| panic!("{}{}", stdout(&output), stderr(&output)));
    (output.status.code(), json["findings"].as_array().unwrap().clone())
}

fn records(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn in_the_records_of_a_run_that_went_well_nothing_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let attend = ["attend", "--shape", "1,256,4,2,64", "--device", "cpu", "--record", path];
    for (ranks, arguments) in
        [(3, [&["launch", "-n", "3"][..], &attend].concat()), (2, [&attend[..], &["--ranks", "2"]].concat())]
    {
        for name in records(folder.path()) {
            std::fs::remove_file(folder.path().join(name)).unwrap();
        }
        succeeds(&kyklos(&arguments));
        assert_eq!(records(folder.path()).len(), ranks);
        let output = doctor(folder.path(), &[]);
        assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
        assert!(stdout(&output).contains("no problem found"), "{}", stdout(&output));
    }
}

#[test]
fn the_rank_that_the_others_waited_for_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    // Rank 1 has most of the queries, so it computes for much longer.
    let attend =
        "attend --shape 1,6144,8,8,64 --device cpu --mesh 1x3 --strategy ring --split 1,8,1 --record"
            .split(' ');
    let arguments: Vec<&str> = "launch -n 3 --".split(' ').chain(attend).chain([path]).collect();
    succeeds(&kyklos(&arguments));
    let output = doctor(folder.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(
        (&report["slow"][0]["what"], &report["slow"][0]["ranks"][0]),
        (&"slow-rank".into(), &1.into()),
        "{report}"
    );
    let text = stdout(&doctor(folder.path(), &[]));
    assert!(
        text.contains("rank 1 is what the others waited for") && text.contains("no problem found"),
        "{text}"
    );
}

#[test]
fn files_that_are_no_records_are_unusable_and_damaged_ones_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    refused(&doctor(folder.path(), &[]), &["no records", "--record"]);
    std::fs::write(folder.path().join("rank-0.jsonl"), "\u{1b}[31m").unwrap();
    refused(&doctor(folder.path(), &[]), &["rank-0.jsonl cannot be used", "whose record"]);
    refused(&kyklos(&["doctor", "/no/such/file"]), &["/no/such/file cannot be used"]);
    refused(
        &kyklos(&["attend", "--shape", "1,64,8,2,64", "--record", &format!("{path}/rank-0.jsonl/x")]),
        &["records cannot go to", "--record"],
    );

    succeeds(&kyklos(&[
        "attend",
        "--shape",
        "1,64,8,2,64",
        "--device",
        "cpu",
        "--ranks",
        "2",
        "--record",
        path,
    ]));
    let cut = folder.path().join("rank-1.jsonl");
    let text = std::fs::read(&cut).unwrap();
    std::fs::write(&cut, &text[..text.len() / 2]).unwrap();
    let (code, found) = findings(folder.path());
    assert_eq!(code, Some(1));
    assert_eq!((found.len(), &found[0]["what"]), (1, &"damaged".into()), "{found:?}");
}

/// Checks the findings after the signal `name` to rank 2 of a long job.
#[cfg(target_os = "linux")]
fn after(name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let job = LongJob::start(&["--record", folder.path().to_str().unwrap()], &[]);
    signal(name, job.pids[2]);
    let (code, _, lines) = job.end();
    assert_eq!(code, Some(1), "{lines:#?}");
    assert_eq!(records(folder.path()), ["rank-0.jsonl", "rank-1.jsonl", "rank-3.jsonl"]);
    let (code, found) = findings(folder.path());
    eprintln!("{found:#?}");
    assert_eq!(code, Some(1));
    assert_eq!((&found[0]["what"], &found[0]["ranks"]), (&"died".into(), &serde_json::json!([2])));
    let text = found[0]["text"].as_str().unwrap();
    for words in ["rank 2 stopped at step", "before the others noticed"] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    // What it still had to send or to receive depends on the moment of the signal: the doctor's own
    // tests have each case.
    let others: Vec<_> = found[1..].iter().map(|finding| finding["what"].as_str().unwrap()).collect();
    assert_eq!(others, ["no-record"]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_was_killed_is_named_from_the_records_of_the_others() {
    after("-KILL");
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_was_stopped_is_named_from_the_records_of_the_others() {
    after("-STOP");
}

#[test]
#[cfg(target_os = "linux")]
fn records_can_be_asked_for_while_a_job_runs() {
    let folder = tempfile::tempdir().unwrap();
    // The environment requests the records. Their folder does not exist yet.
    let dumps = folder.path().join("dumps");
    let job = LongJob::start(&[], &[("KYKLOS_RECORD_DIR", dumps.to_str().unwrap())]);
    let wait_for = |count: usize| {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        // A record has another name until it is complete.
        let whole = |entry: std::io::Result<std::fs::DirEntry>| {
            entry.is_ok_and(|entry| entry.path().extension() == Some("jsonl".as_ref()))
        };
        let there = || {
            std::fs::read_dir(&dumps).map_or(0, |entries| entries.map(whole).filter(|whole| *whole).count())
        };
        while there() < count {
            assert!(std::time::Instant::now() < until, "{} records", there());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    signal("-USR1", job.pids[1]);
    wait_for(1);
    assert!(dumps.join("rank-1.jsonl").exists());
    signal("-USR1", job.launch.id());
    wait_for(4);
    // The file of rank 1 may still be the first one. All files are from a job without problems.
    let (code, found) = findings(&dumps);
    assert_eq!((code, found.len()), (Some(0), 0), "{found:?}");
    signal("-INT", job.launch.id());
    job.end();
}
