//! `kyklos attend` as one rank that a launcher started.

use std::sync::Arc;
use std::time::Duration;

use kyklos::backend::Device;
use kyklos_launch::Assignment;

use super::args::AttendArgs;
use super::prepare::{Prepared, launched_request, tabs};
use crate::activity;
use crate::devices::{self, DeviceId, DeviceRequest};
use crate::failure::{Failure, Result, answers_for_group, note};
use crate::group;
use crate::interrupt;
use crate::job::on_loss::{self, GroupLoss, LossPolicy};
use crate::job::rank;
use crate::job::refusal::refuse;
use crate::observe::live::{self, Live};
use crate::observe::{metrics, record};
use crate::options::OnLoss;

/// Runs the rank of `assignment`. When its group loses a rank, continues by `--on-loss`.
pub(super) fn as_rank(args: &AttendArgs, mut assignment: Assignment) -> Result<()> {
    answers_for_group(assignment.rank == 0);
    if assignment.by_kyklos_launch {
        assignment.set_identity(group::read_identity(std::io::stdin().lock())?);
        group::end_with_launcher();
    }
    interrupt::end_on_interrupt()?;
    record::write_on_request()?;
    if args.group.rejoin && args.on_loss != OnLoss::Rejoin {
        return Err(Failure::request(
            "--rejoin without --on-loss rejoin",
            "give both, as the other ranks have the latter",
        ));
    }
    let metrics = metrics::serve(&args.metrics, assignment.rank, assignment.local_rank);
    let heartbeat_ms = args.group.heartbeat.map(std::num::NonZeroU32::get);
    let live = match assignment.rank {
        0 => live::serve(&args.watch, heartbeat_ms),
        _ => Ok(None),
    };
    // What cannot be served is an error of all ranks.
    let (live, served) = match live {
        Ok(live) => (live, metrics),
        Err(failure) => (None, metrics.and(Err(failure))),
    };
    live::to_the_end(live.as_deref(), || in_groups(args, &assignment, live.as_ref(), served))
}

/// Joins the group, and runs the call in it and in the groups that follow it. `served`: whether
/// this process can serve what it should.
fn in_groups(
    args: &AttendArgs,
    assignment: &Assignment,
    live: Option<&Arc<Live>>,
    mut served: Result<()>,
) -> Result<()> {
    let mut group = assignment.join()?;
    let patience = Duration::from_secs(u64::from(args.group.join_deadline.get()));
    let policy = LossPolicy { on_loss: args.on_loss, patience };
    let mut lost: Option<GroupLoss> = None;
    let mut device = None;
    loop {
        answers_for_group(group.rank().0 == 0);
        on_loss::end_if_stuck(&group);
        interrupt::tell_on_interrupt(&group);
        if interrupt::is_interrupted() {
            let _ = pollster::block_on(group.close(Duration::from_secs(3)));
            return Err(Failure::run("this rank was ended while its group formed"));
        }
        let refuse_all = |failure| {
            let failure = refuse(&*group, failure);
            let _ = pollster::block_on(group.close(Duration::from_secs(3)));
            failure
        };
        let size = group.size();
        activity::doing("choosing a plan");
        let request = launched_request(args, size, assignment.local_size).map_err(|failure| {
            if size == assignment.size { failure } else { on_loss::does_not_fit(size, &failure) }
        });
        let mut prepared = std::mem::replace(&mut served, Ok(()))
            .and(request)
            .and_then(|request| Prepared::new(args, request, (assignment.local_size, true)))
            .map(|prepared| prepared.shown_on(live))
            .map_err(refuse_all)?;
        let begins_again = args.on_loss != OnLoss::Stop;
        // Kept for the next group: a browser tab does not come twice.
        let device = device.get_or_insert_with(|| open_device(args, assignment)).clone();
        // Without its device this rank refuses the call below.
        if let Ok(device) = &device {
            match prepared.shared(&group, device) {
                Ok(request) => prepared.request = request,
                Err(failure) => {
                    let loss = begins_again.then(|| GroupLoss::of(&group, &failure)).flatten();
                    let Some(ended) = loss else {
                        GroupLoss::cause(policy, &*group, &failure);
                        let _ = pollster::block_on(group.close(Duration::from_secs(3)));
                        return Err(failure);
                    };
                    group = ended.go_on(policy, &*group)?;
                    lost = Some(ended);
                    continue;
                }
            }
        }
        activity::doing("proving the plans");
        let job = prepared.job(args, group.members.clone()).map_err(refuse_all)?;
        if group.rank().0 == 0 {
            match &lost {
                Some(lost) => lost.tell(&group, &job.request),
                None if args.group.rejoin => on_loss::tell_rejoined(&group, &job.request),
                None if size < assignment.size => on_loss::tell_smaller(&group, &job.request),
                None => job.request.source.warning().iter().for_each(|warning| note(warning)),
            }
        }
        let done = rank::work(&job, &group, device);
        job.watch.phase(None);
        if let Err(failure) = &done {
            GroupLoss::cause(policy, &*group, failure);
        }
        let failure = done.as_ref().err().filter(|_| begins_again);
        let Some(ended) = failure.and_then(|failure| GroupLoss::of(&group, failure)) else {
            rank::leave(&job, &group, &done);
            return done?.map_or(Ok(()), Err);
        };
        group = ended.go_on(policy, &*group)?;
        lost = Some(ended);
    }
}

fn open_device(args: &AttendArgs, assignment: &Assignment) -> Result<Device> {
    let device = device_of(args, assignment)?;
    activity::doing("opening the device");
    // A cluster file may give other ranks a tab.
    tabs(args, &[device], assignment.device.is_none())?;
    device.open()
}

/// The device of a launched rank: by `--device`, or by the cluster file.
fn device_of(args: &AttendArgs, assignment: &Assignment) -> Result<DeviceId> {
    let device = assignment.device.as_deref().map(str::parse::<DeviceRequest>).transpose()?;
    match (device, &args.device.0[..]) {
        (Some(device), [DeviceRequest::Auto]) => devices::choose(&[device], 0),
        (Some(device), _) if args.device.0 != [device] => Err(Failure::request(
            format!("--device {} and device {device} of the cluster file", args.device),
            "leave one of them out",
        )),
        (_, devices) => devices::choose(devices, assignment.local_rank as usize),
    }
}
