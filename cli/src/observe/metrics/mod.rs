//! Prometheus metrics of the ranks of this process.
//!
//! Written by hand: the text is a few lines for each number, and the counters exist anyway. The
//! `metrics` crate with its exporter would add about thirty crates for the same lines, and hyper to
//! serve them.

use std::fmt::{Display, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use clap::Args;
use kyklos_transport::{ConnectionFigures, Rank};

use crate::failure::{Failure, Result, note};
use crate::observe::http::{self, Answer, Asked, Names, Request, Service, Text as Page};
use crate::observe::record::{Flight, flights};
use crate::options::headings;

/// Where metrics are served, and whether other machines may read them.
#[derive(Clone, Debug, Args)]
pub(crate) struct MetricsArgs {
    /// Serve Prometheus metrics, /healthz and /readyz at this address, which must be a loopback
    /// address. Ranks of one host take this port and the ports that follow; port 0 is any free
    /// port
    #[arg(help_heading = headings::DIAGNOSIS, long, value_name = "ADDRESS:PORT")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Let --metrics be an address that other machines reach
    #[arg(help_heading = headings::DIAGNOSIS, long, requires = "metrics")]
    pub(crate) metrics_anywhere: bool,
}

/// Refuses an address that other machines reach, unless `--metrics-anywhere` allows it.
pub(crate) fn check(args: &MetricsArgs) -> Result<()> {
    match args.metrics {
        Some(address) if !address.ip().is_loopback() && !args.metrics_anywhere => Err(Failure::request(
            format!(
                "--metrics {address}: every machine that reaches {} can read the metrics without a password",
                address.ip()
            ),
            format!("use 127.0.0.1:{}, or add --metrics-anywhere if its network is trusted", address.port()),
        )),
        _ => Ok(()),
    }
}

/// Serves metrics at the address in `args`, if there is one. Ranks of one host take the following
/// ports.
pub(crate) fn serve(args: &MetricsArgs, rank: u32, local_rank: u32) -> Result<()> {
    check(args)?;
    let Some(address) = args.metrics else { return Ok(()) };
    let port = match address.port() {
        0 => 0,
        port => u16::try_from(u32::from(port) + local_rank).map_err(|_| {
            Failure::request(
                format!("--metrics port {port} for rank {local_rank} on its host"),
                "ports go up to 65535",
            )
        })?,
    };
    let service = Service {
        name: "metrics",
        usage: "GET /metrics\n",
        at_once: &["/healthz", "/readyz"],
        for_programs: true,
        answer: Box::new(|asked: &Asked| Answer::Text(answer(&asked.path))),
    };
    let address = http::serve(SocketAddr::new(address.ip(), port), service)?;
    note(&format!("rank {rank}: metrics at http://{address}/metrics"));
    Ok(())
}

/// The status of the answer to a request, for the fuzz targets.
pub(crate) fn status_of(request: &[u8]) -> &'static str {
    match http::parse(request).of(&Names::of(Ipv4Addr::LOCALHOST.into(), true)) {
        Request::Whole(asked) => answer(&asked.path).status,
        Request::Wrong(status) => status,
        Request::Misdirected => http::MISDIRECTED,
        Request::Gone => "",
    }
}

/// Answers a request for a path.
fn answer(path: &str) -> Page {
    match path {
        "/metrics" => Page {
            content_type: "text/plain; version=0.0.4; charset=utf-8",
            ..Page::plain("200 OK", text(&flights()))
        },
        "/healthz" => Page::plain("200 OK", "alive\n"),
        "/readyz" => match &flights()[..] {
            [] => Page::plain("503 Service Unavailable", "no rank runs here yet\n"),
            flights if flights.iter().any(|flight| flight.recorder.is_aborted()) => {
                Page::plain("503 Service Unavailable", "the group has been aborted\n")
            }
            _ => Page::plain("200 OK", "ready\n"),
        },
        _ => Page::plain("404 Not Found", "there are /metrics, /healthz and /readyz\n"),
    }
}

fn text(flights: &[Arc<Flight>]) -> String {
    let mut out = Text::default();
    out.about("info", "gauge", "What runs, in labels.");
    for flight in flights {
        let labels = flight.labels();
        let labels: Vec<(&str, &dyn Display)> =
            labels.iter().map(|(name, value)| (*name, value as _)).collect();
        out.line("info", &labels, &1);
    }
    let peers: Vec<_> = flights.iter().map(|flight| (flight, flight.recorder.peers())).collect();
    let by_peer = |out: &mut Text,
                   name,
                   kind,
                   help,
                   value: &dyn Fn(&kyklos_transport::PeerRecord, u64) -> Option<f64>| {
        out.about(name, kind, help);
        for (flight, peers) in &peers {
            let (now_ns, _) = flight.recorder.now();
            for (peer, record) in (0..).map(Rank).zip(peers).filter(|(peer, _)| *peer != flight.rank) {
                if let Some(value) = value(record, now_ns) {
                    out.line(name, &[("rank", &flight.rank), ("peer", &peer)], &value);
                }
            }
        }
    };
    let count = |count: u64| Some(number(count));
    by_peer(&mut out, "bytes_sent_total", "counter", "Payload that the peer has confirmed.", &|peer, _| {
        count(peer.bytes_sent)
    });
    by_peer(
        &mut out,
        "messages_sent_total",
        "counter",
        "Messages that the peer has confirmed.",
        &|peer, _| count(peer.messages_sent),
    );
    by_peer(&mut out, "bytes_received_total", "counter", "Payload that came from the peer.", &|peer, _| {
        count(peer.bytes_received)
    });
    by_peer(
        &mut out,
        "messages_received_total",
        "counter",
        "Messages that came from the peer.",
        &|peer, _| count(peer.messages_received),
    );
    by_peer(
        &mut out,
        "peer_silence_seconds",
        "gauge",
        "Since anything was heard of the peer.",
        &|peer, now_ns| Some(number(now_ns.saturating_sub(peer.heard_ns?)) / 1e9),
    );
    connections(&mut out, flights);
    let totals: Vec<_> = flights.iter().map(|flight| (flight, flight.totals())).collect();
    out.about("seconds_total", "counter", "Where the rank's time went.");
    for (flight, totals) in &totals {
        for (kind, ns) in totals.split_ns() {
            out.line("seconds_total", &[("rank", &flight.rank), ("kind", &kind)], &(number(ns) / 1e9));
        }
    }
    out.about("operations_total", "counter", "Attention calls that the rank has finished.");
    for (flight, totals) in &totals {
        out.line("operations_total", &[("rank", &flight.rank)], &totals.operations);
    }
    out.about("aborts_total", "counter", "Aborts of the group.");
    for flight in flights {
        out.line("aborts_total", &[("rank", &flight.rank)], &u8::from(flight.recorder.is_aborted()));
    }
    out.about("operation", "gauge", "The operation in which the rank is.");
    for flight in flights {
        out.line("operation", &[("rank", &flight.rank)], &flight.recorder.now().1.op);
    }
    out.about("step", "gauge", "The step of its plan in which the rank is.");
    for flight in flights {
        out.line("step", &[("rank", &flight.rank)], &flight.recorder.now().1.step);
    }
    for (name, field, help) in [
        ("resident_bytes", "VmRSS:", "Memory of the process."),
        ("resident_peak_bytes", "VmHWM:", "Most memory that the process had."),
    ] {
        if let Some(bytes) = status_bytes(field) {
            out.about(name, "gauge", help);
            out.line(name, &[], &bytes);
        }
    }
    out.0
}

/// Figures of the connections between ranks, if there are connections.
fn connections(out: &mut Text, flights: &[Arc<Flight>]) {
    let all: Vec<_> = flights.iter().map(|flight| (flight.rank, flight.connections())).collect();
    if all.iter().all(|(_, connections)| connections.iter().flatten().next().is_none()) {
        return;
    }
    for Figure { name, kind, help, value } in FIGURES {
        out.about(name, kind, help);
        for (rank, connections) in &all {
            for (peer, figures) in (0..).map(Rank).zip(connections) {
                if let Some(figures) = figures {
                    out.line(name, &[("rank", rank), ("peer", &peer)], &value(figures));
                }
            }
        }
    }
}

/// One figure of a connection.
struct Figure {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&ConnectionFigures) -> f64,
}

const FIGURES: [Figure; 11] = [
    Figure {
        name: "peer_round_trip_seconds",
        kind: "gauge",
        help: "Round-trip time to the peer, as it was lately.",
        value: |figures| figures.round_trip.as_secs_f64(),
    },
    Figure {
        name: "peer_window_bytes",
        kind: "gauge",
        help: "Bytes that may be under way to the peer.",
        value: |figures| number(figures.window_bytes),
    },
    Figure {
        name: "peer_packet_bytes",
        kind: "gauge",
        help: "Payload of the largest packet that gets through to the peer.",
        value: |figures| f64::from(figures.packet_bytes),
    },
    Figure {
        name: "peer_packets_sent_total",
        kind: "counter",
        help: "Packets sent to the peer.",
        value: |figures| number(figures.packets_sent),
    },
    Figure {
        name: "peer_packets_lost_total",
        kind: "counter",
        help: "Packets to the peer that were taken for lost.",
        value: |figures| number(figures.packets_lost),
    },
    Figure {
        name: "peer_congestion_events_total",
        kind: "counter",
        help: "How often loss made the rank send less to the peer.",
        value: |figures| number(figures.congestion_events),
    },
    Figure {
        name: "peer_black_holes_total",
        kind: "counter",
        help: "How often large packets to the peer ceased to arrive.",
        value: |figures| number(figures.black_holes),
    },
    Figure {
        name: "peer_wire_bytes_sent_total",
        kind: "counter",
        help: "Bytes of packets sent to the peer.",
        value: |figures| number(figures.bytes_sent),
    },
    Figure {
        name: "peer_wire_bytes_received_total",
        kind: "counter",
        help: "Bytes of packets that came from the peer.",
        value: |figures| number(figures.bytes_received),
    },
    Figure {
        name: "peer_shared_memory_bytes_sent_total",
        kind: "counter",
        help: "Payload bytes sent to the peer through memory that both share.",
        value: |figures| number(figures.shared_bytes_sent),
    },
    Figure {
        name: "peer_shared_memory_bytes_received_total",
        kind: "counter",
        help: "Payload bytes that came from the peer through memory that both share.",
        value: |figures| number(figures.shared_bytes_received),
    },
];

/// The text of an answer, built line by line.
#[derive(Debug, Default)]
struct Text(String);

impl Text {
    fn about(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP kyklos_{name} {help}\n# TYPE kyklos_{name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &[(&str, &dyn Display)], value: &dyn Display) {
        let label = |(name, value): &(&str, &dyn Display)| {
            let value = value.to_string().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            format!("{name}=\"{value}\"")
        };
        let labels: Vec<String> = labels.iter().map(label).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "kyklos_{name}{labels} {value}");
    }
}

/// A value in bytes from `/proc/self/status`; Linux only.
fn status_bytes(field: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus counts in f64")]
fn number(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_cannot_break_out_of_their_line() {
        let mut out = Text::default();
        out.line("info", &[("job", &"a\"} 1\nb\\")], &1);
        assert_eq!(out.0, "kyklos_info{job=\"a\\\"} 1\\nb\\\\\"} 1\n");
    }
}
