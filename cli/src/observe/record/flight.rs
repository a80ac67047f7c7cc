//! The ranks of this process while they run: records and metrics read them.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::SystemTime;

use kyklos::plan::{PlanSet, ProvedPlans};
use kyklos_cuda::{NcclObserver, NcclState};
use kyklos_transport::{ConnectionFigures, Group, Rank, Recorder, Transport};

use super::format::{MessagesLine, NcclLine};
use crate::observe::progress::Watch;
use crate::observe::totals::Total;

/// A rank of this process while it runs.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) rank: Rank,
    pub(crate) recorder: Arc<Recorder>,
    /// Weak: a transport that is dropped tells the others that its rank has died.
    pub(super) transport: Weak<dyn Transport>,
    pub(super) started: SystemTime,
    /// How its messages go, and what NCCL does for it, once the ranks have agreed on that.
    messages: OnceLock<(String, Option<NcclObserver>)>,
    pub(in crate::observe) about: About,
}

/// What a rank runs, as far as observers need it.
#[derive(Debug)]
pub(crate) struct About {
    pub(crate) plans: Arc<ProvedPlans>,
    /// If there are any, every second operation is a backward pass.
    pub(crate) backward: Option<Arc<ProvedPlans>>,
    pub(crate) strategy: String,
    pub(crate) watch: Arc<Watch>,
    /// Where the record goes.
    pub(crate) folder: Option<PathBuf>,
}

/// A flight that observers see until this is dropped.
#[derive(Debug)]
pub(crate) struct ListedFlight(pub(crate) Arc<Flight>);

impl About {
    /// The plan set of operation `op`.
    pub(super) fn set_of(&self, op: u64) -> &PlanSet {
        match &self.backward {
            Some(backward) if op % 2 == 1 => backward.set(),
            _ => self.plans.set(),
        }
    }
}

impl Flight {
    /// Lists the rank of `transport`, which is about to run.
    pub(crate) fn list(transport: &Group, about: About) -> ListedFlight {
        let flight = Arc::new(Self {
            rank: transport.rank(),
            recorder: transport.recorder(),
            transport: Arc::downgrade(&transport.transport),
            started: SystemTime::now(),
            messages: OnceLock::new(),
            about,
        });
        lock().push(Arc::clone(&flight));
        ListedFlight(flight)
    }

    /// The ranks have agreed how messages go: by `ways`, and by NCCL as far as `nccl` knows.
    pub(crate) fn messages_go(&self, ways: String, nccl: Option<NcclObserver>) {
        // Once for each flight: the next group has another.
        let _ = self.messages.set((ways, nccl));
    }

    /// How its messages go; `None` if the ranks had nothing to agree on.
    pub(super) fn messages(&self) -> Option<MessagesLine> {
        let (ways, nccl) = self.messages.get()?;
        let of_nccl = |observer: &NcclObserver| {
            let NcclState { island, library, posted, ended, failure } = observer.state();
            let (version, ranks) = (island.version.to_string(), island.ranks.iter().map(|rank| rank.0));
            NcclLine { version, library, ranks: ranks.collect(), posted, ended, failure }
        };
        Some(MessagesLine { ways: ways.clone(), nccl: nccl.as_ref().map(of_nccl) })
    }

    /// What the rank has spent so far.
    pub(crate) fn totals(&self) -> Total {
        self.about.watch.totals.of(self.rank)
    }

    /// Figures of the rank's connections; none once its transport is gone.
    pub(crate) fn connections(&self) -> Vec<Option<ConnectionFigures>> {
        self.transport.upgrade().map_or_else(Vec::new, |transport| transport.connections())
    }

    /// What runs, as names and values.
    pub(crate) fn labels(&self) -> [(&'static str, String); 6] {
        [
            ("rank", self.rank.to_string()),
            ("world", self.about.plans.set().mesh.size().to_string()),
            ("job", self.recorder.job().to_owned()),
            ("plan_hash", self.plan_hash_text()),
            ("strategy", self.about.strategy.clone()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ]
    }

    pub(super) fn plan_hash_text(&self) -> String {
        self.about.plans.hash().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl Drop for ListedFlight {
    fn drop(&mut self) {
        lock().retain(|flight| !Arc::ptr_eq(flight, &self.0));
    }
}

/// The ranks that run in this process now.
pub(crate) fn flights() -> Vec<Arc<Flight>> {
    lock().clone()
}

fn lock() -> MutexGuard<'static, Vec<Arc<Flight>>> {
    // No panic can leave the list half changed.
    FLIGHTS.lock().unwrap_or_else(PoisonError::into_inner)
}

static FLIGHTS: Mutex<Vec<Arc<Flight>>> = Mutex::new(Vec::new());
