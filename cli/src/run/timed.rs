//! Timed runs on ranks of this process: from the first step of the first rank to the end of the
//! last rank.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::host::{Tensors, shard};
use kyklos::plan::{PlanSet, ProvedPlans};
use kyklos::{Observer, RankReport, RunOptions, Session, SessionOptions};
use kyklos_transport::Rank;

use crate::failure::{Failure, Result};
use crate::options::TransportName;
use crate::run::call::RankCall;
use crate::run::threads::on_threads;
use crate::run::{group, quiet};
use crate::tensors::results::HostGradients;
use crate::tensors::{GivenGradient, Source};

/// One timed run.
#[derive(Debug)]
pub(crate) struct Timed {
    pub(crate) wall_s: f64,
    pub(crate) reports: Vec<RankReport>,
}

/// Records when each rank starts its first step.
#[derive(Debug, Default)]
struct Starts(Mutex<Vec<(u64, Instant)>>);

impl Observer for Starts {
    fn step(&self, _: Rank, op: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
        if step == 0 {
            // A poisoned lock means that a rank panicked, which ends the run anyway.
            if let Ok(mut starts) = self.0.lock() {
                starts.push((op, Instant::now()));
            }
        }
    }
}

/// Timed runs of a forward pass, and of the backward pass after each.
#[derive(Debug)]
pub(crate) struct BothPasses {
    pub(crate) forward: Vec<Timed>,
    pub(crate) backward: Vec<Timed>,
    /// Of the last run, by rank.
    pub(crate) gradients: Vec<HostGradients>,
}

/// What a rank reads before its first run: its tensors, and for a backward pass the gradient of its
/// output.
type Read<'a> = &'a (dyn Fn(Rank) -> Result<(Tensors, Option<GivenGradient>)> + Sync);

/// Runs `set` `repeat` times after a warm-up run; rank i has `devices[i]`. Returns the run with the
/// median wall time.
pub(crate) fn run(
    set: &PlanSet,
    devices: &[&Device],
    transport: TransportName,
    tensors: &Tensors,
    repeat: u64,
) -> Result<Timed> {
    let read = |rank| Ok((shard(set, rank, tensors)?, None));
    middle(passes(set, None, (devices, transport), &read, repeat)?.forward)
}

/// Runs `forward` and then `backward`, which have the same tokens on each rank, `repeat` times
/// after a warm-up run of both.
pub(crate) fn both(
    forward: &PlanSet,
    backward: &PlanSet,
    (devices, transport): (&[&Device], TransportName),
    source: &Source,
    repeat: u64,
) -> Result<BothPasses> {
    let read = |rank| {
        let (queries, keys) = (forward.q_placement.of_rank(rank), forward.kv_placement.held_by(rank));
        let tensors = source.all(&forward.problem, queries, &keys)?;
        Ok((tensors, Some(source.output_gradient(&forward.problem, queries)?)))
    };
    passes(forward, Some(backward), (devices, transport), &read, repeat)
}

/// The run with the median wall time.
pub(crate) fn middle(mut runs: Vec<Timed>) -> Result<Timed> {
    runs.sort_by(|a, b| a.wall_s.total_cmp(&b.wall_s));
    let middle = runs.len() / 2;
    runs.into_iter().nth(middle).ok_or_else(|| Failure::run("no run took place"))
}

fn passes(
    forward: &PlanSet,
    backward: Option<&PlanSet>,
    (devices, transport): (&[&Device], TransportName),
    read: Read<'_>,
    repeat: u64,
) -> Result<BothPasses> {
    let proved = |set: &PlanSet| Ok::<_, Failure>(Arc::new(ProvedPlans::new(set.clone())?));
    let (plans, backward) = (proved(forward)?, backward.map(proved).transpose()?);
    let transports = group(transport, forward.mesh.size())?;
    let starts = Arc::new(Starts::default());
    let run = RunOptions { observer: starts.clone(), ..quiet() };
    let options = SessionOptions { deadline: DEADLINE, run, ..SessionOptions::default() };
    let ended = on_threads(transports, |transport| {
        let device = devices[transport.rank().0 as usize].clone();
        let (part, gradient) = read(transport.rank())?;
        let mut session = Session::with_options(transport, device, options.clone());
        let (mut ends, mut last) = (Vec::new(), None);
        pollster::block_on(async {
            let call =
                RankCall::open(&mut session, &plans, part, backward.as_ref().zip(gradient.as_ref())).await?;
            for _ in 0..=repeat {
                // Its results stay on the device until they are dropped.
                drop(last.take());
                let output = call.attend(&mut session).await?;
                ends.push((Instant::now(), output.report.clone()));
                if let Some(gradients) = call.backward(&mut session, &output).await? {
                    ends.push((Instant::now(), gradients.report.clone()));
                    last = Some(gradients);
                }
            }
            let last = match last {
                Some(gradients) => Some(HostGradients::of(gradients).await?),
                None => None,
            };
            // The runs are done: peers that still wait for a message report their own error.
            let _ = session.close_async(DEADLINE).await;
            Ok((ends, last))
        })
    })?;
    let starts = starts.0.lock().map_err(|_| Failure::run("a rank panicked: this is a bug"))?;
    let mut runs = [Vec::new(), Vec::new()];
    let passes = 1 + u64::from(backward.is_some());
    // The first operations warm up.
    for op in passes..(repeat + 1) * passes {
        let place = usize::try_from(op).unwrap_or(usize::MAX);
        let ends: Vec<_> = ended.iter().filter_map(|(ends, _)| ends.get(place)).collect();
        let start = starts.iter().filter(|(of, _)| *of == op).map(|(_, at)| *at).min();
        let end = ends.iter().map(|(at, _)| *at).max();
        let (Some(start), Some(end)) = (start, end) else {
            return Err(Failure::run("a run took no step"));
        };
        let reports = ends.iter().map(|(_, report)| report.clone()).collect();
        let is_backward = op % passes == 1;
        runs[usize::from(is_backward)].push(Timed { wall_s: (end - start).as_secs_f64(), reports });
    }
    let [forward, backward] = runs;
    Ok(BothPasses {
        forward,
        backward,
        gradients: ended.into_iter().filter_map(|(_, gradients)| gradients).collect(),
    })
}

const DEADLINE: Duration = Duration::from_secs(120);
