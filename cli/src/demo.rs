//! The demonstration: one attention call shared by everything this machine has.

use std::num::NonZeroU64;
use std::time::Duration;

use kyklos::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, TokenRuns, plan_world};
use kyklos_transport::{Rank, in_process_group};

use crate::commands::devices::probe;
use crate::devices::{self, DeviceId};
use crate::failure::{Failure, Result, note, print};
use crate::interrupt;
use crate::job::here::run_here;
use crate::job::report::{duration, headline, verdict_line};
use crate::job::{Job, Outputs, Settings};
use crate::options::ProgressKind;
use crate::request::Request;
use crate::run::plans::Plans;
use crate::run::{alone, quiet};
use crate::tensors::Source;

/// Runs the demonstration.
pub(crate) fn demo() -> Result<()> {
    interrupt::end_on_interrupt()?;
    print(
        "Exact attention over one sequence that is split across ranks.\n\
         Keys and values travel round a ring; every rank attends from its own tokens to all of them.\n\n",
    )?;
    let (devices, speeds) = take_part()?;
    // Then there are two ranks, which share one device.
    let all_cpu = devices.iter().all(|device| *device == DeviceId::CPU);
    let total: f64 = speeds.iter().sum();
    let world = u32::try_from(devices.len()).map_err(|_| Failure::run("too many devices"))?;
    let problem =
        AttentionProblem::new([1, tokens_for(total), HEADS, KV_HEADS, DIM], Dtype::F32, Mask::causal())?;
    let request = Request {
        problem,
        mask_text: "causal".to_owned(),
        source: Source::MadeUp { seed: 0 },
        mesh: Mesh::new(1, world)?,
        strategy: Strategy::of_mesh(Mesh::new(1, world)?),
        placement: PlacementKind::Zigzag,
        split: Split::Weights(speeds.clone()),
        predicted_s: None,
    };
    print(&headline(&request))?;
    for ((rank, device), speed) in devices.iter().enumerate().zip(&speeds) {
        let share = 100.0 * speed / total;
        let probed = match all_cpu {
            true => format!("half of {total:.0} GFLOP/s"),
            false => format!("{speed:.0} GFLOP/s"),
        };
        print(&format!("rank {rank}     {device}, {probed} in a probe: {share:.0} % of the tokens\n"))?;
    }
    print("\n")?;

    let ranks = request.mesh.world();
    let settings = Settings {
        repeat: REPEAT.get(),
        deadline: Duration::from_secs(120),
        verify: true,
        progress: ProgressKind::Auto,
        ranks_here: ranks,
        resumable: false,
    };
    let job = Job::new(request, settings, Outputs::default(), (0..ranks).map(Rank).collect())?;
    let done = run_here(&job, in_process_group(ranks), &devices)?;
    let summary = done
        .into_iter()
        .find_map(|done| done.summary)
        .ok_or_else(|| Failure::run("rank 0 gave no summary"))?;
    let mut out = summary.rank_table();
    out.push('\n');
    let verdict = summary.verdict.as_ref();
    if let Some(verdict) = verdict {
        out.push_str(&verdict_line(verdict));
    }
    print(&out)?;

    let best = (0..devices.len()).max_by(|a, b| speeds[*a].total_cmp(&speeds[*b])).unwrap_or(0);
    let alone_s = alone_on(devices[best], &job.agreed.request)?;
    let ratio = alone_s / summary.wall_s.max(1e-9);
    print(&format!(
        "time       {} together, {} on {} alone: {ratio:.2} x\n",
        duration(summary.wall_s),
        duration(alone_s),
        devices[best],
    ))?;
    if all_cpu {
        print(
            "           No GPU was found: both ranks shared the same cores, so about 1 x is all there can be.\n\
             \x20          kyklos devices lists what there is.\n",
        )?;
    }
    match verdict.and_then(|verdict| verdict.failure.clone()) {
        Some(failure) => Err(Failure::run(format!("verification failed: {failure}"))),
        None => Ok(()),
    }
}

/// Every hardware GPU and the CPU, or the CPU twice, with the GFLOP/s of each.
fn take_part() -> Result<(Vec<DeviceId>, Vec<f64>)> {
    let gpus = devices::hardware_gpus().into_iter();
    let mut devices = Vec::new();
    let mut speeds = Vec::new();
    for id in gpus.chain([DeviceId::CPU]) {
        match id.open().and_then(|backend| probe(&backend)) {
            Ok(speed) => {
                devices.push(id);
                speeds.push(speed);
            }
            // One broken driver does not end the demonstration for the others.
            Err(failure) if id != DeviceId::CPU => {
                note(&format!("{id} does not take part: {}", failure.text))
            }
            Err(failure) => return Err(failure),
        }
    }
    if devices.len() == 1 {
        devices.push(DeviceId::CPU);
        speeds = vec![speeds[0] / 2.0; 2];
    }
    Ok((devices, speeds))
}

/// Tokens that keep everything busy for a short while.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to a range of u32")]
fn tokens_for(gflops: f64) -> u32 {
    // Causal: half of 4·S²·H·D.
    let per_square = 2.0 * f64::from(HEADS * DIM);
    let tokens = (SECONDS * gflops * 1e9 / per_square).sqrt();
    (tokens.clamp(1024.0, 32_768.0) as u32).next_multiple_of(256)
}

fn alone_on(device: DeviceId, request: &Request) -> Result<f64> {
    let problem = &request.problem;
    let world =
        plan_world(problem, Mesh::new(1, 1)?, PlacementKind::Contiguous, &Split::Even, Strategy::Dense)?;
    let all = TokenRuns::contiguous(0..problem.kv_len);
    let tensors = request.source.all(problem, &all, &all)?;
    Ok(alone::run(&device.open()?, &Plans::prove(world)?, tensors, REPEAT.get(), &quiet())?.wall_s)
}

const HEADS: u32 = 8;
const KV_HEADS: u32 = 2;
const DIM: u32 = 64;
/// How long one run is meant to take.
const SECONDS: f64 = 0.5;
/// The first run warms up.
const REPEAT: NonZeroU64 = NonZeroU64::MIN.saturating_add(1);
