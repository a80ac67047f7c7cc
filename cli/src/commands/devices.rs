//! `kyklos devices`, and the speed probe.

use clap::Args;
use kyklos::backend::{Device, ShortWork};
use kyklos::machine::can_load_drivers;
use kyklos::plan::table;
use kyklos::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, TokenRuns, plan_forward};
use serde::Serialize;

use crate::activity;
use crate::devices::{self, BackendKind, DeviceId, DeviceReport};
use crate::failure::{Failure, Result, print};
use crate::run::{alone, quiet};
use crate::tensors::Source;

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print one JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Serialize)]
struct Line {
    id: String,
    #[serde(flatten)]
    device: DeviceReport,
    gflops: Option<f64>,
    error: Option<String>,
}

/// Runs the command.
pub(crate) fn devices(args: &DevicesArgs) -> Result<()> {
    let mut lines = Vec::new();
    activity::doing("looking for devices");
    for id in devices::all() {
        activity::doing(&format!("measuring {id}"));
        match id.open() {
            Ok(backend) => {
                let probed = probe(&backend);
                lines.push(Line {
                    id: id.to_string(),
                    device: DeviceReport::new(backend.info()),
                    gflops: probed.as_ref().ok().copied(),
                    error: probed.err().map(|failure| failure.text),
                });
            }
            Err(failure) => lines.push(Line {
                id: id.to_string(),
                device: id.describe(),
                gflops: None,
                error: Some(failure.text),
            }),
        }
    }
    if args.json {
        let json = serde_json::to_string_pretty(&lines)
            .map_err(|error| Failure::run(format!("cannot print the devices: {error}")))?;
        return print(&(json + "\n"));
    }
    let gpus = lines.iter().any(|line| line.id != DeviceId::CPU.to_string());
    let rows = lines.into_iter().map(|line| {
        vec![
            line.id,
            line.device.name,
            line.device.class,
            line.device.driver,
            line.device.kernel,
            match (line.gflops, line.error) {
                (Some(gflops), _) => format!("{gflops:.0} GFLOP/s"),
                (None, error) => error.unwrap_or_default(),
            },
        ]
    });
    let mut out = table(&["device", "name", "class", "driver", "kernel", "probe"], rows.collect());
    if !gpus && BackendKind::Wgpu.left_out().is_none() {
        out.push_str(if can_load_drivers() {
            "\nno GPU: no Vulkan, Metal or DX12 driver was found\n"
        } else {
            "\nno GPU: this program is static (musl), and a static program loads no driver; use a build for glibc\n"
        });
    }
    for why in devices::left_out().into_iter().filter(|_| can_load_drivers()) {
        out.push_str(&format!("\n{why}\n"));
    }
    print(&out)
}

/// GFLOP/s of a device on attention, which has nothing else to do. The number of tokens grows until
/// a run is long enough to time.
pub(crate) fn probe(device: &Device) -> Result<f64> {
    let _short = ShortWork::on(device);
    let mut tokens = FIRST_TOKENS;
    loop {
        let problem = AttentionProblem::new([1, tokens, HEADS, HEADS, DIM], Dtype::F32, Mask::full())?;
        let set = plan_forward(
            &problem,
            Mesh::new(1, 1)?,
            PlacementKind::Contiguous,
            &Split::Even,
            Strategy::Dense,
        )?;
        let (source, all) = (Source::Random { seed: 0 }, TokenRuns::contiguous(0..tokens));
        let tensors = source.all(&problem, &all, &all)?;
        // The first run compiles kernels and wakes the device.
        let alone = alone::run(device, set, tensors, 2, &quiet())?;
        let flops = 4.0 * f64::from(tokens).powi(2) * f64::from(HEADS * DIM);
        if alone.wall_s >= LONG_ENOUGH_S || tokens >= LAST_TOKENS {
            return Ok(flops / alone.wall_s.max(1e-9) / 1e9);
        }
        tokens *= 2;
    }
}

/// Few, so that no device is long in its first kernel; more than few-row kernels take.
const FIRST_TOKENS: u32 = 128;
const LAST_TOKENS: u32 = 8192;
const HEADS: u32 = 4;
const DIM: u32 = 64;
const LONG_ENOUGH_S: f64 = 0.03;
