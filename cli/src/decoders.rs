//! Everything of the program that reads bytes it did not write, for the fuzz targets in `fuzz/` and the bounded run of
//! `tests/decoders.rs`. Each takes any bytes: it must not panic, and what it decodes must come back the same when it is
//! encoded and decoded again. Not an interface.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;
use std::sync::OnceLock;

use clap::Parser;
use kyklos::plan::{StepProgress, World, check_repair};
use kyklos::simulate::Cluster;
use kyklos::{
    AttentionProblem, Dtype, Mask, MaskSlice, Mesh, PlacementKind, Split, Strategy, TokenRuns, WireFormat,
    plan_world, repair,
};
use kyklos_launch::HostPort;
use kyklos_transport::Rank;

use crate::commands::Cli;
use crate::commands::against::Times;
use crate::devices::DeviceRequest;
use crate::devices::tuned;
use crate::job::report::RankNote;
use crate::observe::record::format::Line;
use crate::observe::{doctor, metrics};
use crate::options::one_line;
use crate::tensors::{InputFile, Source, Which};

/// Something that takes any bytes.
pub type Target = fn(&[u8]);

/// A decoder's name, and what feeds it.
pub const ALL: [(&str, Target); 10] = [
    ("record", record),
    ("tuning", tuning),
    ("arguments", arguments),
    ("values", values),
    ("description", description),
    ("tensors", tensors),
    ("reached", reached),
    ("note", note),
    ("times", times),
    ("request", request),
];

/// A rank's record, as `kyklos doctor` reads it.
pub fn record(bytes: &[u8]) {
    let _ = doctor::read::of_lines(Path::new("F"), bytes);
    for line in bytes.split(|&byte| byte == b'\n') {
        if let Ok(line) = serde_json::from_slice::<Line>(line) {
            let again = serde_json::to_vec(&line).map(|bytes| serde_json::from_slice(&bytes));
            assert_eq!(again.ok().and_then(Result::ok), Some(line));
        }
    }
}

/// The choices that `kyklos tune` keeps.
pub fn tuning(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(table) = tuned::parse(&text) {
        let again = tuned::text_of(&table).map(|text| tuned::parse(&text));
        assert_eq!(again.ok(), Some(Ok(table)));
    }
}

/// The command line: one argument a line.
pub fn arguments(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let words = std::iter::once("kyklos").chain(text.lines()).map(OsString::from);
    if let Err(error) = Cli::try_parse_from(words) {
        let _ = one_line(&error);
    }
}

/// What an option may be: each value comes back from its own text.
pub fn values(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    comes_back::<Mask>(&text);
    comes_back::<MaskSlice>(&text);
    comes_back::<Mesh>(&text);
    comes_back::<Dtype>(&text);
    comes_back::<Strategy>(&text);
    comes_back::<PlacementKind>(&text);
    comes_back::<WireFormat>(&text);
    comes_back::<DeviceRequest>(&text);
    if let Ok(place) = HostPort::parse(&text, "F") {
        assert_eq!(HostPort::parse(&place.to_string(), "F").ok(), Some(place));
    }
}

fn comes_back<T: FromStr + Display + PartialEq + std::fmt::Debug>(text: &str) {
    if let Ok(value) = text.parse::<T>() {
        let again = value.to_string();
        assert_eq!(again.parse::<T>().ok(), Some(value), "{again:?}");
    }
}

/// `--hardware F`: a description of machines.
pub fn description(bytes: &[u8]) {
    if let Err(error) = Cluster::from_toml(&String::from_utf8_lossy(bytes)) {
        assert!(error.is_request(), "{error}");
    }
}

/// `--input F`: the header of a file of tensors, then one token of each.
pub fn tensors(bytes: &[u8]) {
    thread_local!(static FILE: OnceCell<tempfile::NamedTempFile> = const { OnceCell::new() });
    FILE.with(|file| {
        let file = file.get_or_init(|| tempfile::NamedTempFile::new().expect("a file"));
        std::fs::write(file.path(), bytes).expect("the file");
        let Ok(input) = InputFile::open(file.path()) else { return };
        let kv_len = input.kv_len;
        let shape = [input.batch, kv_len, input.q_heads, input.kv_heads, input.head_dim];
        let problem = AttentionProblem::new(shape, input.dtype, Mask::full());
        let Ok(problem) = problem.and_then(|problem| problem.with_queries(input.q_len, 0)) else { return };
        let source = Source::File(input.into());
        for (which, tokens) in [(Which::Q, problem.q_len), (Which::K, kv_len), (Which::V, kv_len)] {
            let last = TokenRuns::contiguous(tokens - 1..tokens);
            let read = source.read(&problem, which, &last).map(|part| part.len());
            // A file that has been checked holds what it says.
            assert!(read.is_ok_and(|read| read < bytes.len()), "{which:?}");
        }
    });
}

/// How far those who are left of a ring say they came (`--on-loss finish`): the first byte says by which plan, the second
/// who is lost, then each of them says it.
pub fn reached(bytes: &[u8]) {
    let [choice, lost, rest @ ..] = bytes else { return };
    let world = &worlds()[usize::from(*choice) % worlds().len()];
    let lost = u32::from(*lost) % world.mesh.world();
    let ranks: Vec<Rank> = (0..world.mesh.world()).filter(|rank| *rank != lost).map(Rank).collect();
    let (mut rest, mut all) = (rest, Vec::new());
    for rank in &ranks {
        let plan = world.plan(*rank);
        let (said, others) = rest.split_at(rest.len().min(StepProgress::encoded_bytes(plan)));
        let Ok(reached) = StepProgress::decode(said, plan) else { return };
        assert_eq!(reached.encode(plan), said, "{reached:?}");
        all.push(reached);
        rest = others;
    }
    StepProgress::align_operations(&mut all);
    // What they say may be a lie: then the repair or its proof refuses, on every rank alike.
    if let Ok(repaired) = repair(world, &ranks, &all) {
        let _ = check_repair(world, &ranks, &all, &repaired);
    }
}

/// Some plans that can be finished by those who are left.
pub fn worlds() -> &'static [World] {
    static WORLDS: OnceLock<Vec<World>> = OnceLock::new();
    WORLDS.get_or_init(|| {
        let plan = |strategy, mask: &str| {
            let mask = mask.parse().expect("a mask");
            let problem = AttentionProblem::new([1, 24, 2, 1, 8], Dtype::F32, mask).expect("a problem");
            let mesh = Mesh::new(1, 3).expect("a mesh");
            plan_world(&problem, mesh, PlacementKind::Zigzag, &Split::Even, strategy).expect("a plan")
        };
        vec![
            plan(Strategy::Ring, "full"),
            plan(Strategy::Ring, "causal"),
            plan(Strategy::Bidirectional, "causal"),
            plan(Strategy::Line, "window:4,4"),
        ]
    })
}

/// What a rank tells rank 0 about itself.
pub fn note(bytes: &[u8]) {
    if let Ok(note) = RankNote::decode(bytes) {
        match note.encode() {
            // Numbers may come back an ulp off.
            Ok(again) => assert!(RankNote::decode(&again).is_ok(), "{note:?}"),
            // One that is too long: nobody has sent it.
            Err(_) => assert!(bytes.len() > 1000, "{note:?}"),
        }
    }
}

/// The last line of a program that is compared with (`--against`).
pub fn times(bytes: &[u8]) {
    if let Ok(times) = Times::of_line(&String::from_utf8_lossy(bytes)) {
        assert!(times.times_ms.iter().all(|time| time.is_finite()), "{times:?}");
    }
}

/// What somebody asks of the metrics' port: only whole words of HTTP/1 get anything but a refusal.
pub fn request(bytes: &[u8]) {
    let status = metrics::status_of(bytes);
    let text = String::from_utf8_lossy(bytes);
    let well_asked = text.trim_start().starts_with("GET") && text.contains("HTTP/1.");
    assert!(well_asked || status.starts_with("400") || status.starts_with("405"), "{status}");
}
