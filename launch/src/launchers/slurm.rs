//! A task of a Slurm step. Task 0 is on the first host of the step's list, and its port follows from the job's number,
//! so that two jobs which share a host do not meet.

use super::nodelist::{hosts, tasks_per_host};
use super::source::{DEFAULT_PORT, HostPort, Nearness, Said, Source};
use super::variables::Variables;
use crate::failure::{Failure, Result};

pub(crate) fn source(variables: &Variables<'_>) -> Result<Source> {
    let nobody = Source { nearness: Nearness::Outer, ..Source::default() };
    let step = variables.number::<u64>("SLURM_STEP_ID")?;
    // The shell of a batch script is no task of a step, whatever else it says; nor is one of `salloc`.
    if step.as_ref().is_some_and(|step| step.value >= FIRST_SPECIAL_STEP) {
        return Ok(nobody);
    }
    let Some(mut rank) = variables.number::<u32>("SLURM_PROCID")? else {
        return Ok(nobody);
    };
    // srun sets both; the shell of a batch script is process 0 of all the tasks it may start.
    if step.is_none() && rank.value == 0 {
        rank.words.push_str(" without SLURM_STEP_ID, as in a batch script without srun");
    }
    let world = match variables.number::<u32>("SLURM_STEP_NUM_TASKS")? {
        Some(world) => Some(world),
        None => variables.number("SLURM_NTASKS")?,
    };
    let Some(world) = world else {
        if rank.value == 0 && step.is_none() {
            return Ok(nobody);
        }
        return Err(Failure::request(
            format!("{} is set and neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS is", rank.words),
            "start the ranks with srun, which sets them",
        ));
    };
    let list = variables.text("SLURM_STEP_NODELIST").or_else(|| variables.text("SLURM_JOB_NODELIST"));
    let list = match list {
        Some(list) => Some(Said { value: hosts(&list.value, &list.words)?, words: list.words }),
        None => None,
    };
    let number = |name| Ok::<_, Failure>(variables.number::<u32>(name)?.map(|said| said.value));
    let local_rank = number("SLURM_LOCALID")?;
    let tasks = match variables
        .text("SLURM_STEP_TASKS_PER_NODE")
        .or_else(|| variables.text("SLURM_TASKS_PER_NODE"))
    {
        Some(tasks) => tasks_per_host(&tasks.value, &tasks.words)?,
        None => Vec::new(),
    };
    let here = number("SLURM_NODEID")?.and_then(|host| tasks.get(host as usize).copied());
    let distribution = variables.text("SLURM_DISTRIBUTION").map(|said| said.value).unwrap_or_default();
    let distribution = distribution.split([':', ',']).next().unwrap_or_default();
    let mut places = match &list {
        Some(list) => places(&list.value, &tasks, world.value, distribution),
        None => Vec::new(),
    };
    // Where the reckoning does not even place this task, it holds for none.
    let me = variables.text("SLURMD_NODENAME").map(|said| said.value);
    if me.is_some() && places.get(rank.value as usize) != Some(&me) {
        places.clear();
    }
    let job = variables.number::<u64>("SLURM_JOB_ID")?;
    let step = step.map_or(0, |step| step.value);
    let coordinator = match list.filter(|_| distribution != "arbitrary") {
        Some(list) => coordinator(&list, job.as_ref(), step),
        None => None,
    };
    let restarts = variables.text("SLURM_RESTART_COUNT").map_or("0".into(), |said| said.value);
    Ok(Source {
        nearness: Nearness::Outer,
        local_world: here.or(number("SLURM_NTASKS_PER_NODE")?).map(|tasks| tasks.max(1)),
        local_rank,
        coordinator,
        places,
        run: job.map(|job| format!("slurm {}.{step} {restarts}", job.value)),
        rank: Some(rank),
        world: Some(world),
        ..Source::default()
    })
}

fn coordinator(list: &Said<Vec<String>>, job: Option<&Said<u64>>, step: u64) -> Option<Said<HostPort>> {
    let offset = job.map_or(0, |job| job.value.wrapping_add(step) % PORTS);
    let port = DEFAULT_PORT + u16::try_from(offset).ok()?;
    let address = HostPort::new(list.value.first()?, port)?;
    let by = job.map_or(String::new(), |job| format!(", port by {}", job.words));
    Some(Said::new(address, format!("first of {}{by}", list.words)))
}

/// By task, its host: known where Slurm fills one host after the other, or deals tasks round.
fn places(hosts: &[String], tasks: &[u32], world: u32, distribution: &str) -> Vec<Option<String>> {
    let total: u64 = tasks.iter().map(|tasks| u64::from(*tasks)).sum();
    // The number of tasks may be anything: room is made for as many as can be ranks.
    if tasks.len() != hosts.len() || total != u64::from(world) || world > kyklos::MAX_WORLD {
        return Vec::new();
    }
    let mut order: Vec<(u32, usize)> = tasks
        .iter()
        .enumerate()
        .flat_map(|(host, &tasks)| (0..tasks).map(move |round| (round, host)))
        .collect();
    match distribution {
        "" | "block" => {}
        "cyclic" => order.sort_unstable(),
        _ => return Vec::new(),
    }
    order.into_iter().map(|(_, host)| hosts.get(host).cloned()).collect()
}

/// Steps from here on are the batch script, the external step and their like.
const FIRST_SPECIAL_STEP: u64 = 0xffff_fff0;

/// UDP ports for rank 0, from [`DEFAULT_PORT`] on.
const PORTS: u64 = 1000;
