//! Timed runs on ranks of this process: from the first step of the first rank to the end of the last rank.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::host::{Tensors, shard};
use kyklos::plan::{ProvedPlans, World};
use kyklos::{Observer, RankReport, RunOptions, Session, SessionOptions};
use kyklos_transport::Rank;

use crate::failure::{Failure, Result};
use crate::options::TransportName;
use crate::run::threads::on_threads;
use crate::run::{group, quiet};

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

/// Runs `world` `repeat` times after a warm-up run; rank i has `devices[i]`. Returns the run with the median wall time.
pub(crate) fn run(
    world: &World,
    devices: &[&Device],
    transport: TransportName,
    tensors: &Tensors,
    repeat: u64,
) -> Result<Timed> {
    let plans = Arc::new(ProvedPlans::new(world.clone())?);
    let transports = group(transport, world.mesh.world())?;
    let starts = Arc::new(Starts::default());
    let run = RunOptions { observer: starts.clone(), ..quiet() };
    let options = SessionOptions { deadline: DEADLINE, run, ..SessionOptions::default() };
    let ended = on_threads(transports, |transport| {
        let device = devices[transport.rank().0 as usize].clone();
        let part = shard(world, transport.rank(), tensors)?;
        let mut session = Session::with_options(transport, device, options.clone());
        let mut ends = Vec::new();
        pollster::block_on(async {
            let mut inputs = session.load(&plans, part).await?;
            for _ in 0..=repeat {
                let output = session.run(&plans, &mut inputs).await?;
                ends.push((Instant::now(), output.report));
            }
            // The runs are done: peers that still wait for a message report their own error.
            let _ = session.close_async(DEADLINE).await;
            Ok(ends)
        })
    })?;
    let starts = starts.0.lock().map_err(|_| Failure::run("a rank panicked: this is a bug"))?;
    let mut runs = Vec::new();
    for op in 1..=repeat {
        let place = usize::try_from(op).unwrap_or(usize::MAX);
        let ends: Vec<_> = ended.iter().filter_map(|ends| ends.get(place)).collect();
        let start = starts.iter().filter(|(of, _)| *of == op).map(|(_, at)| *at).min();
        let end = ends.iter().map(|(at, _)| *at).max();
        let (Some(start), Some(end)) = (start, end) else {
            return Err(Failure::run("a run took no step"));
        };
        let reports = ends.iter().map(|(_, report)| report.clone()).collect();
        runs.push(Timed { wall_s: (end - start).as_secs_f64(), reports });
    }
    runs.sort_by(|a, b| a.wall_s.total_cmp(&b.wall_s));
    let middle = runs.len() / 2;
    runs.into_iter().nth(middle).ok_or_else(|| Failure::run("no run took place"))
}

const DEADLINE: Duration = Duration::from_secs(120);
