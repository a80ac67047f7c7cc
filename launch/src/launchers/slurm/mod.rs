//! Slurm: a rank is a task of a step. Task 0 is on the first host of the step's list. Its port
//! depends on the job number, so that two jobs that share a host use different ports.

pub(crate) mod nodelist;

use kyklos_transport::MAX_RANKS;

use self::nodelist::{hosts, tasks_per_host};
use super::Launcher;
use crate::address::{DEFAULT_PORT, HostPort};
use crate::error::{Error, Result};
use crate::source::{Precedence, Setting, Source};
use crate::variables::Variables;

pub(super) const LAUNCHER: Launcher = Launcher {
    name: "Slurm",
    variables: &["SLURM"],
    rank_variables: &["SLURM_PROCID"],
    precedence: Precedence::Scheduler,
    read,
};

fn read(variables: &Variables<'_>) -> Result<Source> {
    let no_task = Source::default();
    let step = variables.number::<u64>("SLURM_STEP_ID")?;
    // Steps with these numbers are the shells of batch scripts and of `salloc`, which are not tasks.
    if step.as_ref().is_some_and(|step| step.value >= FIRST_SPECIAL_STEP) {
        return Ok(no_task);
    }
    let Some(mut rank) = variables.number::<u32>("SLURM_PROCID")? else {
        return Ok(no_task);
    };
    // srun sets both; in the shell of a batch script SLURM_PROCID is 0 and the step is not set.
    if step.is_none() && rank.value == 0 {
        rank.origin.push_str(" without SLURM_STEP_ID, as in a batch script without srun");
    }
    let size = match variables.number::<u32>("SLURM_STEP_NUM_TASKS")? {
        Some(size) => Some(size),
        None => variables.number("SLURM_NTASKS")?,
    };
    let Some(size) = size else {
        if rank.value == 0 && step.is_none() {
            return Ok(no_task);
        }
        return Err(Error::request(
            format!("{} is set and neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS is", rank.origin),
            "start the ranks with srun, which sets them",
        ));
    };
    let list = variables.text("SLURM_STEP_NODELIST").or_else(|| variables.text("SLURM_JOB_NODELIST"));
    let list = match list {
        Some(list) => Some(Setting { value: hosts(&list.value, &list.origin)?, origin: list.origin }),
        None => None,
    };
    let local_rank = variables.count("SLURM_LOCALID")?;
    let tasks = match variables
        .text("SLURM_STEP_TASKS_PER_NODE")
        .or_else(|| variables.text("SLURM_TASKS_PER_NODE"))
    {
        Some(tasks) => tasks_per_host(&tasks.value, &tasks.origin)?,
        None => Vec::new(),
    };
    let tasks_here = variables.count("SLURM_NODEID")?.and_then(|host| tasks.get(host as usize).copied());
    let distribution = variables.text("SLURM_DISTRIBUTION").map(|setting| setting.value).unwrap_or_default();
    let distribution = distribution.split([':', ',']).next().unwrap_or_default();
    let mut hosts_of_ranks = match &list {
        Some(list) => hosts_of_tasks(&list.value, &tasks, size.value, distribution),
        None => Vec::new(),
    };
    // If the derived host of this task is wrong, those of the other tasks cannot be trusted either.
    let this_host = variables.text("SLURMD_NODENAME").map(|setting| setting.value);
    if this_host.is_some() && hosts_of_ranks.get(rank.value as usize) != Some(&this_host) {
        hosts_of_ranks.clear();
    }
    let job = variables.number::<u64>("SLURM_JOB_ID")?;
    let step = step.map_or(0, |step| step.value);
    let coordinator = match list.filter(|_| distribution != "arbitrary") {
        Some(list) => coordinator(&list, job.as_ref(), step),
        None => None,
    };
    let restarts = variables.text("SLURM_RESTART_COUNT").map_or("0".into(), |setting| setting.value);
    Ok(Source {
        local_size: tasks_here.or(variables.count("SLURM_NTASKS_PER_NODE")?).map(|tasks| tasks.max(1)),
        local_rank,
        coordinator,
        hosts: hosts_of_ranks,
        run_id: job.map(|job| format!("slurm {}.{step} {restarts}", job.value)),
        rank: Some(rank),
        size: Some(size),
        ..Source::default()
    })
}

fn coordinator(
    list: &Setting<Vec<String>>,
    job: Option<&Setting<u64>>,
    step: u64,
) -> Option<Setting<HostPort>> {
    let offset = job.map_or(0, |job| job.value.wrapping_add(step) % PORTS);
    let port = DEFAULT_PORT + u16::try_from(offset).ok()?;
    let address = HostPort::new(list.value.first()?, port)?;
    let by = job.map_or(String::new(), |job| format!(", port by {}", job.origin));
    Some(Setting::new(address, format!("first of {}{by}", list.origin)))
}

/// The host of each task, or nothing. The hosts are known if Slurm fills one host after the other
/// (block) or uses the hosts in turn (cyclic).
fn hosts_of_tasks(hosts: &[String], tasks: &[u32], size: u32, distribution: &str) -> Vec<Option<String>> {
    let total: u64 = tasks.iter().map(|tasks| u64::from(*tasks)).sum();
    // The environment may claim any number of tasks: memory is allocated for at most MAX_RANKS.
    if tasks.len() != hosts.len() || total != u64::from(size) || size > MAX_RANKS {
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

/// Step numbers from here on are the batch script, the external step and other special steps.
const FIRST_SPECIAL_STEP: u64 = 0xffff_fff0;

/// UDP ports for rank 0, from [`DEFAULT_PORT`] on.
const PORTS: u64 = 1000;

#[cfg(test)]
mod tests {
    use kyklos_transport::MAX_RANKS;

    use crate::test_support::{assign, brief};

    const STEP: &str = "SLURM_JOB_ID=4007 SLURM_STEP_ID=0 SLURM_NTASKS=5 SLURM_STEP_NUM_TASKS=5 SLURM_NODEID=1 \
        SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE=3,2";

    #[test]
    fn tasks_of_a_step_are_ranks_and_shells_are_not() {
        let step = |task: &str| format!("{STEP} {task}");
        for (options, variables, expected) in [
            ("", step("SLURM_PROCID=4 SLURM_LOCALID=1"), "4/5 1/2 n1:29607"),
            (
                "",
                step("SLURM_PROCID=4 SLURM_LOCALID=1 SLURM_DISTRIBUTION=arbitrary KYKLOS_COORDINATOR=x:1"),
                "4/5 1/2 x:1",
            ),
            (
                "",
                "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NTASKS_PER_NODE=1 SLURM_JOB_NODELIST=b,a".into(),
                "1/2 0/1 b:29600",
            ),
            ("coordinator=x:1", step("SLURM_PROCID=0 SLURM_LOCALID=0"), "0/5 0/2 x:1"),
            ("", step("SLURM_PROCID=0 SLURM_LOCALID=0 MASTER_ADDR=m MASTER_PORT=2"), "0/5 0/2 m:2"),
            // Shells of batch scripts and of salloc.
            ("", "SLURM_NTASKS=4 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=a".into(), "alone"),
            ("", "SLURM_PROCID=0 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=a".into(), "alone"),
            ("", "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=4294967291 SLURM_JOB_NODELIST=a".into(), "alone"),
        ] {
            assert_eq!(brief(assign(options, &variables).unwrap()), expected, "{options} | {variables}");
        }
    }

    #[test]
    fn hosts_of_tasks_follow_slurms_distribution_or_are_unknown() {
        let hosts = |rest: &str| assign("", &format!("{STEP} SLURM_PROCID=1 {rest}")).unwrap().unwrap().hosts;
        let of = |hosts: &str| hosts.split(' ').map(|host| Some(host.to_owned())).collect::<Vec<_>>();
        assert_eq!(hosts(""), of("n1 n1 n1 n2 n2"));
        assert_eq!(hosts("SLURM_DISTRIBUTION=block:cyclic"), of("n1 n1 n1 n2 n2"));
        assert_eq!(hosts("SLURM_DISTRIBUTION=cyclic SLURMD_NODENAME=n2"), of("n1 n2 n1 n2 n1"));
        assert_eq!(hosts("SLURM_DISTRIBUTION=plane=2"), []);
        assert_eq!(hosts("SLURMD_NODENAME=n2"), []);
    }

    #[test]
    fn more_tasks_than_can_be_ranks_are_refused_and_take_no_memory() {
        let hosts = |more: u32| {
            let (most, all) = (MAX_RANKS - 1, MAX_RANKS - 1 + more);
            let variables = format!(
                "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS={all} SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE={most},{more}"
            );
            assign("", &variables).map(|assignment| assignment.unwrap().hosts.len())
        };
        assert_eq!(hosts(1).unwrap(), MAX_RANKS as usize);
        assert!(hosts(2).unwrap_err().to_string().contains("at most 2048 ranks"));
    }

    #[test]
    fn a_restarted_job_is_another_run() {
        let run_id = |variables: &str| assign("", &format!("{STEP} {variables}")).unwrap().unwrap().run_id;
        let first = run_id("SLURM_PROCID=0");
        assert_eq!(first, run_id("SLURM_PROCID=1"));
        assert_ne!(first, run_id("SLURM_PROCID=0 SLURM_RESTART_COUNT=1"));
    }

    #[test]
    fn incomplete_steps_are_refused_by_their_variables() {
        for (variables, words) in [
            ("SLURM_PROCID=1", ["SLURM_PROCID=1", "SLURM_NTASKS"]),
            ("SLURM_PROCID=0 SLURM_STEP_ID=3", ["SLURM_PROCID=0", "SLURM_NTASKS"]),
            (
                "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_NODELIST=n[",
                ["SLURM_JOB_NODELIST=n[", "option coordinator"],
            ),
        ] {
            let error = assign("", variables).expect_err(variables);
            let text = error.to_string();
            assert!(error.is_request() && words.iter().all(|word| text.contains(word)), "{text}");
        }
    }
}
