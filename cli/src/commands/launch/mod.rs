//! `kyklos launch`: one process per rank on this host, with an identity for each that lasts as long
//! as the job.

mod ended;
mod job;
mod pass_on;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::num::NonZeroU32;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Args;
use kyklos_launch::variables::{JOB_ID, LAUNCH};
use kyklos_transport::Rank;
use kyklos_transport::quic::{ClusterAuthority, JobId};

use self::ended::Ended;
use self::job::Job;
use self::pass_on::pass_on;
use crate::activity;
use crate::failure::{Failure, Result, answer_with_error, has_answered, note, print_help};
use crate::group::identity_on_stdin;
use crate::interrupt;
use crate::options::OnLoss;

/// Number of processes and their command.
#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// Number of processes, one for each rank
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) ranks: NonZeroU32,
    /// `attend` or `bench strategies`, and its options
    #[arg(trailing_var_arg = true, required = true, value_name = "attend …")]
    pub(crate) command: Vec<String>,
}

/// Runs the command; returns the exit code. `program`: the command line of this program.
pub(crate) fn launch(args: &LaunchArgs, program: clap::Command) -> Result<u8> {
    let words = std::iter::once("kyklos").chain(args.command.iter().map(String::as_str));
    if let Err(help) = program.try_get_matches_from(words)
        && !help.use_stderr()
    {
        return print_help(&help).map(|()| 0);
    }
    let ranks = args.ranks.get();
    if ranks > MAX_RANKS {
        return Err(Failure::request(
            format!("{ranks} processes on one host"),
            format!("use at most {MAX_RANKS}"),
        ));
    }
    let mut job = Job::read(&args.command, ranks)?;
    activity::show();
    // The exit code of an interruption; 0 is none.
    let interrupted = Arc::new(AtomicU8::new(0));
    let raise = interrupted.clone();
    interrupt::on_interrupt(move |interruption| {
        raise.store(interruption.exit, Ordering::Relaxed);
        // If nobody reads what is passed on, the main thread may wait for that. Processes that are left
        // end with this one.
        std::thread::sleep(LAST_RESORT);
        interrupt::end(interruption.exit, None);
    })?;
    let asked = Arc::new(AtomicBool::new(false));
    let raise = asked.clone();
    interrupt::on_request(move || raise.store(true, Ordering::Relaxed))?;
    let mut command = args.command.clone();
    loop {
        let code = run_once(&command, ranks, job.on_loss(), (&interrupted, &asked))?;
        if interrupted.load(Ordering::Relaxed) != 0 || !job.goes_on(code)? {
            return Ok(code);
        }
        // Cells that have failed in this run do not run once more.
        command.retain(|word| word != "--retry");
    }
}

/// Starts all processes and waits for their end; returns the exit code.
fn run_once(
    command: &[String],
    ranks: u32,
    on_loss: OnLoss,
    (interrupted, asked): (&AtomicU8, &AtomicBool),
) -> Result<u8> {
    let job = JobId::random()?;
    let authority = ClusterAuthority::new(job)?;
    let port = kyklos_launch::free_port(Ipv4Addr::LOCALHOST.into())
        .map_err(|error| Failure::run(format!("cannot find a free port on loopback: {error}")))?;
    let program = std::env::current_exe()
        .map_err(|error| Failure::run(format!("cannot find this program again: {error}")))?;
    // In memory only: whatever ends this process, no key stays on a disk.
    let identities = (0..ranks)
        .map(|rank| Ok(identity_on_stdin(&authority.issue(Rank(rank))?)))
        .collect::<Result<Vec<Vec<u8>>>>()?;
    let start = |rank: u32, again: bool| {
        let mut child = Command::new(&program)
            .args(command)
            .args(again.then_some("--rejoin"))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string())
            .env("MASTER_PORT", port.to_string())
            .env(JOB_ID, job.to_string())
            .env(LAUNCH, "1")
            .envs(activity::is_shown().then_some((activity::TELLS, "1")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::run(format!("cannot start rank {rank}: {error}")))?;
        if let Some(stdin) = &mut child.stdin {
            // Shorter than the buffer of a pipe, so this does not block. A process that has ended has said
            // why.
            let _ = stdin.write_all(&identities[rank as usize]);
        }
        Ok(child)
    };
    activity::doing("starting the ranks");
    let mut children = Children::default();
    for rank in 0..ranks {
        children.take(rank, start(rank, false)?);
    }
    Ok(children.watch(interrupted, asked, on_loss, &start))
}

/// The processes of the job. Dropping them ends them.
#[derive(Debug, Default)]
struct Children {
    running: Vec<Running>,
    ended: Vec<Ended>,
    /// By rank, the number of restarts.
    restarts: BTreeMap<u32, u32>,
    readers: Vec<JoinHandle<bool>>,
}

#[derive(Debug)]
struct Running {
    rank: u32,
    child: Child,
    /// Standard input of the process: its identity came through it, it ends when this closes, and
    /// writes its record when a byte arrives.
    lifeline: Option<ChildStdin>,
    /// Passes its standard error on; returns whether it has said that it ends. None on Unix.
    notes: Option<JoinHandle<bool>>,
}

impl Children {
    fn take(&mut self, rank: u32, mut child: Child) {
        if let Some(stdout) = child.stdout.take() {
            self.readers.push(std::thread::spawn(move || {
                pass_on(rank, stdout, io::stdout(), |_| {
                    has_answered();
                    String::new()
                })
            }));
        }
        let mut notes = child.stderr.take().map(|stderr| {
            let prefix = move |line: &[u8]| match line {
                [b'{', ..] => String::new(),
                _ => format!("[{rank}] "),
            };
            std::thread::spawn(move || {
                let last = pass_on(rank, stderr, io::stderr(), prefix);
                activity::process_says(rank, "");
                last
            })
        });
        // On Unix the status says how a process has ended.
        if cfg!(unix) {
            self.readers.extend(notes.take());
        }
        self.running.push(Running { rank, lifeline: child.stdin.take(), child, notes });
    }

    /// Waits for all processes. When one fails, the others end within [`SURVIVORS`], or continue
    /// without it, or it is started again, by the policy. When one ends well, all ranks have
    /// delivered, and the others end within [`SURVIVORS`] under every policy; so they do when
    /// some have failed and the others are stopped (SIGSTOP), which makes no group.
    fn watch(
        &mut self,
        interrupted: &AtomicU8,
        asked: &AtomicBool,
        on_loss: OnLoss,
        start: &dyn Fn(u32, bool) -> Result<Child>,
    ) -> u8 {
        let mut patience: Option<Instant> = None;
        let mut asked_to_end = None;
        while !self.running.is_empty() {
            self.reap();
            if asked.swap(false, Ordering::Relaxed) {
                self.ask_for_records();
            }
            let interruption = interrupted.load(Ordering::Relaxed);
            if interruption != 0 && asked_to_end.is_none() {
                asked_to_end = Some(interruption);
                patience = Some(Instant::now() + INTERRUPTED);
                self.running.iter_mut().for_each(|running| running.lifeline = None);
            }
            if on_loss == OnLoss::Rejoin && asked_to_end.is_none() {
                self.start_anew(start);
            }
            let failed = self.ended.iter().any(|ended| !ended.is_well());
            let delivered = self.ended.iter().any(Ended::is_well);
            let over = delivered || (failed && (on_loss == OnLoss::Stop || self.all_are_stopped()));
            if over && patience.is_none() {
                patience = Some(Instant::now() + SURVIVORS);
            }
            if patience.is_some_and(|until| Instant::now() >= until) {
                let late: Vec<u32> = self.running.iter().map(|running| running.rank).collect();
                // First, as a note waits for a terminal that takes none.
                self.end_all();
                for rank in late {
                    note(&format!("launch: rank {rank} did not end within the time limit and is killed"));
                }
                break;
            }
            std::thread::sleep(POLL);
        }
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        self.ended.sort_by_key(|ended| ended.rank);
        for ended in &self.ended {
            let told = ended.has_code(2);
            if asked_to_end.is_none() && !ended.is_well() && !told {
                note(&format!("launch: {ended}"));
            }
        }
        let code = self.exit_code(asked_to_end, on_loss);
        // Rank 0 has answered, unless it was killed.
        if let (1 | 2, Some(first)) = (code, self.ended.iter().find(|ended| !ended.is_well())) {
            answer_with_error(&first.to_string(), code);
        }
        code
    }

    /// The exit code of the job.
    fn exit_code(&self, asked_to_end: Option<u8>, on_loss: OnLoss) -> u8 {
        if let Some(interruption) = asked_to_end {
            interruption
        } else if self.ended.iter().all(Ended::is_well)
            || (on_loss != OnLoss::Stop && self.ended.iter().any(Ended::is_well))
        {
            // A process ends well only when the result is complete.
            0
        } else if self.ended.iter().all(|ended| ended.has_code(2)) {
            2
        } else {
            1
        }
    }

    /// Starts killed processes again, while there are others to join. A process that ended by
    /// itself has a reason and is not started again.
    fn start_anew(&mut self, start: &dyn Fn(u32, bool) -> Result<Child>) {
        let killed: Vec<u32> =
            self.ended.iter().filter(|ended| ended.is_killed()).map(|ended| ended.rank).collect();
        for rank in killed {
            let restarts = self.restarts.entry(rank).or_default();
            let others_are_done = self.ended.iter().any(Ended::is_well);
            if self.running.is_empty() || others_are_done || *restarts >= MOST_RESTARTS {
                continue;
            }
            *restarts += 1;
            match start(rank, true) {
                Ok(child) => {
                    note(&format!("launch: rank {rank} was killed and is started again"));
                    self.ended.retain(|ended| ended.rank != rank);
                    self.take(rank, child);
                }
                Err(failure) => note(&format!("launch: {}", failure.text)),
            }
        }
    }

    /// Asks each process for its record, as SIGUSR1 does.
    fn ask_for_records(&mut self) {
        for lifeline in self.running.iter_mut().filter_map(|running| running.lifeline.as_mut()) {
            // Errors are ignored: the process may have ended. A pipe takes thousands of bytes before it
            // blocks.
            let _ = lifeline.write_all(b"r");
        }
    }

    fn reap(&mut self) {
        let ended = &mut self.ended;
        self.running.retain_mut(|running| match running.child.try_wait() {
            // Its last line may still be on its way.
            Ok(Some(status)) if running.notes.as_ref().is_none_or(JoinHandle::is_finished) => {
                ended.push(running.ended(status));
                false
            }
            _ => true,
        });
    }

    /// Whether no process runs on, because each has got a SIGSTOP. Only Linux says so in a file.
    fn all_are_stopped(&self) -> bool {
        self.running.iter().all(|running| {
            let stat =
                std::fs::read_to_string(format!("/proc/{}/stat", running.child.id())).unwrap_or_default();
            // The state follows the name, which may contain anything.
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
        })
    }

    fn end_all(&mut self) {
        for running in &mut self.running {
            let _ = running.child.kill();
        }
        for mut running in self.running.drain(..) {
            if let Ok(status) = running.child.wait() {
                self.ended.push(running.ended(status));
            }
        }
    }
}

impl Running {
    fn ended(&mut self, status: ExitStatus) -> Ended {
        let said_so = self.notes.take().is_some_and(|notes| notes.join().unwrap_or(false));
        Ended { rank: self.rank, status, said_so }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.end_all();
    }
}

/// Time for the other processes to end by themselves after a failure, or after the result is
/// complete.
const SURVIVORS: Duration = Duration::from_secs(30);
/// Time for all processes to end after an interruption.
const INTERRUPTED: Duration = Duration::from_secs(3);
/// Longest time from an interruption to the end of this process. Longer than [`INTERRUPTED`] and
/// the reaping of killed ranks after it.
const LAST_RESORT: Duration = Duration::from_secs(15);
/// Most restarts of one rank.
const MOST_RESTARTS: u32 = 3;
/// Interval between checks of the processes.
const POLL: Duration = Duration::from_millis(20);
/// Most processes on one host.
const MAX_RANKS: u32 = 256;
