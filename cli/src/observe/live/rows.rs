//! What each rank does, as rank 0 sees it: ranks of this process by their counters, others by their
//! heartbeats.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kyklos::plan::{Plan, ProvedPlans, Step};
use kyklos_transport::{EventKind, Progress, Rank, Recorded};
use serde::Serialize;

use crate::observe::page::units::seconds;
use crate::observe::progress::Watch;
use crate::observe::record::Flight;

/// One call of one group.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) title: String,
    pub(crate) facts: Vec<(&'static str, String)>,
    pub(crate) repeat: u64,
    /// By rank, its number in the first group.
    pub(crate) members: Vec<Rank>,
    pub(crate) plans: Arc<ProvedPlans>,
    /// With `--grad`: each run is then two operations.
    pub(crate) backward: Option<Arc<ProvedPlans>>,
    pub(crate) watch: Arc<Watch>,
}

impl Call {
    /// Operations of all runs: a forward pass, and with `--grad` a backward pass after each.
    fn operations(&self) -> u64 {
        self.repeat * self.passes()
    }

    /// Operations of one run.
    pub(super) fn passes(&self) -> u64 {
        1 + u64::from(self.backward.is_some())
    }

    /// The plans of operation `op`.
    fn plans_of(&self, op: u64) -> &ProvedPlans {
        match &self.backward {
            Some(backward) if op % 2 == 1 => backward,
            _ => &self.plans,
        }
    }
}

/// What is known when a text is made.
pub(super) struct View<'a> {
    pub(super) call: &'a Call,
    pub(super) flights: &'a [Arc<Flight>],
    pub(super) devices: &'a BTreeMap<u32, String>,
    pub(super) first_size: u32,
    pub(super) silence: Duration,
}

/// A rank on the page.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Row {
    /// Its number in the first group.
    pub(super) rank: u32,
    /// Empty while it is not known.
    device: String,
    /// Its share of the queries.
    tokens: Option<u64>,
    health: Health,
    /// More about its health.
    note: String,
    doing: String,
    /// Of its steps in all runs, from 0 to 1.
    pub(super) done: f64,
    /// Passes of runs that it has finished.
    pub(super) operations: u64,
    /// Of ranks in the process of rank 0.
    compute_s: Option<f64>,
    wait_s: Option<f64>,
    copy_s: Option<f64>,
    #[serde(skip)]
    pub(super) is_member: bool,
}

/// Whether a rank can be expected to end well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Health {
    /// Not yet heard of.
    #[default]
    Starting,
    Alive,
    /// Others wait for it and it makes no progress.
    Slow,
    /// Its heartbeats are late.
    Silent,
    /// It died, failed, or was given up.
    Lost,
    /// It has finished its runs.
    Finished,
}

/// The position of a rank, and when it changed.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    at: Option<Progress>,
    changed_ns: u64,
}

impl View<'_> {
    /// The ranks of the first group, in ascending order.
    pub(super) fn rows(&self, seen: &mut Vec<Seen>) -> Vec<Row> {
        let size = self.call.members.len();
        seen.resize(size, Seen::default());
        // The lowest rank of this process: rank 0, which hears of all others.
        let recorded =
            self.flights.iter().min_by_key(|flight| flight.rank).map(|flight| flight.recorder.look());
        let mut rows: BTreeMap<u32, Row> = BTreeMap::new();
        for ((rank, member), seen) in (0..).map(Rank).zip(&self.call.members).zip(seen) {
            let row = self.row(rank, recorded.as_ref(), seen);
            let device = self.devices.get(&member.0).cloned().unwrap_or_default();
            rows.insert(member.0, Row { rank: member.0, device, is_member: true, ..row });
        }
        for rank in 0..self.first_size {
            rows.entry(rank).or_insert_with(|| Row {
                rank,
                device: self.devices.get(&rank).cloned().unwrap_or_default(),
                health: Health::Lost,
                note: "the others continue without it".to_owned(),
                ..Row::default()
            });
        }
        rows.into_values().collect()
    }

    fn row(&self, rank: Rank, recorded: Option<&Recorded>, seen: &mut Seen) -> Row {
        let set = self.call.plans.set();
        let mut row = Row { tokens: Some(set.q_placement.of_rank(rank).len() as u64), ..Row::default() };
        let Some(recorded) = recorded else { return row };
        let at = match self.flights.iter().find(|flight| flight.rank == rank) {
            Some(flight) => {
                let totals = flight.totals();
                let [compute, receive, credit, send, copy] = totals.split_ns().map(|(_, ns)| ns);
                row.compute_s = Some(seconds(compute));
                row.wait_s = Some(seconds(receive + credit + send));
                row.copy_s = Some(seconds(copy));
                row.operations = totals.operations;
                flight.about.watch.has_begun(rank).then(|| flight.recorder.now().1)
            }
            None => recorded.peers.get(rank.0 as usize).and_then(|peer| peer.progress),
        };
        if seen.at != at {
            *seen = Seen { at, changed_ns: if seen.at.is_some() { recorded.now_ns } else { 0 } };
        }
        if let Some(at) = at {
            let all = self.call.operations();
            row.operations = row.operations.max(at.op.min(all));
            let plans = &self.call.plans_of(row.operations).set().plans;
            if let Some(plan) = plans.get(rank.0 as usize) {
                row.place(at, plan, all);
            }
        }
        (row.health, row.note) = self.health(rank, recorded, seen, row.done >= 1.0);
        row
    }

    fn health(&self, rank: Rank, recorded: &Recorded, seen: &Seen, has_finished: bool) -> (Health, String) {
        if let Some((_, abort)) = recorded.abort.as_ref().filter(|(_, abort)| abort.culprit == rank) {
            return (Health::Lost, abort.cause.to_string());
        }
        let of_rank = || recorded.events.iter().filter(|event| event.peer == rank);
        if of_rank().any(|event| event.kind == EventKind::LinkLost) {
            return (Health::Lost, "its connection has ended".to_owned());
        }
        if has_finished {
            return (Health::Finished, String::new());
        }
        if seen.at.is_none() {
            return (Health::Starting, String::new());
        }
        let heard_ns = recorded.peers.get(rank.0 as usize).and_then(|peer| peer.heard_ns);
        let silent_ns = heard_ns.map_or(0, |heard_ns| recorded.now_ns.saturating_sub(heard_ns));
        let silent = Duration::from_nanos(silent_ns);
        if rank.0 != 0 && silent > self.silence {
            return (Health::Silent, format!("not heard for {:.1} s", silent.as_secs_f64()));
        }
        let slow = of_rank().filter(|event| event.kind == EventKind::Slow).map(|event| event.at_ns).max();
        match slow {
            Some(at_ns) if at_ns > seen.changed_ns => {
                (Health::Slow, "others wait for it, and it makes no progress".to_owned())
            }
            _ => (Health::Alive, String::new()),
        }
    }
}

impl Row {
    /// Takes the position of the rank in its plan, of `all` operations.
    fn place(&mut self, at: Progress, plan: &Plan, all: u64) {
        let steps = plan.steps.len().max(1);
        if self.operations >= all {
            self.done = 1.0;
            self.doing = "finished".to_owned();
            return;
        }
        // A rank stays at its last step until all ranks have voted on the next operation.
        let has_ended = at.op < self.operations;
        let step = if has_ended { 0 } else { (at.step as usize).min(steps - 1) };
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let done = (self.operations as f64 + step as f64 / steps as f64) / all as f64;
        self.done = done.min(1.0);
        let word = match plan.steps.get(step) {
            Some(doing) if !has_ended && step + 1 < steps => word(doing),
            _ => "ending the run",
        };
        // The numbers stay on one line.
        self.doing = format!("{word}, step\u{a0}{}\u{a0}of\u{a0}{steps}", step + 1);
    }
}

fn word(step: &Step) -> &'static str {
    match step {
        Step::Repack { .. } => "packing a message",
        Step::Exchange { .. } => "posting messages",
        Step::Wait { .. } => "waiting for messages",
        Step::Attend { .. } => "computing attention",
        Step::AttendBackward(_) => "computing gradients",
        Step::Accumulate { .. } => "adding gradients",
        Step::Convert { .. } => "converting keys",
        Step::Merge { .. } => "merging results",
        Step::Finalize { .. } => "finishing rows",
        Step::Free { .. } => "freeing memory",
    }
}
