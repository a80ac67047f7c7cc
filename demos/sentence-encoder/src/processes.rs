//! Starts the ranks of a group as processes of this host, as a launcher does.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use kyklos_launch::variables::{IDENTITY, JOB_ID};
use kyklos_transport::Rank;
use kyklos_transport::quic::{ClusterAuthority, JobId};

use crate::{Error, Result};

/// Time for the other processes to end by themselves when one has failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs this program `ranks` times with `arguments`, and waits for all of them. Each process finds its rank, the address of
/// rank 0 and its identity in its environment (`kyklos_launch` reads them). They write to the output of this process.
///
/// # Errors
/// [`Error::Processes`] if one of them fails, [`Error::Attention`], [`Error::System`].
pub fn run(ranks: u32, arguments: &[OsString]) -> Result<()> {
    let failed = |what: &str| Error::system(what.to_owned());
    let program = std::env::current_exe().map_err(failed("this program's own path"))?;
    let folder = tempfile::tempdir().map_err(failed("a temporary folder"))?;
    let job = JobId::random().map_err(kyklos::Error::from)?;
    let authority = ClusterAuthority::new(job).map_err(kyklos::Error::from)?;
    let port = kyklos_launch::free_port(Ipv4Addr::LOCALHOST.into())
        .map_err(failed("a free port of the loopback interface"))?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (cores / ranks as usize).max(1);

    let mut processes = Processes { running: Vec::new(), ended: Vec::new() };
    for rank in 0..ranks {
        let identity = folder.path().join(format!("rank-{rank}.pem"));
        let write = |path| authority.issue(Rank(rank))?.write_file(path);
        write(&identity).map_err(kyklos::Error::from)?;
        let mut command = Command::new(&program);
        command
            .args(arguments)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string())
            .env("MASTER_PORT", port.to_string())
            .env(JOB_ID, job.to_string())
            .env(IDENTITY, identity);
        // The processes share the cores.
        if std::env::var_os("RAYON_NUM_THREADS").is_none() {
            command.env("RAYON_NUM_THREADS", threads.to_string());
        }
        // Software Vulkan needs a private folder.
        if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
            command.env("XDG_RUNTIME_DIR", folder.path());
        }
        let child = command.spawn().map_err(Error::system(format!("the process of rank {rank}")))?;
        processes.running.push((rank, child));
    }
    processes.wait()
}

/// Processes by rank. Those that run are killed when this is dropped.
struct Processes {
    running: Vec<(u32, Child)>,
    ended: Vec<(u32, ExitStatus)>,
}

impl Processes {
    fn wait(mut self) -> Result<()> {
        let mut until: Option<Instant> = None;
        while !self.running.is_empty() {
            let mut still = Vec::new();
            for (rank, mut child) in self.running.drain(..) {
                match child.try_wait().map_err(Error::system(format!("the process of rank {rank}")))? {
                    Some(status) => self.ended.push((rank, status)),
                    None => still.push((rank, child)),
                }
            }
            self.running = still;
            if until.is_none() && self.ended.iter().any(|(_, status)| !status.success()) {
                until = Some(Instant::now() + PATIENCE);
            }
            if until.is_some_and(|until| Instant::now() > until) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut failures: Vec<String> = Vec::new();
        for (rank, status) in self.ended.iter().filter(|(_, status)| !status.success()) {
            failures.push(format!("rank {rank} ended with {status}"));
        }
        failures
            .extend(self.running.iter().map(|(rank, _)| format!("rank {rank} did not end and is killed")));
        let codes: Vec<i32> = self.ended.iter().filter_map(|(_, status)| status.code()).collect();
        match failures.is_empty() {
            true => Ok(()),
            // The first failure is the cause, the others follow from it.
            false => Err(Error::Processes { text: failures.join(", "), request: codes.contains(&2) }),
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (_, child) in &mut self.running {
            // One that has ended in the meantime cannot be killed, which is well.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
