//! Killed processes. The survivors continue without them, or with their replacements.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use safetensors::SafeTensors;

use crate::launch::signal;
use crate::support::*;

const PROBLEM: [&str; 6] = ["--shape", "1,1024,8,2,64", "--mask", "causal", "--device", "cpu"];

/// Long enough for a kill in the middle of the run.
const REPEAT: [&str; 2] = ["--repeat", "60"];

/// The end of a job with killed ranks.
struct Ended {
    code: Option<i32>,
    said: String,
    lines: Vec<String>,
}

/// Runs `ranks` processes. When all ranks compute, kills `victims`, with `pause` between the kills.
fn killed(ranks: &str, victims: &[usize], pause: Duration, options: &[&str], output: &Path) -> Ended {
    killed_in_block(1, ranks, victims, pause, &[&PROBLEM[..], options].concat(), output)
}

/// The same, but the kills begin when all ranks but the victims attend to their `block`-th block of keys. With 0 they begin when
/// the victims do their first step.
fn killed_in_block(
    block: usize,
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
            ],
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
    let mut blocks = vec![0; count];
    let others = || (0..count).filter(|rank| !victims.contains(rank));
    while others().any(|rank| blocks[rank] < block) || victims.iter().any(|victim| pids[*victim] == 0) {
        let line = lines.recv_timeout(Duration::from_secs(180)).unwrap();
        let Ok(event) = serde_json::from_str::<serde_json::Value>(&line) else { panic!("{line}") };
        let rank = event["rank"].as_u64().unwrap() as usize;
        pids[rank] = event["pid"].as_u64().unwrap() as u32;
        blocks[rank] += usize::from(event["doing"].as_str().is_some_and(|doing| doing.starts_with("attend")));
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
    // A ring that loses rank 0, an all-to-all that loses another rank, and a mesh of both that loses two ranks.
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
    let shrink = [&REPEAT[..], &["--on-loss", "shrink"]].concat();
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

/// One long call of a ring. Each rank attends to four blocks.
const LONG: [&str; 10] = [
    "--shape",
    "1,6144,8,2,64",
    "--mask",
    "full",
    "--device",
    "cpu",
    "--strategy",
    "ring",
    "--placement",
    "contiguous",
];

/// The wrong rows of `o` and `lse` in a file, compared with an undisturbed run. The `lost` queries must have no answer.
fn wrong_rows(there: &Path, here: &Path, lost: &[i64]) -> Vec<String> {
    let (there, here) = (std::fs::read(there).unwrap(), std::fs::read(here).unwrap());
    let (there, here) = (SafeTensors::deserialize(&there).unwrap(), SafeTensors::deserialize(&here).unwrap());
    let floats = |file: &SafeTensors<'_>, name| -> Vec<f32> {
        bytemuck::pod_collect_to_vec(file.tensor(name).unwrap().data())
    };
    // There is no such tensor where no row is missing.
    let said: Vec<i64> =
        there.tensor("lost").map_or(Vec::new(), |tensor| bytemuck::pod_collect_to_vec(tensor.data()));
    assert_eq!(said, lost);
    let seq = here.tensor("o").unwrap().shape()[1];
    let mut wrong = Vec::new();
    let lse = (floats(&there, "lse"), floats(&here, "lse"));
    let o = (floats(&there, "o"), floats(&here, "o"));
    for token in 0..seq {
        let is_lost = lost.contains(&(token as i64));
        let row = o.0.len() / seq;
        let of_o = (token * row..(token + 1) * row).map(|at| (o.0[at], o.1[at]));
        let of_lse = (0..lse.0.len() / seq).map(|head| head * seq + token).map(|at| (lse.0[at], lse.1[at]));
        let fine = |(there, here): (f32, f32)| match is_lost {
            true => there.is_nan(),
            false => (there - here).abs() < 2e-6 * here.abs().max(1.0),
        };
        if !of_o.chain(of_lse).all(fine) {
            wrong.push(format!("token {token}, lost {is_lost}"));
        }
    }
    wrong
}

#[test]
fn survivors_complete_the_call_over_all_keys() {
    let folder = tempfile::tempdir().unwrap();
    let (there, here) = (folder.path().join("there"), folder.path().join("here"));
    let alone = ["attend", "--ranks", "4", "--output", here.to_str().unwrap()];
    succeeds(&kyklos(&[&alone[..], &LONG].concat()));
    for (victim, on_loss) in [(2, "finish"), (0, "finish-or-shrink")] {
        // When all ranks are at their second block, every rank has the keys of its neighbour.
        let options = [&LONG[..], &["--verify", "--on-loss", on_loss]].concat();
        let ended = killed_in_block(2, "4", &[victim], Duration::ZERO, &options, &there);
        assert_eq!(ended.code, Some(3), "{}", ended.said);
        let (start, end) = (1536 * victim as i64, 1536 * (victim as i64 + 1));
        for words in [
            "3 ranks complete the call (epoch 1".to_owned(),
            format!("queries {start}..{end} are missing"),
            "the other 4608 rows are over all keys".to_owned(),
        ] {
            assert!(ended.said.contains(&words), "no `{words}` in {}", ended.said);
        }
        let wrong = wrong_rows(&there, &here, &(start..end).collect::<Vec<_>>());
        assert!(wrong.is_empty(), "rank {victim}: {} wrong, {:?}", wrong.len(), wrong.first());
        std::fs::remove_file(&there).unwrap();
    }
}

#[test]
fn without_a_rank_that_has_no_queries_no_row_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let (there, here) = (folder.path().join("there"), folder.path().join("here"));
    let counts = ["--q-tokens", "2048,2048,0,2048", "--kv-tokens", "1536,1536,1536,1536"];
    let problem = [&LONG[..], &counts].concat();
    succeeds(&kyklos(
        &[&["attend", "--ranks", "4", "--output", here.to_str().unwrap()], &problem[..]].concat(),
    ));
    // When the other ranks are at their second block, rank 3 has the keys of rank 2.
    let options = [&problem[..], &["--verify", "--on-loss", "finish"]].concat();
    let ended = killed_in_block(2, "4", &[2], Duration::ZERO, &options, &there);
    assert_eq!(ended.code, Some(0), "{}", ended.said);
    assert!(ended.said.contains("without rank 2; 3 ranks complete the call"), "{}", ended.said);
    assert!(!ended.said.contains("missing"), "{}", ended.said);
    let wrong = wrong_rows(&there, &here, &[]);
    assert!(wrong.is_empty(), "{} wrong, {:?}", wrong.len(), wrong.first());
}

/// A rank is killed in its first step. It may or may not have sent its keys. The result is right in both cases.
#[test]
fn if_keys_are_lost_survivors_start_again_without_them() {
    let folder = tempfile::tempdir().unwrap();
    let (there, here, fewer) =
        (folder.path().join("there"), folder.path().join("here"), folder.path().join("fewer"));
    let shape = ["--shape", "1,4096,4,4,128"];
    let problem = [&shape[..], &LONG[2..]].concat();
    for (ranks, output) in [("4", &here), ("3", &fewer)] {
        let alone = ["attend", "--ranks", ranks, "--output", output.to_str().unwrap()];
        succeeds(&kyklos(&[&alone[..], &problem].concat()));
    }
    let options = [&problem[..], &["--on-loss", "finish-or-shrink"]].concat();
    // The victim sends its keys first. The kill is not always early enough to prevent this.
    for _ in 0..4 {
        let ended = killed_in_block(0, "4", &[1], Duration::ZERO, &options, &there);
        if ended.code == Some(3) {
            let wrong = wrong_rows(&there, &here, &(1024..2048).collect::<Vec<_>>());
            assert!(wrong.is_empty(), "{} wrong, {:?}", wrong.len(), wrong.first());
            continue;
        }
        assert_eq!(ended.code, Some(0), "{}", ended.said);
        for words in [
            "the call cannot be completed: keys 1024..2048 of rank 1 are lost",
            "3 ranks start again (epoch 1",
        ] {
            assert!(ended.said.contains(words), "no `{words}` in {}", ended.said);
        }
        assert!(std::fs::read(&there).unwrap() == std::fs::read(&fewer).unwrap());
        return;
    }
    println!("its keys were with others each time");
}

#[test]
fn ranks_of_one_process_refuse_loss_policies() {
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
