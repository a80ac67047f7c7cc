//! Writes the record of one rank.

use std::io::{self, BufWriter, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kyklos_transport::{AbortCause, Outstanding, Progress, Rank};

use super::flight::Flight;
use super::format::{
    AbortLine, CallLine, ConnectionLine, EventLine, FORMAT, Line, PeerLine, RankLine, StepAt,
};

/// Why a record is written.
#[derive(Clone, Copy, Debug)]
pub(super) enum Why<'a> {
    /// The rank has done its work.
    Done,
    /// The rank failed, with this error.
    Failed(&'a str),
    /// An operator asked.
    Asked,
}

pub(super) fn write(flight: &Flight, why: Why<'_>, out: impl Write) -> io::Result<()> {
    let mut out = BufWriter::new(out);
    let mut put = |line: &Line| -> io::Result<()> {
        serde_json::to_writer(&mut out, line)?;
        out.write_all(b"\n")
    };
    let transport = flight.transport.upgrade();
    let outstanding = transport.as_ref().map_or_else(Vec::new, |transport| transport.outstanding());
    let seen = flight.recorder.look();
    let place = |rank: Rank, Progress { op, step }| StepAt {
        op,
        step,
        doing: flight
            .about
            .set_of(op)
            .step_in_words(rank, step)
            .map(|words| words.split_whitespace().collect::<Vec<_>>().join(" ")),
    };
    let (why, error) = match why {
        Why::Done => ("done", None),
        Why::Failed(text) => ("failed", Some(text.to_owned())),
        Why::Asked => ("asked", None),
    };
    put(&Line::Rank(Box::new(RankLine {
        format: FORMAT,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        rank: flight.rank.0,
        size: flight.about.plans.set().mesh.size(),
        job: flight.recorder.job().to_owned(),
        plan_hash: flight.plan_hash_text(),
        strategy: flight.about.strategy.clone(),
        mesh: flight.about.plans.set().mesh.to_string(),
        pid: std::process::id(),
        started_unix_ms: unix_ms(flight.started),
        written_unix_ms: unix_ms(SystemTime::now()),
        now_ns: seen.now_ns,
        why: why.to_owned(),
        error,
        at: place(flight.rank, seen.progress),
        forgotten: seen.forgotten,
        network: transport.and_then(|transport| transport.network()),
        spent: flight.totals().spent(),
        messages: flight.messages(),
    })))?;
    let connections = flight.connections();
    let calls: Vec<(Outstanding, bool)> = (outstanding.into_iter().map(|call| (call, false)))
        .chain(seen.ended_early.into_iter().map(|call| (call, true)))
        .collect();
    for (rank, peer) in (0..).map(Rank).zip(&seen.peers).filter(|(rank, _)| *rank != flight.rank) {
        let pending = || calls.iter().map(|(call, _)| call.pending).filter(|pending| pending.peer == rank);
        put(&Line::Peer(PeerLine {
            rank: rank.0,
            messages_sent: peer.messages_sent,
            bytes_sent: peer.bytes_sent,
            messages_received: peer.messages_received,
            bytes_received: peer.bytes_received,
            heard_ns: peer.heard_ns,
            at: peer.progress.map(|progress| place(rank, progress)),
            bytes_done: pending().map(|pending| pending.bytes_done).sum(),
            bytes_expected: pending().map(|pending| pending.bytes_expected).sum(),
            connection: connections.get(rank.0 as usize).copied().flatten().map(|figures| ConnectionLine {
                round_trip_ns: ns(figures.round_trip),
                packets_sent: figures.packets_sent,
                packets_lost: figures.packets_lost,
            }),
        }))?;
    }
    for (Outstanding { pending, waited }, ended) in calls {
        put(&Line::Call(CallLine {
            call: pending.operation.to_owned(),
            peer: pending.peer.0,
            op: pending.tag.op,
            message: pending.tag.message,
            bytes_done: pending.bytes_done,
            bytes_expected: pending.bytes_expected,
            waited_ns: ns(waited),
            ended,
        }))?;
    }
    if let Some((at_ns, abort)) = seen.abort {
        let died = matches!(abort.cause, AbortCause::Died(_));
        let text = abort.cause.text().to_owned();
        let at = place(abort.culprit, abort.progress);
        put(&Line::Abort(AbortLine { at_ns, culprit: abort.culprit.0, died, text, at }))?;
    }
    for event in seen.events {
        put(&Line::Event(EventLine {
            at_ns: event.at_ns,
            event: event.kind.name().to_owned(),
            peer: event.peer.0,
            op: event.tag.op,
            message: event.tag.message,
            step: event.step,
            bytes: event.bytes,
        }))?;
    }
    put(&Line::End)?;
    out.flush()
}

fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
