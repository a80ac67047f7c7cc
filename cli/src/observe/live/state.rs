//! What is known of the call while it runs, as a text for the page.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::rows::{Call, Row, Seen, View};
use crate::failure::Failure;
use crate::observe::http::{PATIENCE, Sink};
use crate::observe::record::Flight;

/// The state of the call for clients of the live page. Ranks of this process tell it what they do;
/// that never waits for a client.
#[derive(Debug)]
pub(crate) struct Live {
    started: Instant,
    /// A rank that is silent for longer is called silent.
    silence: Duration,
    known: Mutex<Known>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Known {
    call: Option<Call>,
    /// The ranks of this process in that call. They do not keep their transports alive.
    flights: Vec<Arc<Flight>>,
    /// By number in the first group.
    devices: BTreeMap<u32, String>,
    /// Ranks of the first group.
    first_size: u32,
    /// By rank.
    seen: Vec<Seen>,
    latest: Option<(Instant, Arc<str>)>,
    /// `done` or `failed`, and in words.
    end: Option<(&'static str, String)>,
    report: Option<Arc<str>>,
    clients: u32,
}

/// The text of one event.
#[derive(Serialize)]
struct Snapshot<'a> {
    state: &'static str,
    text: String,
    title: &'a str,
    facts: &'a [(&'static str, String)],
    elapsed_s: f64,
    /// Of all steps of all ranks, from 0 to 1.
    done: f64,
    ranks: Vec<Row>,
}

impl Live {
    pub(super) fn new(heartbeat_ms: Option<u32>) -> Self {
        let heartbeat = Duration::from_millis(u64::from(heartbeat_ms.unwrap_or(0)));
        Self {
            started: Instant::now(),
            silence: SILENT.max(heartbeat * 4),
            known: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// A rank of this process begins a call.
    pub(crate) fn joined(&self, flight: &Arc<Flight>, call: impl FnOnce() -> Call) {
        let mut known = self.lock();
        let same = known.call.as_ref().is_some_and(|call| Arc::ptr_eq(&call.plans, &flight.about.plans));
        if !same {
            let call = call();
            let numbers = call.members.iter().map(|member| member.0 + 1).max().unwrap_or(0);
            known.first_size = known.first_size.max(numbers);
            known.call = Some(call);
            known.flights.clear();
            known.seen.clear();
        }
        known.flights.push(Arc::clone(flight));
    }

    /// The devices of all ranks of the call.
    pub(crate) fn devices(&self, devices: Vec<String>) {
        let mut known = self.lock();
        let Some(call) = &known.call else { return };
        let by_number: Vec<_> = call.members.iter().map(|member| member.0).zip(devices).collect();
        known.devices.extend(by_number);
    }

    /// The page of `--report`.
    pub(crate) fn reported(&self, html: &str) {
        self.lock().report = Some(html.into());
    }

    /// The call has ended, maybe with a failure. Waits a short time until the clients that are
    /// there know it.
    pub(crate) fn ended(&self, failure: Option<&Failure>) {
        let mut known = self.lock();
        known.end = Some(match failure {
            None => ("done", "The call has ended well.".to_owned()),
            Some(failure) => ("failed", format!("The call has failed: {}", failure.text)),
        });
        known.latest = None;
        self.changed.notify_all();
        let until = Instant::now() + PATIENCE;
        while known.clients > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            known = self.changed.wait_timeout(known, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends the state to a client until the call ends or the client is gone or too slow.
    pub(super) fn tell(&self, sink: &mut Sink) {
        self.lock().clients += 1;
        self.send_all(sink);
        self.lock().clients -= 1;
        self.changed.notify_all();
    }

    fn send_all(&self, sink: &mut Sink) {
        if !sink.send(b"retry: 2000\n\n", PATIENCE) {
            return;
        }
        loop {
            let (text, end) = self.latest();
            if !sink.send(format!("event: state\ndata: {text}\n\n").as_bytes(), PATIENCE) {
                return;
            }
            if let Some(report) = end {
                // JSON has no line ends outside of its texts, and escapes those inside.
                if let Some(report) = report.and_then(|report| serde_json::to_string(&*report).ok())
                    && !sink.send(format!("event: report\ndata: {report}\n\n").as_bytes(), PATIENCE)
                {
                    return;
                }
                sink.send(b"event: end\ndata: {}\n\n", PATIENCE);
                return;
            }
            self.pause();
        }
    }

    /// Waits for the next time to tell the state.
    fn pause(&self) {
        let known = self.lock();
        if known.end.is_none() {
            drop(self.changed.wait_timeout(known, INTERVAL).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// The state as JSON, at most [`FRESH`] old however many clients ask; and after the end the
    /// report, if there is one.
    fn latest(&self) -> (Arc<str>, Option<Option<Arc<str>>>) {
        let mut known = self.lock();
        let end = known.end.is_some().then(|| known.report.clone());
        match &known.latest {
            Some((at, text)) if at.elapsed() < FRESH => (Arc::clone(text), end),
            _ => {
                let text: Arc<str> = self.text(&mut known).into();
                known.latest = Some((Instant::now(), Arc::clone(&text)));
                (text, end)
            }
        }
    }

    fn text(&self, known: &mut Known) -> String {
        let Known { call, flights, devices, first_size, seen, .. } = known;
        let ranks = call.as_ref().map_or_else(Vec::new, |call| {
            View { call, flights, devices, first_size: *first_size, silence: self.silence }.rows(seen)
        });
        let state = match (&known.end, &known.call) {
            (Some((end, _)), _) => end,
            (None, Some(_)) => "running",
            (None, None) => "starting",
        };
        let members = ranks.iter().filter(|row| row.is_member);
        #[expect(clippy::cast_precision_loss, reason = "ranks")]
        let done = members.clone().map(|row| row.done).sum::<f64>() / members.count().max(1) as f64;
        let snapshot = Snapshot {
            state,
            text: match (&known.end, &known.call) {
                (Some((_, text)), _) => text.clone(),
                (None, Some(call)) => doing(call, &ranks),
                (None, None) => "The ranks come together and open their devices.".to_owned(),
            },
            title: known.call.as_ref().map_or("Attention", |call| &call.title),
            facts: known.call.as_ref().map_or(&[], |call| &call.facts),
            elapsed_s: self.started.elapsed().as_secs_f64(),
            done: if state == "done" { 1.0 } else { done },
            ranks,
        };
        serde_json::to_string(&snapshot).unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // No panic can leave a state that matters.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a call is doing, in words.
fn doing(call: &Call, ranks: &[Row]) -> String {
    if let Some(phase) = call.watch.doing() {
        return format!("The ranks have computed; now: {phase}.");
    }
    let lost = ranks.iter().filter(|row| !row.is_member).count();
    let operations = ranks.iter().filter(|row| row.is_member).map(|row| row.operations).min().unwrap_or(0);
    let (run, pass) = (operations / call.passes(), operations % call.passes());
    let pass = match (&call.backward, pass) {
        (None, _) => "",
        (Some(_), 0) => ", forward pass",
        (Some(_), _) => ", backward pass",
    };
    let runs = match call.repeat {
        1 => format!("The ranks compute{pass}."),
        repeat => format!("The ranks compute: run {} of {repeat}{pass}.", (run + 1).min(repeat)),
    };
    match lost {
        0 => runs,
        1 => format!("{runs} One rank was lost."),
        lost => format!("{runs} {lost} ranks were lost."),
    }
}

/// A rank may be silent for three heartbeats of `--link wan`.
const SILENT: Duration = Duration::from_millis(1500);
/// Between two events of a client.
const INTERVAL: Duration = Duration::from_millis(500);
/// A younger text is sent again.
const FRESH: Duration = Duration::from_millis(400);
