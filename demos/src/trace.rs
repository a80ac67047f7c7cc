//! Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use kyklos::{Lane, Span};

use crate::failure::{Failure, Result};

/// Writes one track for each rank.
pub(crate) fn write(path: &Path, ranks: &[(u32, String, Vec<Span>)]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::new(File::create(path)?);
        out.write_all(b"{\"traceEvents\":[")?;
        let mut first = true;
        for (rank, device, spans) in ranks {
            let name = serde_json::json!({
                "ph": "M", "name": "thread_name", "pid": 0, "tid": rank,
                "args": { "name": format!("rank {rank}: {device}") },
            });
            let events = spans.iter().map(|span| event(*rank, span));
            for event in [name].into_iter().chain(events) {
                out.write_all(if first { b"\n" } else { b",\n" })?;
                first = false;
                serde_json::to_writer(&mut out, &event)?;
            }
        }
        out.write_all(b"\n]}\n")?;
        out.flush()
    };
    write().map_err(|error| Failure::file("write", path, &error))
}

fn event(rank: u32, span: &Span) -> serde_json::Value {
    #[expect(clippy::cast_precision_loss, reason = "a trace counts microseconds")]
    let microseconds = |ns: u64| ns as f64 / 1e3;
    serde_json::json!({
        "ph": "X", "pid": 0, "tid": rank,
        "name": span.name.split_whitespace().collect::<Vec<_>>().join(" "),
        "cat": match span.lane { Lane::Compute => "compute", Lane::Copy => "copy", Lane::Wait => "wait" },
        "ts": microseconds(span.start_ns),
        "dur": microseconds(span.end_ns.saturating_sub(span.start_ns)),
    })
}
