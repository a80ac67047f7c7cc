//! Whether the kernel for matrix units is worth it on a device: measured when heads of f16 are
//! first used, and kept in a file.
//!
//! Both kernels run a small problem, each on a device of its own, so that a failure of the kernel
//! for matrix units does not touch the caller's work. Matrix units are chosen if their result
//! agrees and they are faster. All that goes wrong chooses the portable kernel.

mod comparison;
mod kept;
pub(super) mod measure;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use kyklos_shaders::AttendVariant;

pub(super) use self::comparison::Candidates;
pub use self::comparison::Probe;
use self::kept::Kept;
use crate::backend::wgpu::tuning::AdapterKey;
use crate::error::Result;

/// The device that a backend was opened on, to be opened again.
#[derive(Debug)]
pub(super) struct Prober {
    adapter: wgpu::Adapter,
    compare: Compare,
    cache: Option<PathBuf>,
}

/// Opens the device anew and compares two kernels on it.
type Compare = fn(&wgpu::Adapter, Candidates) -> Result<Probe>;

impl Prober {
    pub(super) fn new(adapter: &wgpu::Adapter, compare: Compare, cache: Option<PathBuf>) -> Self {
        Self { adapter: adapter.clone(), compare, cache }
    }

    /// The faster of the two, if both agree. Only the first call for a device and a head dim takes
    /// longer than a moment: milliseconds, and the time that the driver takes to compile both.
    pub(super) fn faster(&self, key: &AdapterKey, candidates: Candidates) -> AttendVariant {
        /// The choices of this process by the names of their files. The lock is held while a device
        /// is measured: ranks that share it wait for the result.
        static CHOICES: Mutex<Option<HashMap<String, AttendVariant>>> = Mutex::new(None);
        let name = kept::name(key, candidates);
        let mut choices = CHOICES.lock().unwrap_or_else(PoisonError::into_inner);
        let choices = choices.get_or_insert_default();
        if let Some(choice) = choices.get(&name) {
            return *choice;
        }
        let choice = self.kept_or_measured(&name, candidates);
        choices.insert(name, choice);
        choice
    }

    /// Measures now, and keeps nothing.
    ///
    /// # Errors
    /// As [`measure::measure`].
    pub(super) fn measure(&self, candidates: Candidates) -> Result<Probe> {
        (self.compare)(&self.adapter, candidates)
    }

    fn kept_or_measured(&self, name: &str, candidates: Candidates) -> AttendVariant {
        let path = self.cache.as_ref().map(|folder| folder.join("probes").join(name));
        let kept = path.as_deref().and_then(Kept::read).unwrap_or_default();
        if let Some(choice) = kept.choice(candidates) {
            return choice;
        }
        // If the driver ends this process, the next one finds that it began.
        let begun = Kept { begun: kept.begun + 1, ..Kept::default() };
        keep(path.as_deref(), begun);
        match self.measure(candidates) {
            Ok(probe) => {
                tracing::info!(?probe, "compared matrix units with the portable kernel");
                let done = Kept { result: Some((&probe).into()), ..begun };
                keep(path.as_deref(), done);
                done.choice(candidates).unwrap_or(candidates.portable)
            }
            Err(error) => {
                tracing::warn!(%error, "matrix units are not used: the comparison with the portable kernel failed");
                candidates.portable
            }
        }
    }
}

/// Writes the file, if there is a folder for it. Without it the next process measures again.
fn keep(path: Option<&std::path::Path>, kept: Kept) {
    if let Some(path) = path
        && let Err(error) = kept.write(path)
    {
        tracing::warn!(%error, path = %path.display(), "the comparison of kernels is not kept");
    }
}
