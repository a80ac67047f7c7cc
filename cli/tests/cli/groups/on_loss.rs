//! Killed processes. The survivors continue without them, or with their replacements.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::groups::launch::signal;
use crate::support::*;

const PROBLEM: [&str; 6] = ["--shape", "1,1024,8,2,64", "--mask", "causal", "--device", "cpu"];

/// Long enough for a kill in the middle of the run.
const REPEAT: [&str; 2] = ["--repeat", "60"];

/// The end of a job with killed ranks.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) said: String,
    pub(crate) lines: Vec<String>,
}

/// Runs `ranks` processes. When all ranks compute, kills `victims`, with `pause` between the kills.
pub(crate) fn killed(
    ranks: &str,
    victims: &[usize],
    pause: Duration,
    options: &[&str],
    output: &Path,
) -> Ended {
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
            ][..],
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
    let count: usize = ranks.parse().unwrap();
    let mut pids = vec![0; count];
    let mut computes = vec![false; count];
    let others = || (0..count).filter(|rank| !victims.contains(rank));
    while others().any(|rank| !computes[rank]) || victims.iter().any(|victim| pids[*victim] == 0) {
        let line = lines.recv_timeout(Duration::from_secs(180)).unwrap();
        let Ok(event) = serde_json::from_str::<serde_json::Value>(&line) else { panic!("{line}") };
        let rank = event["rank"].as_u64().unwrap() as usize;
        pids[rank] = event["pid"].as_u64().unwrap() as u32;
        computes[rank] |= event["doing"].as_str().is_some_and(|doing| doing.starts_with("attend"));
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
        if started.elapsed() > Duration::from_secs(180) {
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

/// The output of an undisturbed run of `ranks` ranks.
fn fresh(ranks: &str, options: &[&str], output: &Path) -> Vec<u8> {
    let here = ["attend", "--ranks", ranks, "--output", output.to_str().unwrap()];
    succeeds(&kyklos(&[&here, &PROBLEM[..], options].concat()));
    std::fs::read(output).unwrap()
}

#[test]
fn survivors_compute_what_a_fresh_run_of_their_number_computes() {
    let folder = tempfile::tempdir().unwrap();
    let (there, here) = (folder.path().join("there"), folder.path().join("here"));
    let shrink = |strategy| [&REPEAT[..], &["--on-loss", "shrink", "--strategy", strategy]].concat();
    // A ring that loses rank 0, an all-to-all that loses another rank, and a mesh of both that loses
    // two ranks.
    for (ranks, victims, strategy, left, pause) in [
        ("4", &[0][..], "ring", "3", 230),
        ("4", &[2], "ulysses", "3", 70),
        ("6", &[1, 4], "unified", "4", 150),
    ] {
        let ended = killed(ranks, victims, Duration::from_millis(pause), &shrink(strategy), &there);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        for words in [format!("{left} ranks start again"), "died".into(), format!("strategy {strategy}")] {
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
fn survivors_compute_the_gradients_of_a_fresh_run() {
    let folder = tempfile::tempdir().unwrap();
    let (there, here) = (folder.path().join("there"), folder.path().join("here"));
    let options = [&REPEAT[..], &["--on-loss", "shrink", "--grad"]].concat();
    let ended = killed("4", &[2], Duration::from_millis(300), &options, &there);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    assert!(ended.said.contains("3 ranks start again"), "{}", ended.said);
    assert!(std::fs::read(&there).unwrap() == fresh("3", &["--grad"], &here));
    assert_eq!(read(&there, "dq").shape, [1, 1024, 8, 64]);
}

#[test]
fn a_restarted_rank_is_part_of_the_result() {
    let folder = tempfile::tempdir().unwrap();
    let (there, here) = (folder.path().join("there"), folder.path().join("here"));
    let options = [&REPEAT[..], &["--on-loss", "rejoin"]].concat();
    for victim in [2, 0] {
        let ended = killed("3", &[victim], Duration::from_millis(100), &options, &there);
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        let anew = format!("launch: rank {victim} was killed and is started again");
        for words in [anew, "3 ranks start again".into()] {
            assert!(ended.said.contains(&words), "no `{words}` in {}", ended.said);
        }
        assert!(std::fs::read(&there).unwrap() == fresh("3", &[], &here), "rank {victim}");
        std::fs::remove_file(&there).unwrap();
    }
}

#[test]
fn too_few_survivors_or_a_mesh_that_does_not_fit_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let there = folder.path().join("there");
    let shrink = [&["--repeat", "1000000"][..], &["--on-loss", "shrink"]].concat();
    // This strategy runs on an even number of ranks.
    let fixed = [&shrink[..], &["--strategy", "relay"]].concat();
    let ended = killed("4", &[3], Duration::from_millis(50), &fixed, &there);
    assert_eq!(ended.code, Some(1), "{}", ended.said);
    assert!(
        ended.said.contains("the group continues with 3 ranks, and the request does not fit them"),
        "{}",
        ended.said
    );
    assert!(
        ended.lines.iter().filter(|line| line.contains("relay does not run on mesh 1x3")).count() >= 3,
        "{}",
        ended.said
    );
    // One of two ranks survives, and the lowest rank is lost.
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
