//! The combinations of `kyklos bench` as a table and as JSON.

use kyklos::plan::table;
use serde::Serialize;

use super::device_time::DeviceTime;
use crate::failure::{Failure, Result};

/// One combination.
#[derive(Serialize)]
pub(super) struct Line {
    pub(super) device: String,
    pub(super) name: String,
    pub(super) driver: String,
    pub(super) kernel: String,
    pub(super) shape: [u32; 5],
    pub(super) queries: u32,
    pub(super) mask: String,
    pub(super) dtype: String,
    #[serde(flatten)]
    pub(super) measured: Option<Measured>,
    /// Why the combination was not measured.
    pub(super) error: Option<String>,
}

#[derive(Serialize)]
pub(super) struct Measured {
    /// The first run, which compiles kernels.
    pub(super) first_ms: f64,
    pub(super) median_ms: f64,
    pub(super) min_ms: f64,
    pub(super) max_ms: f64,
    /// By the clock of the device, if it has one.
    pub(super) device: Option<DeviceTime>,
    pub(super) gflop_per_s: f64,
    /// None: with --backward, the oracle would take minutes.
    pub(super) max_abs_error: Option<f64>,
    pub(super) tolerance: Option<f64>,
    /// With --verify: every row compared with the device's own result in f32.
    pub(super) every_row: Option<EveryRow>,
}

/// The comparison of every row with the result of the same device in f32.
#[derive(Clone, Copy, Serialize)]
pub(super) struct EveryRow {
    pub(super) rows: usize,
    pub(super) max_abs_error: f64,
}

/// `lines` as a JSON array.
pub(super) fn json<T: Serialize>(lines: &[T]) -> Result<String> {
    serde_json::to_string_pretty(lines)
        .map(|json| json + "\n")
        .map_err(|error| Failure::run(format!("cannot print the table: {error}")))
}

/// The combinations as a table, and the errors of those without times.
pub(super) fn text(lines: &[Line]) -> String {
    let header = [
        "device",
        "kernel",
        "shape",
        "queries",
        "mask",
        "dtype",
        "first ms",
        "median ms",
        "min ms",
        "max ms",
        "device ms",
        "longest kernel ms",
        "GFLOP/s",
        "error",
        "tolerance",
        "every row",
    ];
    let rows = lines.iter().filter_map(|line| {
        let m = line.measured.as_ref()?;
        let names = [&line.device, &line.kernel].map(String::clone);
        let case = [line.shape_text(), line.queries.to_string(), line.mask.clone(), line.dtype.clone()];
        let ms = [m.first_ms, m.median_ms, m.min_ms, m.max_ms].map(|ms| format!("{ms:.2}"));
        let not_held = || "not held".to_owned();
        let errors = [m.max_abs_error, m.tolerance]
            .map(|error| error.map_or_else(not_held, |error| format!("{error:.1e}")));
        let every_row = match m.every_row {
            Some(EveryRow { max_abs_error, .. }) => format!("{max_abs_error:.1e}"),
            None => not_held(),
        };
        let device = match &m.device {
            Some(device) => [device.all_ms, device.kernel_ms].map(|ms| format!("{ms:.3}")),
            None => ["-", "-"].map(str::to_owned),
        };
        let speed = [format!("{:.1}", m.gflop_per_s)];
        Some([&names[..], &case, &ms, &device, &speed, &errors, &[every_row]].concat())
    });
    let mut out = table(&header, rows.collect());
    // The same error of a kernel is printed once.
    let mut told = Vec::new();
    for line in lines {
        let Some(error) = &line.error else { continue };
        let key = (&line.device, &line.kernel, error);
        if !told.contains(&key) {
            let (device, kernel, shape) = (&line.device, &line.kernel, line.shape_text());
            out.push_str(&format!("\n{device} {kernel}, {shape} {} {}: {error}\n", line.mask, line.dtype));
            told.push(key);
        }
    }
    out
}

impl Line {
    fn shape_text(&self) -> String {
        self.shape.map(|n| n.to_string()).join(",")
    }
}
