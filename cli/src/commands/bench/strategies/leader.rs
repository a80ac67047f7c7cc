//! What rank 0 does for all: it names the next cell, judges results, and keeps what each cell took.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kyklos::plan::PlanSet;
use kyklos_oracle::oracle::Row;

use super::bench::Bench;
use super::cells::{CellName, Way};
use super::journal::{Header, Journal};
use super::predict::Predictor;
use super::record::{Measured, Predicted, Record, State};
use super::times::{RankTimes, Sent, measured};
use crate::activity;
use crate::failure::{Failure, Result, note};
use crate::interrupt;
use crate::verify::{RightRows, Sample};

/// How a cell ended.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    Done(Box<Measured>),
    Refused(String),
    Failed(String),
    /// Rank 0 knows.
    Elsewhere,
}

impl Outcome {
    pub(super) fn refused(why: &str) -> Self {
        Self::Refused(why.to_owned())
    }

    pub(super) fn failed(why: &str) -> Self {
        Self::Failed(why.to_owned())
    }
}

/// What the command line says for rank 0 only.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) folder: PathBuf,
    /// Whether cells that have failed run again.
    pub(super) retry: bool,
    pub(super) longest: Option<Duration>,
    pub(super) cell_limit: Duration,
    /// Whether each rank is a process.
    pub(super) processes: bool,
    pub(super) transport: &'static str,
}

/// Rank 0 of the bench.
#[derive(Debug)]
pub(super) struct Leader<'a> {
    bench: &'a Bench,
    settings: Settings,
    predictor: Predictor,
    /// Open once the devices of all ranks are known.
    journal: Option<Arc<Mutex<Journal>>>,
    running: Arc<Mutex<Option<(CellName, Instant)>>>,
    header: Option<Header>,
    /// The next place in the list of cells.
    next: usize,
    /// Whether the last cell has failed.
    cell_failed: bool,
    /// Of the running cell.
    predicted: Option<Predicted>,
    /// By case, the rows of the oracle and of each kind of device alone.
    references: BTreeMap<usize, Reference>,
}

/// What a result of a case is compared with.
#[derive(Debug)]
struct Reference {
    right: RightRows,
    /// Of each kind of device.
    alone: Vec<(String, Vec<Row>)>,
}

impl<'a> Leader<'a> {
    pub(super) fn new(bench: &'a Bench, settings: Settings, predictor: Predictor) -> Self {
        Self {
            bench,
            settings,
            predictor,
            journal: None,
            running: Arc::default(),
            header: None,
            next: 0,
            cell_failed: false,
            predicted: None,
            references: BTreeMap::new(),
        }
    }

    /// Opens the folder, for a group of these devices.
    pub(super) fn start(&mut self, labels: &[String], messages: &str) -> Result<()> {
        // Ranks of a new group compute their rows anew.
        self.references.clear();
        if self.journal.is_some() {
            return Ok(());
        }
        let header = Header {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            ranks: self.bench.ranks,
            processes: self.settings.processes,
            transport: self.settings.transport.to_owned(),
            devices: labels.to_vec(),
            repeat: self.bench.repeat,
            messages: messages.to_owned(),
        };
        let journal = Arc::new(Mutex::new(Journal::open(&self.settings.folder, &header)?));
        end_late_cells(Arc::clone(&journal), Arc::clone(&self.running), self.settings.cell_limit);
        self.journal = Some(journal);
        self.header = Some(header);
        Ok(())
    }

    /// The next cell to run; those before it that have ended or are refused stay behind.
    pub(super) fn next(&mut self) -> Result<Option<usize>> {
        loop {
            let bench = self.bench;
            let Some(cell) = bench.cells.get(self.next) else { return Ok(None) };
            let index = self.next;
            self.next += 1;
            let before = self.journal()?.of(&cell.name).map(|record| record.state);
            match before {
                None => {}
                Some(State::Failed) if self.settings.retry => {}
                Some(_) => continue,
            }
            let candidate = match &cell.way {
                Way::Run(candidate) => *candidate,
                Way::Refused(why) => {
                    self.journal()?.end(Record::without_times(
                        cell.name.clone(),
                        State::Refused,
                        why.clone(),
                    ))?;
                    continue;
                }
            };
            self.predicted = match self.predictor.predict(bench.case(cell), candidate, bench.ranks) {
                Ok(predicted) => predicted,
                Err(why) => {
                    self.journal()?.end(Record::without_times(cell.name.clone(), State::Refused, why))?;
                    continue;
                }
            };
            if let Some(why) = self.predicted.as_ref().and_then(|predicted| self.takes_too_long(predicted)) {
                let record = Record::without_times(cell.name.clone(), State::Refused, why);
                let predicted = self.predicted.take();
                self.journal()?.end(Record { predicted, ..record })?;
                continue;
            }
            self.journal()?.begin(&cell.name)?;
            note(&format!("{} of {}: {}", index + 1, bench.cells.len(), cell.name));
            activity::doing("measuring it");
            *lock(&self.running) = Some((cell.name.clone(), Instant::now()));
            return Ok(Some(index));
        }
    }

    fn takes_too_long(&self, predicted: &Predicted) -> Option<String> {
        let longest_s = self.settings.longest?.as_secs_f64();
        (predicted.wall_s > longest_s)
            .then(|| format!("would take {:.1} s a run, --longest is {longest_s:.0}", predicted.wall_s))
    }

    /// Keeps how the cell has ended.
    pub(super) fn end(&mut self, index: usize, outcome: Outcome) -> Result<()> {
        // From here on nothing ends the cell as late.
        *lock(&self.running) = None;
        self.cell_failed = matches!(outcome, Outcome::Failed(_));
        let name = self.bench.cells[index].name.clone();
        let predicted = self.predicted.take();
        let record = match outcome {
            Outcome::Done(measured) => {
                Record { name, state: State::Done, why: None, predicted, measured: Some(*measured) }
            }
            Outcome::Refused(why) => Record { predicted, ..Record::without_times(name, State::Refused, why) },
            Outcome::Failed(why) => {
                note(&format!("{name}: failed: {why}"));
                Record { predicted, ..Record::without_times(name, State::Failed, why) }
            }
            Outcome::Elsewhere => return Err(Failure::run("rank 0 lost the result of a cell")),
        };
        self.journal()?.end(record)
    }

    /// Compares the sampled rows of all ranks with the oracle: a wrong result has no times. `alone`
    /// are those of each kind of device alone, if they are new.
    pub(super) fn judge(
        &mut self,
        index: usize,
        (sample, set): (&Sample, &PlanSet),
        found: Vec<Row>,
        alone: Vec<(String, Vec<Row>)>,
        ranks: &[(String, RankTimes)],
        planned: &Sent,
    ) -> Outcome {
        let cell = &self.bench.cells[index];
        if !alone.is_empty() {
            let right = match sample.whole_kv().and_then(|kv| sample.right_rows(&kv, set)) {
                Ok(right) => right,
                Err(failure) => return Outcome::Failed(failure.text),
            };
            self.references.insert(cell.case, Reference { right, alone });
        }
        let Some(Reference { right, alone }) = self.references.get(&cell.case) else {
            return Outcome::failed("no device has computed the sampled rows alone");
        };
        let verdict = sample.hold(found, alone, right, &cell.name.way());
        match verdict.failure {
            Some(why) => Outcome::Failed(format!("wrong result: {why}")),
            None => {
                Outcome::Done(Box::new(measured(ranks, planned, [verdict.max_abs_error, verdict.tolerance])))
            }
        }
    }

    /// Whether the next group of ranks of this process goes on, after the error of a cell.
    pub(super) fn goes_on(&mut self) -> bool {
        std::mem::take(&mut self.cell_failed)
    }

    /// What all cells of the folder have in common, once it is open.
    pub(super) fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// All cells that have ended.
    pub(super) fn records(&self) -> Vec<Record> {
        self.journal.as_ref().map_or_else(Vec::new, |journal| lock(journal).records().to_vec())
    }

    pub(super) fn folder(&self) -> &Path {
        &self.settings.folder
    }

    fn journal(&self) -> Result<MutexGuard<'_, Journal>> {
        let journal = self.journal.as_ref().ok_or_else(|| Failure::run("the folder is not open"))?;
        Ok(lock(journal))
    }
}

/// Watches the running cell on a thread. One that takes longer than `limit` is a failed cell, and
/// this process ends: a thread that computes cannot be ended alone. The next start goes on with the
/// cell after it.
fn end_late_cells(
    journal: Arc<Mutex<Journal>>,
    running: Arc<Mutex<Option<(CellName, Instant)>>>,
    limit: Duration,
) {
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(LOOK);
            // Held to the end, so that the cell does not end while this thread ends it.
            let mut cell = lock(&running);
            if let Some((name, _)) = cell.take_if(|(_, started)| started.elapsed() > limit) {
                let why = format!("did not end within {} s", limit.as_secs());
                let line =
                    format!("{name}: failed: {why}; run the command again to go on with the next cell");
                let _ = lock(&journal).end(Record::without_times(name, State::Failed, why));
                interrupt::end(1, Some(line));
            }
        }
    });
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // Values are replaced whole.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Interval between two looks at the running cell.
const LOOK: Duration = Duration::from_millis(100);
