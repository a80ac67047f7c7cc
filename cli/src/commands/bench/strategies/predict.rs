//! The predicted time of each cell: from a description, or from measurements of this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kyklos::simulate::{Candidate, Cluster, predict};
use kyklos::{AttentionProblem, Dtype, Split};

use super::cells::Case;
use super::record::{Predicted, PredictedRank};
use crate::commands::plan::probe::{Probe, fits};
use crate::devices::DeviceId;
use crate::failure::{Failure, Result, note};
use crate::hints;
use crate::observe::page::units::seconds;
use crate::options::TransportName;
use crate::request::description;

/// Where predictions come from.
#[derive(Debug)]
pub(super) enum Predictor {
    Described(Box<Cluster>),
    /// This machine, which has all ranks: measured once for each kind of head, and kept in the
    /// folder.
    Measured(Box<Measure>),
    Nothing,
}

/// What to measure.
#[derive(Debug)]
pub(super) struct Measure {
    pub(super) folder: PathBuf,
    /// By rank.
    pub(super) devices: Vec<DeviceId>,
    pub(super) transport: TransportName,
    /// By kind of head; none where the measurement failed.
    pub(super) found: BTreeMap<Heads, Option<Cluster>>,
}

/// Query heads, KV heads, head dim and the name of the dtype.
pub(super) type Heads = (u32, u32, u32, String);

impl Predictor {
    /// Predictions by the description in `hardware`, or of ranks that are all on `devices` of this
    /// machine.
    pub(super) fn new(
        hardware: Option<&Path>,
        folder: &Path,
        devices: Option<Vec<DeviceId>>,
        transport: TransportName,
    ) -> Result<Self> {
        if let Some(path) = hardware {
            return Ok(Self::Described(Box::new(description::read(path)?)));
        }
        let ranks = |devices: &Vec<DeviceId>| u32::try_from(devices.len()).unwrap_or(u32::MAX);
        let devices = devices.filter(|devices| fits(ranks(devices)).is_ok());
        let Some(devices) = devices else {
            note("there are no predicted times: describe devices and links with --hardware");
            return Ok(Self::Nothing);
        };
        let found = BTreeMap::new();
        Ok(Self::Measured(Box::new(Measure { folder: folder.to_owned(), devices, transport, found })))
    }

    /// The predicted time of a candidate.
    ///
    /// # Errors
    /// Why the candidate does not fit the described memory.
    pub(super) fn predict(
        &mut self,
        case: &Case,
        candidate: Candidate,
        ranks: u32,
    ) -> Result<Option<Predicted>, String> {
        let cluster = match self {
            Self::Described(cluster) => Some(&**cluster),
            Self::Measured(measure) => measure.of(&case.problem),
            Self::Nothing => None,
        };
        let Some(cluster) = cluster else { return Ok(None) };
        // What cannot be planned is refused by all ranks; what is not described has no prediction.
        let Ok(prediction) = predict(&case.problem, candidate, &Split::Even, cluster) else {
            return Ok(None);
        };
        prediction.fits(cluster).map_err(|error| hints::of_plan(&error))?;
        let per_rank = prediction.ranks.iter().map(|rank| PredictedRank {
            compute_s: seconds(rank.compute_ns),
            wait_s: seconds(rank.wait_ns),
            copy_s: seconds(rank.copy_ns),
        });
        let is_whole = prediction.ranks.len() == ranks as usize;
        let per_rank = if is_whole { per_rank.collect() } else { Vec::new() };
        Ok(Some(Predicted { wall_s: prediction.wall_s(), per_rank }))
    }
}

impl Measure {
    /// The measurements for the heads of `problem`.
    fn of(&mut self, problem: &AttentionProblem) -> Option<&Cluster> {
        let (q_heads, kv_heads, head_dim, dtype) =
            (problem.q_heads, problem.kv_heads, problem.head_dim, problem.dtype);
        let heads = (q_heads, kv_heads, head_dim, dtype.to_string());
        if !self.found.contains_key(&heads) {
            let cluster = match self.read_or_measure(problem, dtype) {
                Ok(cluster) => Some(cluster),
                Err(failure) => {
                    note(&format!("there are no predicted times: {}", failure.text));
                    None
                }
            };
            self.found.insert(heads.clone(), cluster);
        }
        self.found.get(&heads).and_then(Option::as_ref)
    }

    /// A run that goes on compares with the same predictions.
    fn read_or_measure(&self, problem: &AttentionProblem, dtype: Dtype) -> Result<Cluster> {
        let (q_heads, kv_heads, head_dim) = (problem.q_heads, problem.kv_heads, problem.head_dim);
        let path = self.folder.join(format!("hardware-{q_heads}-{kv_heads}-{head_dim}-{dtype}.toml"));
        if path.exists() {
            return description::read(&path);
        }
        note(&format!("measuring the devices for {q_heads} query heads of {head_dim} in {dtype}"));
        let mut probe = Probe::new(problem, false, self.devices.clone(), self.transport)?;
        for _ in 0..LOOKS {
            probe.look()?;
        }
        let cluster = probe.cluster()?;
        let text = cluster.to_toml().map_err(Failure::from)?;
        std::fs::write(&path, text).map_err(|error| Failure::file("write", &path, &error))?;
        Ok(cluster)
    }
}

/// Rounds of measurements, of which the medians count.
const LOOKS: u32 = 3;
