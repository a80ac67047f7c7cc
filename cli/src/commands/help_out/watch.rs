//! What the person at the helper sees.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kyklos::Error;
use kyklos::plan::bytes;
use kyklos_helpers::HelperEvent;
use kyklos_transport::{TransportError, harmless};

use crate::failure::note;

/// Watches the helper of this process: a line that changes on a terminal, a line a minute in a
/// pipe.
#[derive(Debug)]
pub(super) struct Watch {
    bar: Option<ProgressBar>,
    every: Duration,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    place: String,
    all: Totals,
    /// Since the last line.
    recent: Totals,
    last_line: Instant,
    /// The last refusal; one that repeats is told once.
    refusal: String,
}

/// What a helper has done in a time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Totals {
    calls: u64,
    bytes: [u64; 2],
    computing: Duration,
    waiting: Duration,
    memory_bytes: u64,
}

impl Totals {
    fn add(&mut self, bytes: [u64; 2], computing: Duration, waiting: Duration, memory_bytes: u64) {
        self.calls += 1;
        self.bytes = [self.bytes[0] + bytes[0], self.bytes[1] + bytes[1]];
        self.computing += computing;
        self.waiting += waiting;
        self.memory_bytes = self.memory_bytes.max(memory_bytes);
    }

    /// The line of these totals; `recent` is of the last `time`.
    fn line(&self, recent: &Self, time: Duration) -> String {
        let part = |busy: Duration| 100.0 * busy.as_secs_f64() / time.as_secs_f64().max(1e-9);
        format!(
            "{} calls; computing {:.0} % of the time, waiting for bytes {:.0} %; {} in, {} out; {} of memory",
            self.calls,
            part(recent.computing).min(100.0),
            part(recent.waiting).min(100.0),
            bytes(self.bytes[0]),
            bytes(self.bytes[1]),
            bytes(self.memory_bytes)
        )
    }
}

impl Watch {
    pub(super) fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{wide_msg}") {
                bar.set_style(style);
            }
            bar
        });
        let every = if bar.is_some() { Duration::from_secs(1) } else { Duration::from_secs(60) };
        let seen = Seen {
            place: String::new(),
            all: Totals::default(),
            recent: Totals::default(),
            last_line: Instant::now(),
            refusal: String::new(),
        };
        Self { bar, every, seen: Mutex::new(seen) }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is a group with the owner at `place`.
    pub(super) fn entered(&self, place: &str) {
        place.clone_into(&mut self.seen().place);
    }

    /// Something has happened.
    pub(super) fn event(&self, event: &HelperEvent) {
        let mut seen = self.seen();
        match event {
            HelperEvent::Joined => {
                self.say(&format!("joined: the owner at {} may use this device", seen.place));
                (seen.recent, seen.last_line) = (Totals::default(), Instant::now());
            }
            HelperEvent::Served { bytes, computing, waiting, memory_bytes, .. } => {
                seen.all.add(*bytes, *computing, *waiting, *memory_bytes);
                seen.recent.add(*bytes, *computing, *waiting, *memory_bytes);
                let time = seen.last_line.elapsed();
                if time >= self.every {
                    let line = seen.all.line(&seen.recent, time);
                    match &self.bar {
                        Some(bar) => bar.set_message(line),
                        None => note(&line),
                    }
                    (seen.recent, seen.last_line) = (Totals::default(), Instant::now());
                }
            }
            HelperEvent::Refused(text) if *text != seen.refusal => {
                self.say(&format!("a share was refused: {}", harmless(text)));
                seen.refusal.clone_from(text);
            }
            _ => {}
        }
    }

    /// The owner is gone, or needs no help now; or this device has failed.
    pub(super) fn left(&self, error: Option<&Error>) {
        let place = self.seen().place.clone();
        self.say(&match error {
            None => format!("the owner at {place} needs no help now"),
            Some(error @ Error::Device { .. }) => {
                format!(
                    "this helper's device has failed, and is opened again: {}",
                    harmless(&error.to_string())
                )
            }
            Some(error) => format!("the owner at {place} is gone: {}", harmless(&why(error))),
        });
    }

    /// What this helper has done in all.
    pub(super) fn sum_up(&self) {
        let all = self.seen().all;
        let [to, from] = all.bytes.map(bytes);
        self.say(&format!(
            "helped with {} calls: {:.1} s of computing, {to} in, {from} out",
            all.calls,
            all.computing.as_secs_f64()
        ));
    }

    /// A line that stays.
    fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_message("");
                bar.suspend(|| note(line));
            }
            None => note(line),
        }
    }
}

/// Without ranks and operations, of which the owner is the only other one.
fn why(error: &Error) -> String {
    match error {
        Error::Transport(TransportError::Aborted { abort, .. }) => abort.cause.text().to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_all_calls_and_the_share_of_the_last_time() {
        let (mut all, mut recent) = (Totals::default(), Totals::default());
        let ms = Duration::from_millis;
        all.add([3 << 30, 1 << 30], ms(900), ms(50), 1 << 20);
        for totals in [&mut all, &mut recent] {
            totals.add([1 << 30, 1 << 20], ms(500), ms(250), 5 << 20);
        }
        assert_eq!(
            all.line(&recent, ms(1000)),
            "2 calls; computing 50 % of the time, waiting for bytes 25 %; 4.00 GiB in, 1.00 GiB out; 5.0 MiB of memory"
        );
        assert!(Totals::default().line(&recent, ms(0)).contains("computing 100 %"));
    }
}
