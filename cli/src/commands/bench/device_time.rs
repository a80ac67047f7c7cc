//! The time of a call by the clock of its device, where the device has one.

use kyklos::backend::KernelTime;
use serde::Serialize;

use crate::median::median;

/// Medians over the runs of a case, in milliseconds of the device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct DeviceTime {
    /// All kernels of a run.
    pub(super) all_ms: f64,
    /// The kernels that take longest, which are submitted together: those that attend.
    pub(super) kernel: String,
    pub(super) kernel_ms: f64,
}

impl DeviceTime {
    /// Of the kernels of each run. `None` if the device has no clock.
    pub(super) fn of(runs: &[Vec<KernelTime>]) -> Option<Self> {
        let longest = runs.first().and_then(|run| kernels(run).max_by(|a, b| a.1.total_cmp(&b.1)));
        let (kernel, _) = longest?;
        let of_kernel = |run: &Vec<KernelTime>| -> f64 {
            kernels(run).filter(|(name, _)| *name == kernel).map(|(_, ms)| ms).sum()
        };
        Some(Self { all_ms: median(all_ms(runs)), kernel_ms: median(runs.iter().map(of_kernel)), kernel })
    }
}

/// All kernels of each run.
pub(super) fn all_ms(runs: &[Vec<KernelTime>]) -> impl Iterator<Item = f64> {
    runs.iter().map(|run| run.iter().map(|time| time.ms).sum())
}

/// Each name of kernels that are submitted together, and their time in a run. A long call is
/// submitted in pieces.
fn kernels(run: &[KernelTime]) -> impl Iterator<Item = (String, f64)> {
    let mut sums: Vec<(String, f64)> = Vec::new();
    for KernelTime { kernels, ms } in run {
        let name = kernels.join(" + ");
        match sums.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += ms,
            None => sums.push((name, *ms)),
        }
    }
    sums.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_call_count_together_and_the_median_is_over_runs() {
        let time = |name: &str, ms| KernelTime { kernels: vec![name.to_owned()], ms };
        let run = |ms| vec![time("attend", ms), time("attend", 1.0), time("finalize", 1.5)];
        let of = DeviceTime::of(&[run(1.0), run(9.0), run(2.0)]).unwrap();
        assert_eq!((of.kernel.as_str(), of.kernel_ms, of.all_ms), ("attend", 3.0, 4.5));
        assert_eq!(DeviceTime::of(&[Vec::new()]), None);
        assert_eq!(DeviceTime::of(&[]), None);
    }
}
