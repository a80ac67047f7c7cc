//! `kyklos bench strategies`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::*;

const SMALL: [&str; 8] = ["--shape", "60,4,2,16", "--mask", "causal", "--device", "cpu", "--repeat", "2"];

fn bench(folder: &Path, more: &[&str]) -> Vec<String> {
    let words = [&["bench", "strategies", "--output", folder.to_str().unwrap()][..], more].concat();
    words.into_iter().map(str::to_owned).collect()
}

fn run(folder: &Path, more: &[&str]) -> std::process::Output {
    let words = bench(folder, more);
    kyklos(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

fn cells(folder: &Path) -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(folder.join("strategies.json")).unwrap()).unwrap()
}

/// Strategy, mesh and placement of a cell.
fn way(cell: &Value) -> String {
    let text = |name: &str| cell[name].as_str().unwrap_or("-").to_owned();
    format!("{} {} {}", text("strategy"), text("mesh"), text("placement"))
}

fn with_state<'a>(cells: &'a [Value], state: &str) -> Vec<&'a Value> {
    cells.iter().filter(|cell| cell["state"] == state).collect()
}

/// A CSV file as maps from columns to fields. No field of these tests has a line end.
fn csv(path: &Path) -> Vec<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut rows = text.lines().map(|line| {
        let (mut fields, mut quoted) = (vec![String::new()], false);
        for c in line.chars() {
            match c {
                '"' => quoted = !quoted,
                ',' if !quoted => fields.push(String::new()),
                _ => fields.last_mut().unwrap().push(c),
            }
        }
        fields
    });
    let columns = rows.next().unwrap();
    rows.map(|fields| {
        assert_eq!(fields.len(), columns.len(), "{fields:?}");
        columns.iter().cloned().zip(fields).collect()
    })
    .collect()
}

#[test]
fn every_way_that_fits_is_timed_and_every_other_one_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let common = [&SMALL[..], &["--ranks", "4", "--batch", "1,2", "--dtype", "f32"]].concat();
    let output = run(folder, &common);
    succeeds(&output);
    let all = cells(folder);
    let (done, refused) = (with_state(&all, "done"), with_state(&all, "refused"));
    assert_eq!(done.len() + refused.len(), all.len());
    let names: Vec<String> = done.iter().map(|cell| way(cell)).collect();
    for wanted in [
        "ulysses 4x1 contiguous",
        "unified 2x2 zigzag",
        "chunked 2x2 striped",
        "ring 1x4 zigzag",
        "bidirectional 1x4 contiguous",
        "pipelined 1x4 contiguous",
        "two-way 1x4 zigzag",
        "line 1x4 contiguous",
        "gather 1x4 striped",
        "pass-q 1x4 contiguous",
        "tree 1x4 zigzag",
    ] {
        assert_eq!(
            names.iter().filter(|name| *name == wanted).count(),
            2,
            "{wanted}, for each batch: {names:?}"
        );
    }
    for cell in &refused {
        assert!(cell["why"].as_str().is_some_and(|why| !why.is_empty()), "{cell}");
    }
    assert!(refused.iter().any(|cell| way(cell) == "dense 4x1 -"));
    for cell in &done {
        let measured = &cell["measured"];
        let number = |of: &Value, name: &str| of[name].as_f64().unwrap_or_else(|| panic!("{name} in {of}"));
        assert!(0.0 < number(measured, "min_s") && number(measured, "min_s") <= number(measured, "median_s"));
        assert!(number(measured, "median_s") <= number(measured, "max_s") && measured["runs"] == 2);
        // A right result of several ranks is never exact.
        assert!(0.0 < number(measured, "max_abs_error"), "{cell}");
        assert!(
            number(measured, "max_abs_error") <= number(measured, "tolerance")
                && number(measured, "tolerance") < 1e-4
        );
        assert!(number(&cell["predicted"], "wall_s") > 0.0, "{cell}");
        let ranks = measured["per_rank"].as_array().unwrap();
        assert_eq!(ranks.len(), 4);
        assert_eq!(ranks.iter().map(|rank| rank["tokens"].as_u64().unwrap()).sum::<u64>(), 60);
        for rank in ranks {
            let parts = number(rank, "compute_s") + number(rank, "wait_s") + number(rank, "copy_s");
            assert!(parts <= number(rank, "wall_s") * 1.01, "{rank}");
            assert!(number(rank, "plan_s") > 0.0 && number(rank, "load_s") > 0.0, "{rank}");
            assert!(number(rank, "collect_s") > 0.0 && number(rank, "peak_bytes") > 0.0, "{rank}");
            assert!(rank["wire_bytes"].is_null(), "no packets within one process: {rank}");
        }
    }
    // Bytes by the formula: 3 hops of 15 keys and values of 2 heads of 16 in f32, all of which somebody
    // later sees but the last.
    let ring = done.iter().find(|cell| way(cell) == "ring 1x4 zigzag" && cell["shape"][0] == 1).unwrap();
    let hop = 15 * 2 * 2 * 16 * 4;
    for rank in ring["measured"]["per_rank"].as_array().unwrap() {
        assert!(
            rank["bytes_sent"].as_u64().unwrap() <= 3 * hop
                && rank["bytes_sent"].as_u64().unwrap() >= 2 * hop
        );
    }
    let rows = csv(&folder.join("strategies.csv"));
    assert_eq!(rows.len(), 4 * done.len() + refused.len());
    for (cell, row) in done.iter().zip(rows.iter().filter(|row| row["state"] == "done" && row["rank"] == "0"))
    {
        let same = |column: &str, number: &Value| {
            let (a, b) = (row[column].parse::<f64>().unwrap(), number.as_f64().unwrap());
            assert!((a - b).abs() <= 1e-12 * b.abs(), "{column}: {a} {b}");
        };
        same("median_s", &cell["measured"]["median_s"]);
        let rank = &cell["measured"]["per_rank"][0];
        for column in ["plan_s", "load_s", "compile_s", "compute_s", "wait_s", "copy_s", "collect_s"] {
            same(column, &rank[column]);
        }
    }
    let page = std::fs::read_to_string(folder.join("strategies.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>"));
    assert!(page.contains("Phases of each rank") && page.contains("1,60,4,2,16 causal f32"));
    // The second run runs nothing and says the same.
    let files = ["strategies.json", "strategies.csv", "strategies.html", "cells.jsonl"];
    let read = || files.map(|name| std::fs::read(folder.join(name)).unwrap());
    let before = read();
    let again = run(folder, &common);
    assert_eq!((stdout(&again), stderr(&again)), (stdout(&output), String::new()));
    assert!(read() == before, "files of a run without cells to run");
    // A larger request runs the new cells only.
    let more =
        run(folder, &[&SMALL[..], &["--ranks", "4", "--batch", "1,2,4", "--strategy", "ring"]].concat());
    succeeds(&more);
    let new: Vec<String> =
        stderr(&more).lines().filter(|line| line.contains(" of ")).map(str::to_owned).collect();
    assert!(
        !new.is_empty() && new.iter().all(|line| line.contains(": 4,60,4,2,16 causal f32, ring 1x4")),
        "{new:?}"
    );
    assert_eq!(cells(folder)[..all.len()], all[..]);
}

#[test]
fn cells_beyond_the_memory_limit_are_refused_before_they_start() {
    let folder = tempfile::tempdir().unwrap();
    let more = ["--ranks", "2", "--batch", "1,64", "--memory", "512KiB", "--hardware"];
    let cluster = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clusters/loopback-2-cores.toml");
    succeeds(&run(folder.path(), &[&SMALL[..], &more, &[cluster.to_str().unwrap()]].concat()));
    let all = cells(folder.path());
    let ring = |batch: u32| {
        all.iter().find(|cell| way(cell) == "ring 1x2 zigzag" && cell["shape"][0] == batch).unwrap()
    };
    assert_eq!(ring(1)["state"], "done");
    let large = ring(64);
    assert_eq!((&large["state"], &large["measured"]), (&"refused".into(), &Value::Null));
    let why = large["why"].as_str().unwrap();
    assert!(why.contains("the limit is 512.0 KiB") && why.contains("--memory"), "{why}");
}

#[test]
fn cells_that_would_take_too_long_are_refused_with_the_predicted_time() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clusters/loopback-2-cores.toml");
    let more = [
        "--ranks",
        "2",
        "--shape",
        "65536,16,16,128",
        "--device",
        "cpu",
        "--batch",
        "8",
        "--longest",
        "2",
        "--memory",
        "1024GiB",
        "--strategy",
        "ring",
        "--hardware",
        cluster.to_str().unwrap(),
    ];
    succeeds(&run(folder.path(), &more));
    let all = cells(folder.path());
    let ring = all.iter().find(|cell| way(cell) == "ring 1x2 contiguous").unwrap();
    assert_eq!(ring["state"], "refused");
    assert!(ring["why"].as_str().unwrap().contains("--longest is 2"), "{ring}");
    assert!(ring["predicted"]["wall_s"].as_f64().unwrap() > 2.0);
}

/// A bench whose second cell runs for long, and its lines.
struct Running {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Running {
    fn start(words: &[String]) -> Self {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut child = command(&words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok());
        });
        Self { child, lines }
    }

    /// Waits for a line with these words.
    fn says(&self, words: &str) {
        let until = Instant::now() + Duration::from_secs(120);
        let mut seen = Vec::new();
        while Instant::now() < until {
            match self.lines.recv_timeout(Duration::from_secs(120)) {
                Ok(line) if line.contains(words) => return,
                Ok(line) => seen.push(line),
                Err(_) => break,
            }
        }
        panic!("no line with `{words}`: {seen:#?}");
    }

    /// Waits for the end; returns the exit code and the lines that were not read.
    fn end(mut self) -> (Option<i32>, Vec<String>) {
        let until = Instant::now() + Duration::from_secs(180);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status.code(), self.lines.iter().collect());
            }
            assert!(Instant::now() < until, "the bench does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Two cells of 48 tokens, and between them one of each way that takes minutes.
const SHORT_LONG_SHORT: [&str; 16] = [
    "--shape",
    "48,4,4,64",
    "--shape",
    "60000,4,4,64",
    "--shape",
    "52,4,4,64",
    "--batch",
    "1",
    "--device",
    "cpu",
    "--repeat",
    "2",
    "--strategy",
    "ring",
    "--placement",
    "contiguous",
];

/// The processes that have this folder in their command line.
fn processes_of(folder: &Path) -> Vec<u32> {
    let name = folder.to_str().unwrap();
    let pids = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains(name)
    })
    .collect()
}

fn check_crashed(folder: &Path, why: &str) {
    let all = cells(folder);
    let of = |tokens: u32| {
        all.iter().find(|cell| cell["shape"][1] == tokens && way(cell) == "ring 1x2 contiguous").unwrap()
    };
    assert_eq!([&of(48)["state"], &of(52)["state"]], ["done", "done"]);
    assert_eq!(of(60000)["state"], "failed");
    let said = of(60000)["why"].as_str().unwrap();
    assert!(said.contains(why), "{said}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_crash_in_a_cell_loses_that_cell_only() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clusters/loopback-2-cores.toml");
    let hardware = ["--hardware", cluster.to_str().unwrap(), "--ranks", "2"];
    let words = bench(folder.path(), &[&SHORT_LONG_SHORT[..], &hardware].concat());
    let mut running = Running::start(&words);
    running.says("1,60000,4,4,64 full f32, ring 1x2 contiguous");
    running.child.kill().unwrap();
    let (code, _) = running.end();
    assert_eq!(code, None);
    assert_eq!(processes_of(folder.path()), Vec::<u32>::new());
    let again = kyklos(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(again.status.code(), Some(1), "{}", stderr(&again));
    assert!(
        stderr(&again).contains("1 of ") && stderr(&again).contains("cells have failed"),
        "{}",
        stderr(&again)
    );
    assert!(
        stdout(&again)
            .contains("failed: 1,60000,4,4,64 full f32, ring 1x2 contiguous: the program ended in this cell")
    );
    check_crashed(folder.path(), "the program ended in this cell");
}

#[test]
#[cfg(target_os = "linux")]
fn a_cell_that_takes_too_long_is_ended_and_the_next_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clusters/loopback-2-cores.toml");
    let more = ["--hardware", cluster.to_str().unwrap(), "--ranks", "2", "--cell-limit", "15"];
    let words = [&SHORT_LONG_SHORT[..], &more].concat();
    let late = run(folder.path(), &words);
    assert_eq!(late.status.code(), Some(1));
    assert!(stderr(&late).contains("did not end within 15 s; run the command again"), "{}", stderr(&late));
    assert_eq!(run(folder.path(), &words).status.code(), Some(1));
    check_crashed(folder.path(), "did not end within 15 s");
}

#[test]
#[cfg(target_os = "linux")]
fn launched_ranks_go_on_by_themselves_when_one_is_killed_in_a_cell() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clusters/loopback-2-cores.toml");
    let hardware = ["--hardware", cluster.to_str().unwrap()];
    let words = bench(folder.path(), &[&SHORT_LONG_SHORT[..], &hardware].concat());
    let launch = ["launch", "-n", "2", "--"].map(str::to_owned);
    let running = Running::start(&[&launch[..], &words].concat());
    running.says("1,60000,4,4,64 full f32, ring 1x2 contiguous");
    // The launcher is first, and then the ranks in their order.
    let mut pids = processes_of(folder.path());
    pids.sort_unstable();
    assert_eq!(pids.len(), 3);
    let rank_1 = pids.iter().find(|pid| {
        let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|variable| variable == b"RANK=1")
    });
    crate::groups::launch::signal("-KILL", *rank_1.unwrap());
    let (code, lines) = running.end();
    eprintln!("{}", lines.join("\n"));
    assert_eq!(code, Some(1));
    assert!(lines.iter().any(|line| line.contains("launch: all ranks start again; cells left: 1")));
    check_crashed(folder.path(), "rank 1 died");
    assert_eq!(processes_of(folder.path()), Vec::<u32>::new());
}

#[test]
fn processes_measure_what_threads_do_and_count_their_packets() {
    let folder = tempfile::tempdir().unwrap();
    let words = bench(folder.path(), &[&SMALL[..], &["--batch", "1", "--strategy", "ring,ulysses"]].concat());
    let words = ["launch", "-n", "2", "--"].map(str::to_owned).into_iter().chain(words).collect::<Vec<_>>();
    let output = kyklos(&words.iter().map(String::as_str).collect::<Vec<_>>());
    succeeds(&output);
    let all = cells(folder.path());
    let done = with_state(&all, "done");
    // ulysses 2x1, and ring 1x2 in three placements.
    assert_eq!(done.len(), 4, "{all:?}");
    for cell in done {
        assert!(cell["predicted"]["wall_s"].as_f64().unwrap() > 0.0, "{cell}");
        for rank in cell["measured"]["per_rank"].as_array().unwrap() {
            let (payload, packets) =
                (rank["bytes_sent"].as_u64().unwrap(), rank["wire_bytes"].as_u64().unwrap());
            assert!(packets > payload && packets < 20 * payload + 20_000, "{rank}");
        }
    }
    // The same table on rank 0 only.
    assert_eq!(stdout(&output).matches("predicted / measured").count(), 1);
}
