//! A launched job ends well only when its result is where the user wants it, and it always ends.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use safetensors::SafeTensors;

use crate::groups::launch::signal;
use crate::support::*;

const PROBLEM: [&str; 6] = ["--shape", "1,1024,8,2,64", "--mask", "causal", "--device", "cpu"];
const REPEATS: u32 = 60;

/// A launched job of which every rank computes.
struct Job {
    launch: Child,
    pids: Vec<u32>,
    lines: Receiver<String>,
    _temporary: tempfile::TempDir,
}

impl Job {
    fn start(ranks: usize, options: &[&str]) -> Self {
        Self::repeating(REPEATS, ranks, options)
    }

    fn repeating(repeats: u32, ranks: usize, options: &[&str]) -> Self {
        let repeats = ["--repeat", &repeats.to_string()];
        let temporary = tempfile::tempdir().unwrap();
        let count = ranks.to_string();
        let launch = ["launch", "-n", &count, "--", "attend", "--progress", "json"];
        let mut launch = command(&[&launch, &PROBLEM[..], &repeats, options].concat())
            .env("TMPDIR", temporary.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines): (_, Receiver<String>) = channel();
        let stderr = BufReader::new(launch.stderr.take().unwrap());
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let mut pids = vec![0; ranks];
        while pids.contains(&0) {
            let line = lines.recv_timeout(Duration::from_secs(180)).unwrap();
            let Ok(event) = serde_json::from_str::<serde_json::Value>(&line) else { panic!("{line}") };
            if event["doing"].as_str().is_some_and(|doing| doing.starts_with("attend")) {
                pids[event["rank"].as_u64().unwrap() as usize] = event["pid"].as_u64().unwrap() as u32;
            }
        }
        Self { launch, pids, lines, _temporary: temporary }
    }

    /// Waits for the end. Returns the exit code and the lines that are not progress.
    fn end(mut self) -> (Option<i32>, String) {
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.launch.try_wait().unwrap() {
                break Some(status);
            }
            if started.elapsed() > Duration::from_secs(180) {
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        if status.is_none() {
            self.launch.kill().unwrap();
            self.launch.wait().unwrap();
            self.pids
                .iter()
                .for_each(|pid| drop(Command::new("kill").args(["-KILL", &pid.to_string()]).status()));
        }
        let lines: Vec<String> = self.lines.iter().filter(|line| !line.starts_with('{')).collect();
        let text = lines.join("\n");
        (status.unwrap_or_else(|| panic!("the job did not end: {text}")).code(), text)
    }
}

/// A test that fails leaves nobody that computes.
impl Drop for Job {
    fn drop(&mut self) {
        if let Ok(None) = self.launch.try_wait() {
            let _ = self.launch.kill();
            let _ = self.launch.wait();
        }
    }
}

const POLICIES: [&str; 3] = ["stop", "shrink", "rejoin"];

#[test]
fn without_its_files_no_job_ends_well() {
    for policy in POLICIES {
        for (option, name) in
            [("--output", "out"), ("--output", "out-{rank}"), ("--trace", "trace"), ("--report", "page")]
        {
            let folder = tempfile::tempdir().unwrap();
            let inside = folder.path().join("inside");
            std::fs::create_dir(&inside).unwrap();
            let target = inside.join(name);
            let job = Job::start(2, &["--on-loss", policy, option, target.to_str().unwrap()]);
            std::fs::remove_dir_all(&inside).unwrap();
            let (code, said) = job.end();
            assert_eq!(code, Some(1), "{policy}, {option} {name}: {said}");
            for rank in 0..2 {
                let prefix = format!("[{rank}] error: ");
                let error = said.lines().find(|line| line.starts_with(&prefix));
                let error =
                    error.unwrap_or_else(|| panic!("{policy}, {option} {name}: {rank} is silent: {said}"));
                assert!(error.contains("cannot write"), "{policy}, {option} {name}: {error}");
            }
        }
    }
}

/// The positions of the queries in the part of a rank, if it is there.
fn positions(folder: &Path, rank: usize) -> Option<Vec<i64>> {
    let bytes = std::fs::read(folder.join(format!("part-{rank}"))).ok()?;
    let file = SafeTensors::deserialize(&bytes).unwrap();
    Some(bytemuck::pod_collect_to_vec(file.tensor("positions").unwrap().data()))
}

/// The rank is killed after its last run. Only writing its part and the vote are left.
#[test]
fn all_rows_are_in_parts_although_a_rank_dies_when_it_delivers() {
    for (policy, victim) in [("shrink", 2), ("shrink", 0), ("rejoin", 2)] {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("part-{rank}");
        let job = Job::start(3, &["--on-loss", policy, "--output", there.to_str().unwrap()]);
        let is_last = |line: &String| {
            let event: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
            (&event["event"], &event["rank"], &event["op"])
                == (&"done".into(), &victim.into(), &(REPEATS - 1).into())
        };
        job.lines.iter().find(is_last).expect("the rank ends its last run");
        // It may have ended.
        let _ = Command::new("kill").args(["-KILL", &job.pids[victim].to_string()]).status();
        let (code, said) = job.end();
        assert_eq!(code, Some(0), "{policy}, rank {victim}: {said}");
        let [mut survivors, mut all] = [Vec::new(), Vec::new()];
        for rank in 0..3 {
            let own = positions(folder.path(), rank);
            assert!(own.is_some() || rank == victim, "no part of rank {rank}: {said}");
            all.extend(own.clone().into_iter().flatten());
            survivors.extend(own.into_iter().flatten().filter(|_| rank != victim));
        }
        survivors.sort_unstable();
        all.sort_unstable();
        // It has delivered before it died, or the others have begun again without it.
        let whole: Vec<i64> = (0..1024).collect();
        assert!(survivors == whole || all == whole, "rank {victim}: {} rows: {said}", survivors.len());
        assert!(policy == "shrink" || all == whole, "{policy}, rank {victim}: {} rows: {said}", all.len());
    }
}

/// Where the file system has files without a name. Elsewhere the next run removes it, which a test
/// of the program's own shows.
#[test]
fn nothing_stays_of_the_output_of_a_killed_rank() {
    use rustix::fs::{Mode, OFlags, open};
    let folder = tempfile::tempdir().unwrap();
    if open(folder.path(), OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR).is_err() {
        eprintln!("not run: the file system has no files without a name");
        return;
    }
    for name in ["out", "out-{rank}"] {
        // So many that it is killed before the last one.
        let target = folder.path().join(name);
        let job = Job::repeating(1_000_000, 2, &["--output", target.to_str().unwrap()]);
        signal("-KILL", job.pids[0]);
        let (code, said) = job.end();
        assert_eq!(code, Some(1), "{said}");
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn a_rank_that_is_stopped_does_not_keep_the_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let (there, here) = (folder.path().join("there"), folder.path().join("here"));
    for policy in ["shrink", "rejoin"] {
        let options = ["--on-loss", policy, "--join-deadline", "10", "--output", there.to_str().unwrap()];
        let job = Job::start(3, &options);
        signal("-STOP", job.pids[1]);
        let (code, said) = job.end();
        assert_eq!(code, Some(0), "{policy}: {said}");
        assert!(said.contains("launch: rank 1 did not end"), "{policy}: {said}");
        let run = ["attend", "--ranks", "2", "--output", here.to_str().unwrap()];
        succeeds(&kyklos(&[&run, &PROBLEM[..]].concat()));
        assert!(std::fs::read(&there).unwrap() == std::fs::read(&here).unwrap(), "{policy}");
        std::fs::remove_file(&there).unwrap();
    }
    // Rank 1 cannot continue without rank 0, and rank 0 is stopped: nobody has the result.
    let options = ["--on-loss", "shrink", "--join-deadline", "15", "--output", there.to_str().unwrap()];
    let job = Job::start(2, &options);
    signal("-STOP", job.pids[0]);
    let (code, said) = job.end();
    assert_eq!(code, Some(1), "{said}");
    assert!(!Path::new(&there).exists());
}
