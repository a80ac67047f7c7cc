//! Runs of one rank on one device: probes, and the accuracy of a device alone.

use std::sync::Arc;
use std::time::Instant;

use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::plan::{PlanSet, ProvedPlans};
use kyklos::{RunOptions, Session, SessionOptions};
use kyklos_transport::in_process_group;

use crate::failure::{Failure, Result};
use crate::run::call::RankCall;
use crate::tensors::results::HostOutput;

/// The last of several runs: its output and wall time.
#[derive(Debug)]
pub(crate) struct Alone {
    pub(crate) output: HostOutput,
    pub(crate) wall_s: f64,
}

/// Runs the plan of one rank `repeat` times on `device`.
pub(crate) fn run(
    device: &Device,
    set: PlanSet,
    tensors: Tensors,
    repeat: u64,
    options: &RunOptions,
) -> Result<Alone> {
    let plans = Arc::new(ProvedPlans::new(set)?);
    let transport =
        in_process_group(1).pop().ok_or_else(|| Failure::run("a group of one rank has no rank"))?;
    let options = SessionOptions { run: options.clone(), ..SessionOptions::default() };
    let mut session = Session::with_options(transport, device.clone(), options);
    pollster::block_on(async {
        let call = RankCall::open(&mut session, &plans, tensors, None).await?;
        let mut last = None;
        for _ in 0..repeat {
            // Its results stay on the device until they are dropped.
            drop(last.take());
            let started = Instant::now();
            let output = call.attend(&mut session).await?;
            last = Some((output, started.elapsed().as_secs_f64()));
        }
        let (output, wall_s) = last.ok_or_else(|| Failure::run("no run took place"))?;
        Ok(Alone { output: HostOutput::of(output).await?, wall_s })
    })
}
