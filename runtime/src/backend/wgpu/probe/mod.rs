//! Whether the kernels for matrix units are worth it on a device: measured when heads of f16 are
//! first used, for the forward pass and for gradients each, and kept in a file.
//!
//! Both kernels run a small problem, each on a device of its own, so that a failure of the kernel
//! for matrix units does not touch the caller's work. Matrix units are chosen if their result
//! agrees and they are faster. All that goes wrong chooses the portable kernel.

mod comparison;
mod gradients;
mod kept;
pub(super) mod measure;
mod side;

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

pub use self::comparison::Probe;
pub(super) use self::comparison::{Candidates, Pass};
use self::kept::{File, Kept};
use crate::backend::wgpu::tuning::AdapterKey;
use crate::error::{Error, Result};

/// Chooses for one open device.
pub(super) struct Prober {
    compare: Compare,
    cache: Option<PathBuf>,
    /// Whether matrix units are used, by head dim, for the forward pass and for gradients. Locked
    /// while the device is measured: other calls with f16 heads wait.
    choices: Mutex<HashMap<(u32, bool), bool>>,
}

/// Opens the device anew and compares two kernels on it.
type Compare = Box<dyn Fn(Candidates) -> Result<Probe> + Send + Sync>;

impl fmt::Debug for Prober {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prober").field("cache", &self.cache).finish_non_exhaustive()
    }
}

impl Prober {
    pub(super) fn new(
        compare: impl Fn(Candidates) -> Result<Probe> + Send + Sync + 'static,
        cache: Option<PathBuf>,
    ) -> Self {
        Self { compare: Box::new(compare), cache, choices: Mutex::default() }
    }

    /// Whether matrix units are faster, and agree. The first call for a head dim reads the file of
    /// an earlier process, or takes milliseconds and the time that the driver takes to compile
    /// both.
    pub(super) fn takes_matrices(&self, key: &AdapterKey, candidates: Candidates) -> bool {
        let mut choices = self.choices.lock().unwrap_or_else(PoisonError::into_inner);
        let which = (candidates.head_dim, candidates.of_gradients());
        *choices.entry(which).or_insert_with(|| self.kept_or_measured(key, candidates))
    }

    /// Measures now, and keeps nothing.
    ///
    /// # Errors
    /// As [`measure::measure`]; a panic of wgpu or of the driver is one too.
    pub(super) fn measure(&self, candidates: Candidates) -> Result<Probe> {
        catch_unwind(AssertUnwindSafe(|| (self.compare)(candidates))).unwrap_or_else(|_| {
            Err(Error::Device {
                device: "wgpu".to_owned(),
                operation: "compare two kernels".to_owned(),
                native: "a panic of wgpu or of the driver".to_owned(),
            })
        })
    }

    fn kept_or_measured(&self, key: &AdapterKey, candidates: Candidates) -> bool {
        let path = self.cache.as_ref().map(|folder| folder.join("probes").join(kept::name(key, candidates)));
        // Held until the end: processes on equal devices measure one after the other, or not at all.
        let mut file = path.as_deref().and_then(|path| {
            File::open(path)
                .inspect_err(|error| tracing::warn!(%error, path = %path.display(), "the comparison of kernels is not kept"))
                .ok()
        });
        let kept = file.as_mut().map_or_else(Kept::default, File::read);
        if let Some(choice) = kept.takes_matrices() {
            if kept.result.is_none() {
                tracing::warn!(
                    begun = kept.begun,
                    "matrix units are not used: no comparison with the portable kernel ended"
                );
            }
            return choice;
        }
        let mut keep = |kept: Kept| {
            if let Some(Err(error)) = file.as_mut().map(|file| file.write(kept)) {
                tracing::warn!(%error, "the comparison of kernels is not kept");
            }
        };
        // If the driver ends this process, the next one finds that it began.
        let begun = Kept { begun: kept.begun + 1, result: None };
        keep(begun);
        match self.measure(candidates) {
            Ok(probe) => {
                tracing::info!(?probe, "compared matrix units with the portable kernel");
                let done = Kept { result: Some((&probe).into()), ..begun };
                keep(done);
                done.takes_matrices().unwrap_or(false)
            }
            Err(error) => {
                tracing::warn!(%error, "matrix units are not used: the comparison with the portable kernel failed");
                // That says nothing about the kernels.
                if matches!(error, Error::OutOfMemory { .. }) {
                    keep(kept);
                }
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use kyklos_shaders::{AttendVariant, BackwardVariant, Matrices, Vendor};

    use super::*;

    pub(super) fn key() -> AdapterKey {
        AdapterKey {
            name: "a".to_owned(),
            vendor: 1,
            device: 23,
            backend: "vulkan".to_owned(),
            driver: "d".to_owned(),
            driver_info: "1.0".to_owned(),
        }
    }

    const MATRICES: Matrices = Matrices { size: 16, subgroup_size: 64, halves: true, subgroups: 4 };

    pub(super) fn candidates() -> Candidates {
        let variants = [AttendVariant::portable(Vendor::Amd, 64, true), AttendVariant::Cooperative(MATRICES)];
        Candidates { pass: Pass::Forward(variants), head_dim: 64 }
    }

    pub(super) fn gradients() -> Candidates {
        let variants = [BackwardVariant::Portable(Vendor::Amd), BackwardVariant::Cooperative(MATRICES)];
        Candidates { pass: Pass::Gradients(variants), head_dim: 64 }
    }

    /// What processes one after the other choose whose comparisons give `result`, and how many they
    /// made.
    fn choices(cache: Option<PathBuf>, processes: u32, result: fn() -> Result<Probe>) -> (Vec<bool>, u32) {
        let made = Arc::new(AtomicU32::new(0));
        let choose = |_| {
            let made = made.clone();
            let compare = move |_| {
                made.fetch_add(1, Ordering::Relaxed);
                result()
            };
            let prober = Prober::new(compare, cache.clone());
            let first = prober.takes_matrices(&key(), candidates());
            assert_eq!(prober.takes_matrices(&key(), candidates()), first);
            first
        };
        let chosen = (0..processes).map(choose).collect();
        (chosen, made.load(Ordering::Relaxed))
    }

    fn faster() -> Result<Probe> {
        Ok(Probe { portable_s: 2e-3, matrices_s: 1e-3, difference: 1e-4 })
    }

    fn folder() -> PathBuf {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        std::env::temp_dir().join(format!("kyklos-probes-{}-{count}", std::process::id()))
    }

    #[test]
    fn one_process_measures_and_the_others_read() {
        let cache = folder();
        assert_eq!(choices(Some(cache.clone()), 4, faster), (vec![true; 4], 1));
        std::fs::remove_dir_all(cache).unwrap();
        assert_eq!(choices(None, 2, faster), (vec![true; 2], 2), "nowhere to keep it");
    }

    #[test]
    fn gradients_have_a_comparison_of_their_own() {
        let compare = |candidates: Candidates| {
            let matrices_s = if candidates.of_gradients() { 2e-3 } else { 1e-3 };
            Ok(Probe { portable_s: 1.5e-3, matrices_s, difference: 1e-4 })
        };
        let prober = Prober::new(compare, None);
        for _ in 0..2 {
            assert!(prober.takes_matrices(&key(), candidates()));
            assert!(!prober.takes_matrices(&key(), gradients()));
        }
    }

    #[test]
    fn processes_at_the_same_time_all_get_the_result_of_one() {
        let cache = folder();
        let made = Arc::new(AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                let made = made.clone();
                let compare = move |_| {
                    made.fetch_add(1, Ordering::Relaxed);
                    faster()
                };
                let prober = Prober::new(compare, Some(cache.clone()));
                scope.spawn(move || assert!(prober.takes_matrices(&key(), candidates())));
            }
        });
        assert_eq!(made.load(Ordering::Relaxed), 1);
        std::fs::remove_dir_all(cache).unwrap();
    }

    #[test]
    fn failures_and_panics_choose_the_portable_kernel_and_end_the_attempts() {
        let failed = || {
            Err(Error::Device { device: "a".to_owned(), operation: "b".to_owned(), native: "c".to_owned() })
        };
        for result in [failed, || panic!("as a driver may")] {
            let cache = folder();
            assert_eq!(choices(Some(cache.clone()), 5, result), (vec![false; 5], 3));
            std::fs::remove_dir_all(cache).unwrap();
        }
    }

    #[test]
    fn a_device_without_memory_says_nothing_about_the_kernels() {
        let cache = folder();
        let full = || {
            let (device, what) = ("a".to_owned(), "q".to_owned());
            Err(Error::OutOfMemory { device, what, asked_bytes: 2, allowed_bytes: 1 })
        };
        assert_eq!(choices(Some(cache.clone()), 5, full), (vec![false; 5], 5));
        assert_eq!(choices(Some(cache.clone()), 2, faster), (vec![true; 2], 1));
        std::fs::remove_dir_all(cache).unwrap();
    }

    #[test]
    fn a_cache_that_is_no_folder_does_not_matter() {
        let file = folder();
        std::fs::write(&file, "").unwrap();
        assert_eq!(choices(Some(file.clone()), 2, faster), (vec![true; 2], 2));
        std::fs::remove_file(file).unwrap();
    }
}
