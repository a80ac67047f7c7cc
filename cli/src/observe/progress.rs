//! Progress of ranks: a line on a terminal, JSON lines for programs, nothing in a pipe.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kyklos::plan::PlanSet;
use kyklos::simulate::pairs_of_rank;
use kyklos::{Clock, Observer, RankReport};
use kyklos_transport::Rank;

use crate::activity;
use crate::failure::note;
use crate::observe::totals::Totals;
use crate::options::ProgressKind;

/// Observes the ranks of this process, and records when each run started.
#[derive(Debug)]
pub(crate) struct Watch {
    clock: Arc<dyn Clock>,
    json: bool,
    /// When each rank took the first step of its latest run.
    started_ns: Vec<AtomicU64>,
    pub(crate) totals: Totals,
    /// What happens after the runs.
    phase: Mutex<Option<&'static str>>,
}

impl Watch {
    pub(crate) fn new(kind: ProgressKind, clock: Arc<dyn Clock>, size: u32) -> Self {
        Self {
            clock,
            json: kind == ProgressKind::Json,
            started_ns: (0..size).map(|_| AtomicU64::new(0)).collect(),
            totals: Totals::new(size),
            phase: Mutex::default(),
        }
    }

    /// `rank` will run these passes, `repeat` times.
    pub(crate) fn joins(&self, rank: Rank, forward: &PlanSet, backward: Option<&PlanSet>, repeat: u64) {
        if !activity::is_shown() {
            return;
        }
        let flops = |set: &PlanSet, products: f64| {
            2.0 * products * f64::from(set.problem.head_dim) * pairs_of_rank(set, rank)
        };
        let backward = backward.map(|set| flops(set, BACKWARD_PRODUCTS));
        let passes = [Some(flops(forward, FORWARD_PRODUCTS)), backward];
        activity::joins(rank.0, passes.into_iter().flatten().collect(), repeat);
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
        activity::passed(rank.0);
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

    /// Shows what happens before or after the runs; `None` removes the line.
    pub(crate) fn phase(&self, doing: Option<&'static str>) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = doing;
        match doing {
            Some(doing) => activity::doing(doing),
            None => activity::ends(),
        }
    }
}

impl Observer for Watch {
    fn counted(&self, rank: Rank, op: u64, so_far: &RankReport) {
        self.totals.counted(rank, op, so_far);
    }

    fn worked(&self, rank: Rank, _: u64, share: f64) {
        activity::worked(rank.0, share);
    }

    fn step(&self, rank: Rank, op: u64, step: usize, steps: usize, doing: &dyn Fn() -> String) {
        if step == 0 {
            self.started_ns[rank.0 as usize].store(self.clock.now_ns(), Ordering::Relaxed);
        }
        activity::step(rank.0, &|| squeeze(&doing()));
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

/// Matrix products of a visible pair: two, and in a backward pass five.
const FORWARD_PRODUCTS: f64 = 2.0;
const BACKWARD_PRODUCTS: f64 = 5.0;
