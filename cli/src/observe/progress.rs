//! Progress of ranks: a bar on a terminal, JSON lines for programs, nothing in a pipe.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressStyle};
use kyklos::{Clock, Observer, RankReport};
use kyklos_transport::Rank;

use crate::failure::note;
use crate::observe::totals::Totals;
use crate::options::ProgressKind;

/// Observes the ranks of this process, and records when each run started.
#[derive(Debug)]
pub(crate) struct Watch {
    clock: Arc<dyn Clock>,
    json: bool,
    bar: Option<ProgressBar>,
    /// When each rank took the first step of its latest run.
    started_ns: Vec<AtomicU64>,
    pub(crate) totals: Totals,
    /// What happens after the runs.
    phase: Mutex<Option<&'static str>>,
}

impl Watch {
    /// `steps` is the number of steps of all ranks together.
    pub(crate) fn new(kind: ProgressKind, clock: Arc<dyn Clock>, size: u32, steps: u64) -> Self {
        let bar = (kind == ProgressKind::Auto && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(steps);
            if let Ok(style) =
                ProgressStyle::with_template("{bar:32} {pos}/{len} steps, {elapsed}  {wide_msg}")
            {
                bar.set_style(style);
            }
            bar
        });
        Self {
            clock,
            json: kind == ProgressKind::Json,
            bar,
            started_ns: (0..size).map(|_| AtomicU64::new(0)).collect(),
            totals: Totals::new(size),
            phase: Mutex::default(),
        }
    }

    /// Nanoseconds since `rank` began its latest run.
    pub(crate) fn since_start_ns(&self, rank: Rank) -> u64 {
        let started = self.started_ns[rank.0 as usize].load(Ordering::Relaxed);
        self.clock.now_ns().saturating_sub(started)
    }

    /// Whether `rank` has begun a run.
    pub(crate) fn has_begun(&self, rank: Rank) -> bool {
        self.started_ns[rank.0 as usize].load(Ordering::Relaxed) > 0
    }

    /// `rank` has finished run `op`.
    pub(crate) fn done(&self, rank: Rank, op: u64) {
        self.totals.done(rank);
        if self.json {
            note(
                &serde_json::json!({
                    "event": "done", "rank": rank.0, "pid": std::process::id(), "op": op,
                })
                .to_string(),
            );
        }
    }

    /// What happens after the runs.
    pub(crate) fn doing(&self) -> Option<&'static str> {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows what happens after the runs; `None` removes the bar.
    pub(crate) fn phase(&self, doing: Option<&'static str>) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = doing;
        if let Some(bar) = &self.bar {
            match doing {
                Some(doing) => bar.set_message(doing),
                None => bar.finish_and_clear(),
            }
        }
    }
}

impl Observer for Watch {
    fn counted(&self, rank: Rank, op: u64, so_far: &RankReport) {
        self.totals.counted(rank, op, so_far);
    }

    fn step(&self, rank: Rank, op: u64, step: usize, steps: usize, doing: &dyn Fn() -> String) {
        if step == 0 {
            self.started_ns[rank.0 as usize].store(self.clock.now_ns(), Ordering::Relaxed);
        }
        if let Some(bar) = &self.bar {
            bar.inc(1);
            bar.set_message(format!("rank {rank}: {}", squeeze(&doing())));
        }
        if self.json {
            note(
                &serde_json::json!({
                    "event": "step", "rank": rank.0, "pid": std::process::id(), "op": op,
                    "step": step, "of": steps, "doing": squeeze(&doing()),
                })
                .to_string(),
            );
        }
    }
}

/// The text of a step without the spaces that align it in tables.
fn squeeze(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
