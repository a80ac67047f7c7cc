//! Processes that are killed, and those that go on without them, or with them again.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::launch::signal;
use crate::support::*;

const PROBLEM: [&str; 6] = ["--shape", "1,1024,8,2,64", "--mask", "causal", "--device", "cpu"];

/// Long enough to be killed in the middle of it.
const REPEAT: [&str; 2] = ["--repeat", "60"];

/// What a job did from which ranks were killed.
struct Ended {
    code: Option<i32>,
    said: String,
    lines: Vec<String>,
}

/// Runs `ranks` processes and kills `victims`, one `pause` after the other, from when all of them compute.
fn killed(ranks: &str, victims: &[usize], pause: Duration, options: &[&str], output: &Path) -> Ended {
    let folder = tempfile::tempdir().unwrap();
    let mut launch = command(
        &[
            &[
                "launch",
                "-n",
                ranks,
                "--",
                "attend",
                "--progress",
                "json",
                "--output",
                output.to_str().unwrap(),
            ],
            &PROBLEM[..],
            options,
        ]
        .concat(),
    )
    .env("TMPDIR", folder.path())
    .stdout(Stdio::null())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let (sender, lines): (_, Receiver<String>) = channel();
    let stderr = BufReader::new(launch.stderr.take().unwrap());
    std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let mut pids = vec![0; ranks.parse().unwrap()];
    while pids.contains(&0) {
        let line = lines.recv_timeout(Duration::from_secs(60)).unwrap();
        let Ok(event) = serde_json::from_str::<serde_json::Value>(&line) else { panic!("{line}") };
        if event["doing"].as_str().is_some_and(|doing| doing.starts_with("attend")) {
            pids[event["rank"].as_u64().unwrap() as usize] = event["pid"].as_u64().unwrap() as u32;
        }
    }
    for &victim in victims {
        std::thread::sleep(pause);
        signal("-KILL", pids[victim]);
    }
    let started = Instant::now();
    let status = loop {
        if let Some(status) = launch.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > Duration::from_secs(100) {
            launch.kill().unwrap();
            launch.wait().unwrap();
            panic!(
                "the job did not end: {:#?}",
                lines.iter().filter(|l| !l.starts_with('{')).collect::<Vec<_>>()
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let lines: Vec<String> = lines.iter().filter(|line| !line.starts_with('{')).collect();
    Ended { code: status.code(), said: lines.join("\n"), lines }
}

/// The output of a run of that many ranks to which nothing happens.
fn fresh(ranks: &str, options: &[&str], output: &Path) -> Vec<u8> {
    let here = ["attend", "--ranks", ranks, "--output", output.to_str().unwrap()];
    succeeds(&kyklos(&[&here, &PROBLEM[..], options].concat()));
    std::fs::read(output).unwrap()
}

#[test]
fn those_who_are_left_compute_what_a_fresh_run_of_their_number_computes() {
    let folder = tempfile::tempdir().unwrap();
    let (there, here) = (folder.path().join("there"), folder.path().join("here"));
    let shrink = |strategy| [&REPEAT[..], &["--on-loss", "shrink", "--strategy", strategy]].concat();
    // A ring that loses rank 0, an all-to-all that loses another one, and a mesh of both that loses two.
    for (ranks, victims, strategy, left, pause) in [
        ("4", &[0][..], "ring", "3", 230),
        ("4", &[2], "ulysses", "3", 70),
        ("6", &[1, 4], "unified", "4", 150),
    ] {
        let ended = killed(ranks, victims, Duration::from_millis(pause), &shrink(strategy), &there);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        for words in [format!("{left} ranks begin again"), "died".into(), format!("strategy {strategy}")] {
            assert!(ended.said.contains(&words), "no `{words}` in {}", ended.said);
        }
        assert!(
            std::fs::read(&there).unwrap() == fresh(left, &["--strategy", strategy], &here),
            "{strategy}"
        );
        std::fs::remove_file(&there).unwrap();
    }
}

#[test]
fn a_rank_that_is_started_anew_is_part_of_the_result() {
    let folder = tempfile::tempdir().unwrap();
    let (there, here) = (folder.path().join("there"), folder.path().join("here"));
    let options = [&REPEAT[..], &["--on-loss", "rejoin"]].concat();
    for victim in [2, 0] {
        let ended = killed("3", &[victim], Duration::from_millis(100), &options, &there);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        let anew = format!("launch: rank {victim} was killed and is started anew");
        for words in [anew, "3 ranks begin again".into()] {
            assert!(ended.said.contains(&words), "no `{words}` in {}", ended.said);
        }
        assert!(std::fs::read(&there).unwrap() == fresh("3", &[], &here), "rank {victim}");
        std::fs::remove_file(&there).unwrap();
    }
}

#[test]
fn too_few_are_left_and_a_mesh_that_does_not_fit_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let there = folder.path().join("there");
    let shrink = [&REPEAT[..], &["--on-loss", "shrink"]].concat();
    let fixed = [&shrink[..], &["--mesh", "2x2"]].concat();
    let ended = killed("4", &[3], Duration::from_millis(50), &fixed, &there);
    assert_eq!(ended.code, Some(1), "{}", ended.said);
    assert!(
        ended.said.contains("the group goes on with 3 ranks, and the request does not fit them"),
        "{}",
        ended.said
    );
    assert!(
        ended.lines.iter().filter(|line| line.contains("mesh 2x2 has 4 ranks")).count() >= 3,
        "{}",
        ended.said
    );
    // Half without the lowest.
    let ended = killed(
        "2",
        &[0],
        Duration::from_millis(50),
        &[&shrink[..], &["--join-deadline", "12"]].concat(),
        &there,
    );
    assert_eq!(ended.code, Some(1), "{}", ended.said);
    assert!(
        ended.said.contains("of the 2 ranks of the last group") && ended.said.contains("too few: 1;"),
        "{}",
        ended.said
    );
    assert!(!there.exists());
}

#[test]
fn what_is_not_launched_loses_no_ranks() {
    let attend = ["attend", "--shape", "1,64,8,2,64", "--device", "cpu"];
    refused(
        &kyklos(&[&attend[..], &["--ranks", "2", "--on-loss", "shrink"]].concat()),
        &["--on-loss", "in one process"],
    );
    refused(
        &kyklos(&[&attend[..], &["--ranks", "2", "--stuck-after", "5"]].concat()),
        &["--stuck-after 5 with all ranks"],
    );
    let launch = ["launch", "-n", "2", "attend", "--shape", "1,64,8,2,64", "--device", "cpu", "--rejoin"];
    refused(&kyklos(&launch), &["--rejoin under kyklos launch"]);
}
