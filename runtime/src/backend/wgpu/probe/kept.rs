//! The file of a comparison. A damaged file counts as empty.

use std::fs::{self, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::comparison::{Candidates, Probe};
use crate::backend::wgpu::tuning::AdapterKey;
use crate::backend::wgpu::variant::DIALECT;

/// The content of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kept {
    /// Comparisons that began; without a result, all of them ended the process or failed.
    pub(super) begun: u32,
    pub(super) result: Option<Outcome>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Outcome {
    agrees: bool,
    portable_ms: f64,
    matrices_ms: f64,
}

impl From<&Probe> for Outcome {
    fn from(probe: &Probe) -> Self {
        let Probe { portable_s, matrices_s, .. } = *probe;
        Self { agrees: probe.agrees(), portable_ms: 1e3 * portable_s, matrices_ms: 1e3 * matrices_s }
    }
}

impl Outcome {
    fn takes_matrices(self) -> bool {
        self.agrees && self.matrices_ms < (1.0 - MARGIN) * self.portable_ms
    }
}

/// Name of the file: the device with its driver, the kernels' names and texts.
pub(super) fn name(key: &AdapterKey, candidates: Candidates) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    let AdapterKey { name, vendor, device, backend, driver, driver_info } = key;
    for text in [name, &format!("{vendor} {device}"), backend, driver, driver_info] {
        add(text);
    }
    for kernel in candidates.kernels() {
        add(&kernel.source(DIALECT));
    }
    format!("{}.json", hasher.finalize().to_hex())
}

impl Kept {
    /// Whether it says that matrix units are used; `None` if the two are to be compared.
    pub(super) fn takes_matrices(self) -> Option<bool> {
        match self.result {
            Some(outcome) => Some(outcome.takes_matrices()),
            None => (self.begun >= MOST_BEGUN).then_some(false),
        }
    }
}

/// The file, which no other process reads or writes as long as this value lives.
pub(super) struct File(fs::File);

impl File {
    /// Opens the file, or makes it, and waits for other processes that have it.
    ///
    /// # Errors
    /// Those of the file system; another process that has it for longer than [`LONGEST_WAIT`].
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let file = fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a file"));
        }
        let until = Instant::now() + LONGEST_WAIT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                Err(TryLockError::WouldBlock) if Instant::now() < until => sleep(Duration::from_millis(20)),
                Err(TryLockError::WouldBlock) => return Err(io::Error::other("another process has it")),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    /// What it says; nothing if it is new or damaged.
    pub(super) fn read(&mut self) -> Kept {
        let mut text = String::new();
        match Read::by_ref(&mut self.0).take(MOST_BYTES).read_to_string(&mut text) {
            Ok(_) => serde_json::from_str(&text).unwrap_or_default(),
            Err(_) => Kept::default(),
        }
    }

    /// Replaces what it says, on the disk before this function returns.
    pub(super) fn write(&mut self, kept: Kept) -> io::Result<()> {
        let text = serde_json::to_string(&kept)?;
        self.0.rewind()?;
        self.0.set_len(0)?;
        self.0.write_all(text.as_bytes())?;
        self.0.sync_all()
    }
}

/// Comparisons without a result after which the portable kernel stays. More than one, because a
/// user may have ended the process.
const MOST_BEGUN: u32 = 3;
const MOST_BYTES: u64 = 4096;
/// The gain for which matrix units are chosen: two runs of one kernel differ by this much.
const MARGIN: f64 = 0.03;
/// A comparison takes seconds where the driver compiles slowly.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::super::tests::{candidates, gradients, key};
    use super::*;

    fn probe(portable_s: f64, matrices_s: f64, difference: f64) -> Kept {
        Kept { begun: 1, result: Some((&Probe { portable_s, matrices_s, difference }).into()) }
    }

    #[test]
    fn matrices_are_chosen_only_if_they_agree_and_are_faster() {
        for (probe, takes, what) in [
            (probe(2e-3, 1e-3, 1e-4), true, "faster"),
            (probe(1e-3, 2e-3, 1e-4), false, "slower"),
            (probe(1e-3, 0.99e-3, 1e-4), false, "no gain"),
            (probe(2e-3, 1e-3, 0.1), false, "another result"),
            (probe(2e-3, 1e-3, f64::NAN), false, "not finite"),
        ] {
            assert_eq!(probe.takes_matrices(), Some(takes), "{what}");
        }
    }

    #[test]
    fn a_comparison_that_ended_the_process_is_repeated_twice_and_then_never() {
        for (begun, takes) in [(0, None), (2, None), (3, Some(false))] {
            assert_eq!(Kept { begun, result: None }.takes_matrices(), takes, "{begun}");
        }
    }

    #[test]
    fn a_written_file_is_read_and_a_damaged_one_counts_as_empty() {
        let folder = std::env::temp_dir().join(format!("kyklos-kept-{}", std::process::id()));
        let path = folder.join("deeper").join("a.json");
        assert_eq!(File::open(&path).unwrap().read(), Kept::default());
        for kept in [probe(2e-3, 1e-3, f64::INFINITY), Kept { begun: 2, result: None }] {
            File::open(&path).unwrap().write(kept).unwrap();
            assert_eq!(File::open(&path).unwrap().read(), kept);
        }
        let whole = fs::read_to_string(&path).unwrap();
        for damaged in ["", &whole[1..], &whole.replace("begun", "begin"), &whole.repeat(200)] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(File::open(&path).unwrap().read(), Kept::default(), "{damaged}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn another_driver_device_head_dim_or_pass_has_another_file() {
        let key = key();
        let one = name(&key, candidates());
        assert_eq!(one, name(&key.clone(), candidates()));
        assert_ne!(one, name(&AdapterKey { driver_info: "1.1".to_owned(), ..key.clone() }, candidates()));
        // The same digits.
        assert_ne!(one, name(&AdapterKey { vendor: 12, device: 3, ..key.clone() }, candidates()));
        assert_ne!(one, name(&key, Candidates { head_dim: 128, ..candidates() }));
        assert_ne!(one, name(&key, gradients()));
    }
}
