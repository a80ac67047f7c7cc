//! The program: embeddings of several processes and unlike devices, and how it ends when something is wrong.

use std::io::{BufRead, BufReader, Read};
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use kyklos::backend::wgpu::WgpuBackend;
use kyklos_transport::Rank;
use kyklos_transport::quic::{ClusterAuthority, JobId};
use sentence_encoder::alone;
use sentence_encoder::nearest::{by_cosine, largest_difference};
use serde::Deserialize;

use crate::{ROUNDING, encoder, packed, texts};

const PROGRAM: &str = env!("CARGO_BIN_EXE_sentence-encoder");

/// What `--json` prints.
#[derive(Debug, Deserialize)]
struct Report {
    ranks: u32,
    tokens: u32,
    largest_difference: f32,
    neighbours: Vec<Neighbour>,
    embeddings: Vec<Vec<f32>>,
}

#[derive(Debug, Deserialize)]
struct Neighbour {
    text: usize,
}

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().unwrap()
}

/// The report of a run that succeeds.
fn report(arguments: &[&str]) -> Report {
    let output = run(&[arguments, &["--json"]].concat());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The embeddings of one process, with candle's own attention.
fn expected() -> &'static [Vec<f32>] {
    static EXPECTED: OnceLock<Vec<Vec<f32>>> = OnceLock::new();
    EXPECTED.get_or_init(|| alone::encode(&encoder(), &packed()).unwrap())
}

fn check(arguments: &[&str], ranks: u32) {
    let report = report(arguments);
    assert_eq!((report.ranks, report.tokens), (ranks, packed().tokens()), "{arguments:?}");
    let difference = largest_difference(&report.embeddings, expected());
    assert!(difference < ROUNDING, "{arguments:?}: {difference}");
    assert!((report.largest_difference - difference).abs() < 1e-9, "{arguments:?}");
    let nearest = |index: usize| by_cosine(&expected()[index], expected(), Some(index))[0].0;
    let nearest: Vec<usize> = (0..texts().len()).map(nearest).collect();
    let found: Vec<usize> = report.neighbours.iter().map(|neighbour| neighbour.text).collect();
    assert_eq!(found, nearest, "{arguments:?}");
}

#[test]
fn any_number_of_processes_and_any_shares_give_the_embeddings_of_one() {
    check(&["--ranks", "1"], 1);
    check(&["--devices", "cpu"], 2);
    check(&["--ranks", "4"], 4);
    check(&["--ranks", "2", "--shares", "3:7"], 2);
    check(&["--ranks", "3", "--shares", "2:1:5"], 3);
}

#[test]
fn a_gpu_and_cores_share_the_texts() {
    if WgpuBackend::enumerate().is_empty() {
        assert_ne!(std::env::var("KYKLOS_REQUIRE_GPU").as_deref(), Ok("1"), "there is no wgpu device");
        eprintln!("not run: there is no wgpu device");
        return;
    }
    check(&["--devices", "cpu,wgpu", "--shares", "7:3"], 2);
    check(&["--ranks", "3", "--devices", "wgpu,cpu,wgpu"], 3);
}

#[test]
fn the_texts_are_ordered_by_their_distance_from_a_query() {
    let report = report(&["--query", "a photo of the stars"]);
    let first: Vec<usize> = report.neighbours[..2].iter().map(|neighbour| neighbour.text).collect();
    for text in first {
        assert!(
            ["telescope", "Astronomers"].iter().any(|word| texts()[text].contains(word)),
            "{}",
            texts()[text]
        );
    }
    assert_eq!(report.neighbours.len(), texts().len(), "the query is not among the texts");
}

#[test]
fn a_person_sees_the_neighbours_and_the_difference_from_one_process() {
    let output = run(&[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("14 texts, 194 tokens, 2 processes\n"), "{text}");
    for [one, other] in [["The cat sleeps", "A kitten"], ["Stir the onions", "Fry the chopped"]] {
        let lines: Vec<&str> = text.lines().collect();
        let at = lines.iter().position(|line| line.contains(one)).unwrap();
        assert!(lines[at + 1].contains(other), "{text}");
    }
    assert!(text.contains("largest difference from one process with candle's own attention: "), "{text}");
    let ranks = String::from_utf8(output.stderr).unwrap();
    assert!(ranks.contains("rank 0: tokens 0..97 of 194 on "), "{ranks}");
    assert!(ranks.contains("rank 1: tokens 97..194 of 194 on "), "{ranks}");
}

/// Exit code and standard error of a run that fails.
fn failure(arguments: &[&str]) -> (Option<i32>, String) {
    let output = run(arguments);
    assert!(output.stdout.is_empty(), "{arguments:?}");
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn wrong_requests_are_refused_once_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().to_str().unwrap();
    let long = folder.path().join("long.txt");
    std::fs::write(&long, format!("A short one.\n{}\n", "word ".repeat(511))).unwrap();
    let one = folder.path().join("one.txt");
    std::fs::write(&one, "\nalone\n\n").unwrap();
    for (arguments, wanted) in [
        (&["--model", empty][..], "run demos/sentence-encoder/fetch-model.sh, or name a folder with --model"),
        (
            &["--texts", long.to_str().unwrap()],
            "text 2 (\"word word word word word word …\") has 513 tokens, the model takes 512 of a text: divide the text",
        ),
        (&["--texts", one.to_str().unwrap()], "1 texts: give two, or one and --query"),
        (&["--ranks", "3", "--shares", "1:2"], "2 shares for 3 processes: give one number for each process"),
        (&["--shares=-1:2"], "cannot share tokens: give finite weights"),
        (
            &["--shares", "1:1000"],
            "rank 0 of 2 gets none of 194 tokens: use fewer ranks, other shares or more text",
        ),
        (&["--devices", "gpu"], "device gpu: use best, cpu, wgpu or wgpu:N"),
    ] {
        let (code, text) = failure(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {text}");
        assert_eq!(text.matches("error: ").count(), 1, "{arguments:?}: {text}");
        assert!(text.contains(wanted), "{arguments:?}: {text}");
    }
}

#[test]
fn a_rank_without_its_device_ends_all_with_its_text() {
    let start = Instant::now();
    let (code, text) = failure(&["--devices", "cpu,wgpu:99"]);
    assert!(matches!(code, Some(1 | 2)), "{code:?}: {text}");
    let of_rank_0 = text.lines().find(|line| line.starts_with("rank 0: error: ")).unwrap_or_default();
    assert!(of_rank_0.contains("rank 1") && of_rank_0.contains("99"), "{text}");
    assert!(start.elapsed() < Duration::from_secs(30), "{text}");
}

/// Two processes of a group, as a launcher starts them, with the texts of these files. Their identities are in `folder`.
fn two_ranks(folder: &Path, texts: [&Path; 2]) -> [Child; 2] {
    let port = kyklos_launch::free_port(Ipv4Addr::LOCALHOST.into()).unwrap();
    let job = JobId::random().unwrap();
    let authority = ClusterAuthority::new(job).unwrap();
    [0, 1].map(|rank| {
        let identity = folder.join(format!("identity-{rank}.pem"));
        authority.issue(Rank(rank)).unwrap().write_file(&identity).unwrap();
        Command::new(PROGRAM)
            .args(["--devices", "cpu", "--texts"])
            .arg(texts[rank as usize])
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", "2")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("KYKLOS_IDENTITY", &identity)
            .env("KYKLOS_JOB_ID", job.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    })
}

#[test]
fn ranks_with_other_texts_of_the_same_length_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let files = ["cat", "dog"].map(|animal| {
        let file = folder.path().join(animal);
        std::fs::write(&file, format!("The {animal} sleeps.\nIt rains today.\n")).unwrap();
        file
    });
    for (rank, process) in (0..).zip(two_ranks(folder.path(), [&files[0], &files[1]])) {
        let output = process.wait_with_output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(&format!("rank {rank}: error: ")) && text.contains("texts "), "{text}");
    }
}

#[test]
fn a_killed_rank_is_named_by_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("texts");
    // Half a minute of work.
    let line = "A line of a long document about many things that nobody will read to the end today.\n";
    std::fs::write(&file, line.repeat(2000)).unwrap();
    let [mut survivor, mut killed] = two_ranks(folder.path(), [&file, &file]);
    let mut first = String::new();
    BufReader::new(killed.stderr.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.starts_with("rank 1: tokens "), "{first}");
    killed.kill().unwrap();
    killed.wait().unwrap();
    let start = Instant::now();
    let mut text = String::new();
    survivor.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(survivor.wait().unwrap().code(), Some(1), "{text}");
    assert!(text.contains("rank 0: error: ") && text.contains("rank 1"), "{text}");
    assert!(start.elapsed() < Duration::from_secs(30), "{text}");
}
