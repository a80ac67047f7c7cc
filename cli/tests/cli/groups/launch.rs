//! One process per rank.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::support::*;

const PROBLEM: [&str; 6] = ["--shape", "1,512,8,2,64", "--mask", "causal", "--device", "cpu"];

#[test]
fn four_processes_compute_what_one_computes() {
    let folder = tempfile::tempdir().unwrap();
    let (there, here) = (folder.path().join("there"), folder.path().join("here"));
    let launched = kyklos(
        &[
            &["launch", "-n", "4", "--", "attend"][..],
            &PROBLEM,
            &[
                "--mesh",
                "2x2",
                "--transport",
                "quic",
                "--verify",
                "--json",
                "--output",
                there.to_str().unwrap(),
            ],
        ]
        .concat(),
    );
    let json = json(&launched);
    assert_eq!((&json["ranks"], &json["mesh"]), (&4.into(), &"2x2".into()));
    assert!(json["max_abs_error"].as_f64().unwrap() <= json["tolerance"].as_f64().unwrap());
    assert_eq!(stderr(&launched), "");
    succeeds(&kyklos(
        &[&["attend"][..], &PROBLEM, &["--mesh", "2x2", "--output", here.to_str().unwrap()]].concat(),
    ));
    assert!(std::fs::read(there).unwrap() == std::fs::read(here).unwrap());
}

#[test]
fn launch_says_its_ranks_in_either_way_and_needs_no_dashes() {
    let launch = ["launch", "--ranks", "2", "attend", "--shape", "1,64,8,2,64", "--device", "cpu", "--json"];
    assert_eq!(json(&kyklos(&launch))["ranks"], 2);
    let (_, without_json) = launch.split_last().unwrap();
    refused(&kyklos(&[without_json, &["--ranks", "2"]].concat()), &["--ranks 2 under a launcher"]);
    let help = stdout(&kyklos(&["launch", "--help"]));
    assert!(help.contains("MASTER_ADDR") && help.contains("KYKLOS_IDENTITY"), "{help}");
}

#[test]
fn a_launched_rank_can_write_its_own_part() {
    let folder = tempfile::tempdir().unwrap();
    let name = folder.path().join("part-{rank}");
    succeeds(&kyklos(
        &[&["launch", "-n", "2", "--", "attend"][..], &PROBLEM, &["--output", name.to_str().unwrap()]]
            .concat(),
    ));
    let mut all: Vec<i64> =
        ["part-0", "part-1"].iter().flat_map(|part| positions(&folder.path().join(part))).collect();
    all.sort_unstable();
    assert_eq!(all, (0..512).collect::<Vec<_>>());
}

#[test]
fn when_one_rank_refuses_all_ranks_say_the_same() {
    // Only the device of rank 1 does not exist. No rank knows this before rank 1 opens its device.
    let output = kyklos(
        &[&["launch", "-n", "2", "--", "attend", "--shape", "1,64,8,2,64"][..], &["--device", "cpu,wgpu:99"]]
            .concat(),
    );
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    let lines: Vec<&str> = ["[0] ", "[1] "]
        .iter()
        .map(|prefix| {
            text.lines()
                .filter_map(|line| line.strip_prefix(prefix))
                // Drivers may print their own lines.
                .find(|line| line.contains("wgpu"))
                .unwrap_or_else(|| panic!("no line with {prefix}: {text}"))
        })
        .collect();
    assert_eq!(lines[0], lines[1], "{text}");
    assert!(lines[0].contains("rank 1"), "{text}");
}

#[test]
#[cfg(target_os = "linux")]
fn plans_beyond_the_memory_of_the_machine_are_refused_before_tensors_are_made() {
    // That of the machine, or less where a group limits it.
    let memory = kyklos::machine::memory_bytes().unwrap();
    // q, k, v and o take four fifths of it; and each of four ranks gathers k and v.
    let tokens = memory / 5 / (8 * 64 * 4) / 4 * 4;
    let shape = format!("1,{tokens},8,8,64");
    let output = kyklos(&[
        "launch",
        "-n",
        "4",
        "--",
        "attend",
        "--shape",
        &shape,
        "--strategy",
        "gather",
        "--device",
        "cpu",
    ]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for rank in 0..4 {
        let prefix = format!("[{rank}] error: the plan of rank 0 takes");
        assert!(text.lines().any(|line| line.starts_with(&prefix)), "{rank}: {text}");
    }
}

/// A job that runs for a long time, with its folder for temporary files. Every rank has already
/// started to compute.
pub(crate) struct LongJob {
    pub(crate) launch: Child,
    pub(crate) pids: [u32; 4],
    /// The printed lines from before every rank computes, without the lines of progress.
    pub(crate) notes: Vec<String>,
    lines: mpsc::Receiver<String>,
    temporary: tempfile::TempDir,
}

impl LongJob {
    pub(crate) fn start(options: &[&str], variables: &[(&str, &str)]) -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let mut launch = command(
            &[
                &["launch", "-n", "4", "--", "attend", "--shape", "1,8192,8,2,64", "--mask", "causal"][..],
                &["--device", "cpu", "--mesh", "2x2", "--repeat", "100000", "--progress", "json"],
                options,
            ]
            .concat(),
        )
        .env("TMPDIR", temporary.path())
        .envs(variables.iter().copied())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
        let stderr = BufReader::new(launch.stderr.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut pids = [0; 4];
        let mut notes = Vec::new();
        while pids.contains(&0) {
            let line = lines.recv_timeout(Duration::from_secs(180)).unwrap();
            if !line.starts_with('{') {
                notes.push(line);
                continue;
            }
            let event: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"));
            if event["doing"].as_str().is_some_and(|doing| doing.starts_with("attend")) {
                pids[event["rank"].as_u64().unwrap() as usize] = event["pid"].as_u64().unwrap() as u32;
            }
        }
        Self { launch, pids, notes, lines, temporary }
    }

    /// Waits for the end. Returns the exit code, the duration, and the lines that are not progress.
    pub(crate) fn end(mut self) -> (Option<i32>, Duration, Vec<String>) {
        let started = Instant::now();
        let status = loop {
            if let Some(status) = self.launch.try_wait().unwrap() {
                break status;
            }
            if started.elapsed() > Duration::from_secs(120) {
                self.launch.kill().unwrap();
                self.launch.wait().unwrap();
                panic!("the job did not end");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let took = started.elapsed();
        for pid in self.pids {
            assert!(!is_alive(pid), "process {pid} is still there");
        }
        let left = std::fs::read_dir(self.temporary.path()).unwrap().count();
        assert_eq!(left, 0, "files are left behind");
        let lines = self.lines.iter().filter(|line| !line.starts_with('{')).collect();
        (status.code(), took, lines)
    }
}

impl Drop for LongJob {
    fn drop(&mut self) {
        // The test has failed, and its ranks would run for hours. The ranks end with their launcher.
        if let Ok(None) = self.launch.try_wait() {
            let _ = self.launch.kill();
            let _ = self.launch.wait();
        }
    }
}

fn is_alive(pid: u32) -> bool {
    // A process that has ended stays as a zombie until its parent asks for its end; after its
    // launcher's end that is another program.
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z') && !line.contains('X'))
}

pub(crate) fn signal(name: &str, pid: u32) {
    let sent = Command::new("kill").args([name, &pid.to_string()]).status().unwrap();
    assert!(sent.success());
}

#[test]
#[cfg(target_os = "linux")]
fn when_one_rank_is_killed_the_others_end_and_name_it() {
    let job = LongJob::start(&[], &[]);
    signal("-KILL", job.pids[2]);
    let (code, took, lines) = job.end();
    eprintln!("{}", lines.join("\n"));
    assert_eq!(code, Some(1));
    assert!(took < Duration::from_secs(60), "{took:?}");
    let mut computed = true;
    for rank in [0, 1, 3] {
        let prefix = format!("[{rank}] error: ");
        let line = lines
            .iter()
            .find(|line| line.starts_with(&prefix))
            .unwrap_or_else(|| panic!("rank {rank} says nothing: {lines:#?}"));
        for word in ["rank 2 died", "step"] {
            assert!(line.contains(word), "`{word}` is not in: {line}");
        }
        computed &= line.contains("(attend");
    }
    // Who waits for a message says how far it is. On a loaded machine a step takes longer than rank 2
    // is waited for, and nobody waits yet.
    assert!(computed || lines.iter().any(|line| line.contains("bytes")), "{lines:#?}");
    assert!(lines.iter().any(|line| line.starts_with("launch: rank 2 ended")), "{lines:#?}");
}

#[test]
#[cfg(target_os = "linux")]
fn interrupting_the_launcher_ends_its_processes() {
    let job = LongJob::start(&[], &[]);
    signal("-INT", job.launch.id());
    let (code, took, _) = job.end();
    assert_eq!(code, Some(130));
    assert!(took < Duration::from_secs(60), "{took:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_a_signal_ends_tells_the_others_and_has_its_exit_code() {
    for (rank, name, exit) in [(2, "TERM", 143), (0, "HUP", 129)] {
        let job = LongJob::start(&[], &[]);
        signal(&format!("-{name}"), job.pids[rank]);
        let (code, _, lines) = job.end();
        assert_eq!(code, Some(1), "{lines:#?}");
        let says = format!("rank {rank} died: it was ended by SIG{name}");
        for other in (0..4).filter(|other| *other != rank) {
            let prefix = format!("[{other}] error: ");
            let line = lines.iter().find(|line| line.starts_with(&prefix));
            assert!(line.is_some_and(|line| line.contains(&says)), "rank {other}: {lines:#?}");
        }
        assert!(!lines.iter().any(|line| line.starts_with(&format!("[{rank}] error"))), "{lines:#?}");
        let ended = format!("launch: rank {rank} ended with exit status: {exit}");
        assert!(lines.contains(&ended), "{lines:#?}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_launcher_that_is_terminated_says_so_and_its_ranks_keep_memory_out_of_cores() {
    let job = LongJob::start(&[], &[]);
    for pid in job.pids.iter().chain([&job.launch.id()]) {
        // Kernels that write no cores of processes have no such file.
        let Ok(filter) = std::fs::read_to_string(format!("/proc/{pid}/coredump_filter")) else {
            eprintln!("skipped: this kernel has no coredump_filter");
            continue;
        };
        // No anonymous memory, of this process or shared: the keys are there.
        assert_eq!(u32::from_str_radix(filter.trim(), 16).unwrap() & !0x10, 0, "{filter}");
    }
    signal("-TERM", job.launch.id());
    assert_eq!(job.end().0, Some(143));
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_do_not_outlive_a_launcher_that_is_killed() {
    let mut job = LongJob::start(&[], &[]);
    let keys = || std::fs::read_dir(job.temporary.path()).unwrap().count();
    assert_eq!(keys(), 0, "no key is on the disk, so none can stay there");
    job.launch.kill().unwrap();
    job.launch.wait().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while job.pids.iter().any(|pid| is_alive(*pid)) {
        assert!(Instant::now() < until, "ranks outlive their launcher");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(std::fs::read_dir(job.temporary.path()).unwrap().count(), 0, "files are left behind");
}

#[test]
#[cfg(target_os = "linux")]
fn a_launcher_whose_output_nobody_reads_ends_when_it_is_asked_to() {
    let mut launch = command(
        &[
            &["launch", "-n", "2", "--", "attend"][..],
            &PROBLEM,
            &["--repeat", "1000000", "--progress", "json"],
        ]
        .concat(),
    )
    .stdout(Stdio::null())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let mut stderr = BufReader::new(launch.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("attend") {
        line.clear();
        assert!(stderr.read_line(&mut line).unwrap() > 0, "the ranks do not compute");
    }
    // From here on nobody reads, and the pipe becomes full. Where it takes longer, less is tested.
    std::thread::sleep(Duration::from_secs(5));
    signal("-TERM", launch.id());
    let output = finish(launch, Duration::from_secs(120));
    drop(stderr);
    assert_eq!(output.status.code(), Some(143));
}
