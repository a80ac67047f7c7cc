//! Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open: one process for each
//! rank, one row for each kind of work, all on the clock of rank 0.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use kyklos::{Span, Timeline};
use kyklos_transport::Rank;

use crate::failure::{Failure, Result};
use crate::messages::{Messages, numbers};
use crate::new_file::check_writable;
use crate::observe::clocks::Ahead;
use crate::options::RANK;

/// The timeline of one rank.
pub(crate) struct Track {
    pub(crate) rank: Rank,
    pub(crate) device: String,
    pub(crate) spans: Vec<Span>,
}

/// Events of one rank, or of all ranks in order.
#[derive(Debug)]
pub(crate) struct Trace(Vec<Bytes>);

/// Whether every rank writes a file of its own.
pub(crate) fn is_by_rank(path: &Path) -> bool {
    path.to_string_lossy().contains(RANK)
}

/// Refuses a file that cannot be made, if `rank` writes it at the end.
pub(crate) fn check(path: &Path, rank: Rank) -> Result<()> {
    if rank.0 == 0 || is_by_rank(path) {
        check_writable("--trace", &file_of(path, rank.0), "trace.json")
    } else {
        Ok(())
    }
}

fn file_of(path: &Path, rank: u32) -> PathBuf {
    PathBuf::from(path.to_string_lossy().replace(RANK, &rank.to_string()))
}

impl Track {
    /// Converts the timeline to the clock of rank 0. If there is one file for all ranks, sends the
    /// timeline to rank 0. Returns the events that this rank writes. All ranks call it
    /// together.
    pub(crate) fn tell(self, path: &Path, messages: &Messages<'_>, ahead: Ahead) -> Result<Option<Trace>> {
        if self.rank.0 != 0 {
            let events = Bytes::from(self.events(ahead)?);
            if is_by_rank(path) {
                return Ok(Some(Trace(vec![events])));
            }
            messages.send(Rank(0), LENGTH, Bytes::copy_from_slice(&(events.len() as u64).to_le_bytes()))?;
            messages.send(Rank(0), EVENTS, events)?;
            return Ok(None);
        }
        let mut all = vec![Bytes::from(self.events(ahead)?)];
        for rank in (1..messages.transport.size()).map(Rank) {
            if !is_by_rank(path) {
                let [length] = numbers(&messages.recv(rank, LENGTH, 8)?);
                let length = usize::try_from(length).ok().filter(|length| *length <= MOST_BYTES);
                let length = length.ok_or_else(|| {
                    Failure::run(format!("rank {rank} has more than {MOST_BYTES} bytes of trace"))
                })?;
                all.push(messages.recv(rank, EVENTS, length)?);
            }
        }
        Ok(Some(Trace(all)))
    }

    fn events(&self, ahead: Ahead) -> Result<Vec<u8>> {
        let pid = self.rank.0;
        let within = match ahead.within_ns {
            0 => String::new(),
            ns => format!(", clock within {} µs", ns.div_ceil(1000)),
        };
        let name = format!("rank {pid}: {}{within}", self.device);
        let mut events = vec![
            serde_json::json!({ "ph": "M", "name": "process_name", "pid": pid, "args": { "name": name } }),
            serde_json::json!({ "ph": "M", "name": "process_sort_index", "pid": pid, "args": { "sort_index": pid } }),
        ];
        for timeline in TIMELINES {
            events.push(serde_json::json!({
                "ph": "M", "name": "thread_name", "pid": pid, "tid": timeline as u32, "args": { "name": timeline_name(timeline) },
            }));
        }
        for (id, span) in self.spans.iter().enumerate() {
            events.extend(self.span(id, span, ahead));
        }
        let lines: std::result::Result<Vec<Vec<u8>>, _> = events.iter().map(serde_json::to_vec).collect();
        Ok(lines.map_err(|error| Failure::run(format!("cannot write a trace: {error}")))?.join(&b",\n"[..]))
    }

    /// Work of the rank is one event. A message is two events, its start and its end, because
    /// messages overlap.
    fn span(&self, id: usize, span: &Span, ahead: Ahead) -> Vec<serde_json::Value> {
        #[expect(clippy::cast_precision_loss, reason = "a trace counts microseconds")]
        let microseconds = |ns: u64| ahead.on_rank_0(ns) as f64 / 1e3;
        let (start, end) = (microseconds(span.start_ns), microseconds(span.end_ns.max(span.start_ns)));
        let event = |phase: &str, ts: f64| {
            serde_json::json!({
                "ph": phase, "pid": self.rank.0, "tid": span.timeline as u32, "ts": ts,
                "name": span.name.split_whitespace().collect::<Vec<_>>().join(" "),
                "cat": timeline_name(span.timeline),
            })
        };
        if !matches!(span.timeline, Timeline::Send | Timeline::Receive) {
            let mut whole = event("X", start);
            whole["dur"] = (end - start).into();
            return vec![whole];
        }
        let ends = [event("b", start), event("e", end)];
        ends.map(|mut event| {
            event["id"] = format!("{}-{id}", self.rank).into();
            event
        })
        .into()
    }
}

impl Trace {
    /// Writes the file of `rank`.
    pub(crate) fn write(&self, path: &Path, rank: u32) -> Result<()> {
        let path = file_of(path, rank);
        let write = || -> std::io::Result<()> {
            let mut out = BufWriter::new(File::create(&path)?);
            out.write_all(b"{\"traceEvents\":[\n")?;
            for (index, events) in self.0.iter().enumerate() {
                out.write_all(if index == 0 { b"" } else { b",\n" })?;
                out.write_all(events)?;
            }
            out.write_all(b"\n]}\n")?;
            out.flush()
        };
        write().map_err(|error| Failure::file("write", &path, &error))
    }
}

const fn timeline_name(timeline: Timeline) -> &'static str {
    match timeline {
        Timeline::Compute => "compute",
        Timeline::Copy => "copy",
        Timeline::Wait => "wait",
        Timeline::Send => "send",
        Timeline::Receive => "receive",
    }
}

const TIMELINES: [Timeline; 5] =
    [Timeline::Compute, Timeline::Copy, Timeline::Wait, Timeline::Send, Timeline::Receive];
/// Message numbers that `job/results/collect.rs` and `clocks.rs` do not use.
const LENGTH: u32 = 8;
const EVENTS: u32 = 9;
/// Largest timeline of one rank; viewers do not open more.
const MOST_BYTES: usize = 1 << 30;
