//! What all ranks of the bench know.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kyklos::machine::memory_bytes;
use kyklos::plan::ProvedPlans;
use kyklos::{Split, plan_forward};

use super::args::StrategiesArgs;
use super::cells::{Case, Cell, Way, cases, cells};
use crate::failure::{Failure, Result};
use crate::job::collective::CollectiveOptions;
use crate::options::ByteSize;
use crate::tensors::Source;

/// The cells, and how each of them runs.
#[derive(Debug)]
pub(super) struct Bench {
    pub(super) cases: Vec<Arc<Case>>,
    pub(super) cells: Vec<Cell>,
    pub(super) ranks: u32,
    /// Timed runs.
    pub(super) repeat: u32,
    pub(super) deadline: Duration,
    /// Of the ranks of this process.
    pub(super) ways: CollectiveOptions,
    /// Of each machine.
    pub(super) memory: Option<u64>,
    planner: Mutex<Option<(usize, Result<Planned>)>>,
}

/// The plans of a cell.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    pub(super) plans: Arc<ProvedPlans>,
    /// How long it took to make and to prove them.
    pub(super) ns: u64,
}

impl Bench {
    /// The cells of `args` on `ranks` ranks.
    pub(super) fn new(args: &StrategiesArgs, ranks: u32) -> Result<Self> {
        let cases = cases(args)?;
        let cells = cells(args, &cases, ranks)?;
        Ok(Self {
            cases,
            cells,
            ranks,
            repeat: args.repeat.get(),
            deadline: args.deadline(),
            ways: args.collective.ways(),
            memory: args.memory.map(|ByteSize(bytes)| bytes).or_else(memory_bytes),
            planner: Mutex::new(None),
        })
    }

    /// The case of a cell.
    pub(super) fn case(&self, cell: &Cell) -> &Case {
        &self.cases[cell.case]
    }

    /// A hash of everything that must be the same on all ranks.
    pub(super) fn hash(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(
            format!(
                "kyklos bench strategies {}, {}, {}\n",
                env!("CARGO_PKG_VERSION"),
                self.repeat,
                self.ways.collective.name()
            )
            .as_bytes(),
        );
        for cell in &self.cells {
            hasher.update(format!("{} {:?}\n", cell.name, cell.way).as_bytes());
        }
        *hasher.finalize().as_bytes()
    }

    /// The plans of a cell. The ranks of a process make them once.
    pub(super) fn plans(&self, index: usize) -> Result<Planned> {
        // A panic while plans are made leaves no plans behind.
        let mut planner = self.planner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, planned)) = planner.as_ref()
            && *of == index
        {
            return planned.clone();
        }
        let planned = self.plan(index);
        *planner = Some((index, planned.clone()));
        planned
    }

    fn plan(&self, index: usize) -> Result<Planned> {
        let cell = &self.cells[index];
        let candidate = match &cell.way {
            Way::Run(candidate) => *candidate,
            Way::Refused(why) => return Err(Failure::refused(why.clone())),
        };
        let started = Instant::now();
        let problem = &self.case(cell).problem;
        let even = Split::Even;
        let set = plan_forward(problem, candidate.mesh, candidate.placement, &even, candidate.strategy)?;
        let plans = Arc::new(ProvedPlans::new(set)?);
        Ok(Planned { plans, ns: elapsed_ns(started) })
    }
}

/// Nanoseconds since `started`.
pub(super) fn elapsed_ns(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// The tensors of all cases.
pub(super) const TENSORS: Source = Source::Random { seed: 0 };
