//! Every decoder of the program for foreign bytes, for the fuzz targets in `fuzz/` and the bounded
//! run of `tests/decoders.rs`. Each accepts any bytes: it must not panic, and a decoded value must
//! survive encoding and decoding. Not an interface.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use clap::Parser;
use kyklos::simulate::Cluster;
use kyklos::{
    AttentionProblem, Dtype, Mask, MaskSlice, Mesh, PlacementKind, Strategy, TokenRuns, WireFormat,
};
use kyklos_launch::HostPort;

use crate::commands::Cli;
use crate::commands::against::Times;
use crate::devices::DeviceRequest;
use crate::devices::tuned;
use crate::job::results::report::RankNote;
use crate::observe::page::model::TimelineRow;
use crate::observe::record::format::Line;
use crate::observe::{doctor, metrics};
use crate::options::one_line;
use crate::tensors::{InputFile, Source, TensorKind};

/// A decoder with its checks; accepts any bytes.
pub type Target = fn(&[u8]);

/// Names of decoders, and the decoders.
pub const ALL: [(&str, Target); 10] = [
    ("record", record),
    ("tuning", tuning),
    ("arguments", arguments),
    ("values", values),
    ("description", description),
    ("tensors", tensors),
    ("note", note),
    ("timeline", timeline),
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

/// The file of `kyklos tune`.
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

/// Values of options: each value is parsed again from its own text.
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
        let gradients = InputFile::open(file.path(), true);
        let reads_gradients = gradients.is_ok();
        let Ok(input) = gradients.or_else(|_| InputFile::open(file.path(), false)) else { return };
        let kv_len = input.kv_len;
        let shape = [input.batch, kv_len, input.q_heads, input.kv_heads, input.head_dim];
        let problem = AttentionProblem::new(shape, input.dtype, Mask::full());
        let Ok(problem) = problem.and_then(|problem| problem.with_queries(input.q_len, 0)) else { return };
        let source = Source::File(input.into());
        for (which, tokens) in
            [(TensorKind::Q, problem.q_len), (TensorKind::K, kv_len), (TensorKind::V, kv_len)]
        {
            let last = TokenRuns::contiguous(tokens - 1..tokens);
            let read = source.read(&problem, which, &last).map(|part| part.len());
            // A checked file holds all tensors of its header.
            assert!(read.is_ok_and(|read| read < bytes.len()), "{which:?}");
        }
        if reads_gradients {
            let last = TokenRuns::contiguous(problem.q_len - 1..problem.q_len);
            assert!(source.output_gradient(&problem, &last).is_ok());
        }
    });
}

/// The report of a rank to rank 0.
pub fn note(bytes: &[u8]) {
    if let Ok(note) = RankNote::decode(bytes) {
        match note.encode() {
            // Numbers may come back an ulp off.
            Ok(again) => assert!(RankNote::decode(&again).is_ok(), "{note:?}"),
            // Too long for a note: no rank sends it.
            Err(_) => assert!(bytes.len() > 1000, "{note:?}"),
        }
    }
}

/// The timeline of a rank for the page of `--report`, which it sends to rank 0.
pub fn timeline(bytes: &[u8]) {
    if let Ok(row) = TimelineRow::decode(bytes, 8) {
        let again = serde_json::to_vec(&row).map(|bytes| TimelineRow::decode(&bytes, 8));
        assert_eq!(again.ok(), Some(Ok(row)));
    }
}

/// The last line of another program (`--against`).
pub fn times(bytes: &[u8]) {
    if let Ok(times) = Times::of_line(&String::from_utf8_lossy(bytes)) {
        assert!(times.times_ms.iter().all(|time| time.is_finite()), "{times:?}");
    }
}

/// A request to the port of the metrics: anything but a whole HTTP/1 request is refused.
pub fn request(bytes: &[u8]) {
    let status = metrics::status_of(bytes);
    let text = String::from_utf8_lossy(bytes);
    let well_asked = text.trim_start().starts_with("GET") && text.contains("HTTP/1.");
    assert!(well_asked || status.starts_with("400") || status.starts_with("405"), "{status}");
}
