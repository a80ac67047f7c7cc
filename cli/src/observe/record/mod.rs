//! Flight records: what each rank of this process did lately, as a file, when it ends or when somebody asks.

mod dump;
pub(crate) mod format;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::SystemTime;

use kyklos::plan::World;
use kyklos_transport::{ConnectionFigures, Rank, Recorder, Transport};

use crate::failure::{Failure, Result, note};
use crate::interrupt;
use crate::job::rank::Job;
use crate::observe::progress::Watch;
use crate::observe::totals::Total;

/// A rank of this process while it runs.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) rank: Rank,
    pub(crate) recorder: Arc<Recorder>,
    /// Weak, because a transport that is dropped tells the others that its rank has died.
    transport: Weak<dyn Transport>,
    world: Arc<World>,
    plan_hash: [u8; 32],
    strategy: String,
    started: SystemTime,
    watch: Arc<Watch>,
    folder: Option<PathBuf>,
}

/// A flight that others can see for as long as this exists.
#[derive(Debug)]
pub(crate) struct Listed(Arc<Flight>);

/// Why a record is written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Why<'a> {
    /// The rank has done its work.
    Done,
    /// It could not.
    Failed(&'a str),
    /// Somebody wants to know.
    Asked,
}

impl Flight {
    /// Lists a rank that is about to run.
    pub(crate) fn list(job: &Job, transport: &Arc<dyn Transport>) -> Listed {
        let flight = Arc::new(Self {
            rank: transport.rank(),
            recorder: transport.recorder(),
            transport: Arc::downgrade(transport),
            world: Arc::clone(&job.world),
            plan_hash: job.plan_hash,
            strategy: job.request.strategy.to_string(),
            started: SystemTime::now(),
            watch: Arc::clone(&job.watch),
            folder: job.record.clone(),
        });
        lock().push(Arc::clone(&flight));
        Listed(flight)
    }

    /// What the rank has spent so far.
    pub(crate) fn totals(&self) -> Total {
        self.watch.totals.of(self.rank)
    }

    /// Figures of the rank's connections; none once its transport is gone.
    pub(crate) fn connections(&self) -> Vec<Option<ConnectionFigures>> {
        self.transport.upgrade().map_or_else(Vec::new, |transport| transport.connections())
    }

    /// What runs, as names and values.
    pub(crate) fn labels(&self) -> [(&'static str, String); 6] {
        [
            ("rank", self.rank.to_string()),
            ("world", self.world.mesh.world().to_string()),
            ("job", self.recorder.job().to_owned()),
            ("plan_hash", self.plan_hash_text()),
            ("strategy", self.strategy.clone()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ]
    }

    fn plan_hash_text(&self) -> String {
        self.plan_hash.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn write(&self, why: Why<'_>) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        // The name is made of this rank's own number: a later record of it replaces an earlier one.
        let path = folder.join(format!("rank-{}.jsonl", self.rank));
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            dump::write(self, why, &mut file)?;
            file.persist(&path).map_err(|error| error.error)
        };
        write().map(drop).map_err(|error| Failure::file("write", &path, &error))
    }

    /// Writes the record, or says why that is not possible: a run does not fail for it.
    fn try_to_write(&self, why: Why<'_>) {
        if let Err(failure) = self.write(why) {
            note(&format!("warning: no record of rank {}: {}", self.rank, failure.text));
        }
    }
}

impl Listed {
    /// The rank has come to its end.
    pub(crate) fn ended<T>(&self, result: &Result<T>) {
        match result {
            Ok(_) => self.0.try_to_write(Why::Done),
            Err(failure) => self.0.try_to_write(Why::Failed(&failure.text)),
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        lock().retain(|flight| !Arc::ptr_eq(flight, &self.0));
    }
}

/// The ranks that run in this process now.
pub(crate) fn flights() -> Vec<Arc<Flight>> {
    lock().clone()
}

/// The folder that `--record` or the environment names, which is made if it is not there.
pub(crate) fn folder(flag: Option<&Path>) -> Result<Option<PathBuf>> {
    let named = std::env::var_os(FOLDER).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let Some(folder) = flag.map(Path::to_owned).or(named) else { return Ok(None) };
    std::fs::create_dir_all(&folder).map_err(|error| {
        Failure::request(
            format!("records cannot go to {}: {error}", folder.display()),
            format!("name another folder with --record or {FOLDER}"),
        )
    })?;
    Ok(Some(folder))
}

/// From now on SIGUSR1 writes the records of all ranks here.
pub(crate) fn write_on_request() -> Result<()> {
    interrupt::on_request(write_all)
}

/// Writes the records of all ranks here.
pub(crate) fn write_all() {
    let flights = flights();
    if !flights.iter().any(|flight| flight.folder.is_some()) {
        let why = if flights.is_empty() { "no rank runs here yet" } else { "no folder is named for them" };
        note(&format!("no records are written: {why} (--record DIR or {FOLDER})"));
    }
    for flight in flights {
        flight.try_to_write(Why::Asked);
    }
}

fn lock() -> MutexGuard<'static, Vec<Arc<Flight>>> {
    // A panic while the list was held cannot have left it half changed.
    FLIGHTS.lock().unwrap_or_else(PoisonError::into_inner)
}

static FLIGHTS: Mutex<Vec<Arc<Flight>>> = Mutex::new(Vec::new());

/// Names the folder for records.
pub(crate) const FOLDER: &str = "KYKLOS_RECORD_DIR";
