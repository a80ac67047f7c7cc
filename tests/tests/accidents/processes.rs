//! Ranks as processes: start, orders, stop and kill.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kyklos_transport::Rank;
use kyklos_transport::quic::{ClusterAuthority, JobId};

use crate::free_address::free_address;
use crate::rank::{FOLDER, Link, MARK, Order, identity_file, result_file};
use crate::router::Router;
use crate::work::Work;

/// A process hangs if it prints nothing for this long.
const HANG: Duration = Duration::from_secs(90);

/// A rank's process, killed at the latest when it is dropped.
pub(crate) struct Process {
    child: Child,
    orders: ChildStdin,
    lines: Receiver<(Instant, String)>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a group ended for one rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    Done,
    Failed {
        at: Instant,
        culprit: Option<u32>,
        text: String,
    },
    /// The process has printed nothing for too long.
    Hang,
}

impl Process {
    fn start(folder: &std::path::Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank::runs_as_a_rank", "--ignored", "--nocapture"])
            .env(FOLDER, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (orders, said) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(said).lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix(MARK) {
                    let _ = sender.send((Instant::now(), line.to_owned()));
                }
            }
        });
        let process = Self { child, orders, lines };
        assert_eq!(process.next().map(|(_, line)| line).as_deref(), Some("ready"));
        process
    }

    fn next(&self) -> Option<(Instant, String)> {
        self.lines.recv_timeout(HANG).ok()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn tell(&mut self, line: &str) {
        // A killed process reads nothing.
        let _ = self.orders.write_all(format!("{line}\n").as_bytes());
    }

    /// Waits until the rank pauses at the ordered step. The error is what it printed instead, if
    /// anything.
    pub(crate) fn is_here(&self) -> Result<(), Option<String>> {
        match self.next().map(|(_, line)| line) {
            Some(line) if line == "here" => Ok(()),
            other => Err(other),
        }
    }

    /// `STOP` or `CONT`.
    pub(crate) fn signal(&self, name: &str) {
        let status =
            Command::new("kill").args([format!("-{name}"), self.pid().to_string()]).status().unwrap();
        assert!(status.success(), "kill -{name}");
        let asked = Instant::now();
        // The system stops a process when one of its threads takes the signal. On a busy machine others run
        // until then.
        while name == "STOP" && !self.is_stopped() && asked.elapsed() < HANG {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether all threads are stopped, where the system says so.
    fn is_stopped(&self) -> bool {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", self.pid())) else { return true };
        threads.flatten().all(|thread| {
            std::fs::read_to_string(thread.path().join("status"))
                .map_or(true, |status| status.lines().any(|line| line.starts_with("State:\tT")))
        })
    }

    /// SIGKILL: no destructor runs, and no closing packet is sent. Returns the time.
    pub(crate) fn kill(&mut self) -> Instant {
        let at = Instant::now();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        at
    }

    /// Waits for the end of the order.
    pub(crate) fn end(&self) -> End {
        let mut end = End::Hang;
        while let Some((at, line)) = self.next() {
            let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
            match word {
                "done" => end = End::Done,
                "failed" => {
                    let (culprit, text) = rest.split_once(' ').unwrap_or((rest, ""));
                    end = End::Failed { at, culprit: culprit.parse().ok(), text: text.to_owned() };
                }
                "idle" => return end,
                _ => {}
            }
        }
        End::Hang
    }
}

/// Processes that form one group after another, with identities of one job.
pub(crate) struct Group {
    /// By rank. In the next group a rank may be another process.
    pub(crate) ranks: Vec<Process>,
    pub(crate) epoch: u32,
    folder: tempfile::TempDir,
    /// Every rank has its own loopback address, if the system has several.
    apart: bool,
}

impl Group {
    pub(crate) fn new(ranks: u32, apart: bool) -> Self {
        let authority = ClusterAuthority::new(JobId::random().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        for rank in 0..ranks {
            let identity = authority.issue(Rank(rank)).unwrap();
            identity.write_file(&identity_file(folder.path(), rank)).unwrap();
        }
        let processes = (0..ranks).map(|_| Process::start(folder.path())).collect();
        Self { ranks: processes, epoch: 0, folder, apart }
    }

    pub(crate) fn address(&self, rank: u32) -> Ipv4Addr {
        if self.apart { Ipv4Addr::new(127, 0, 1, 1 + rank as u8) } else { Ipv4Addr::LOCALHOST }
    }

    /// Replaces a rank's process with a new one.
    pub(crate) fn restart(&mut self, rank: u32) {
        self.ranks[rank as usize] = Process::start(self.folder.path());
    }

    /// Orders the first ranks to form the next group and to work. One of them pauses before a step.
    pub(crate) fn order(&mut self, work: Work, pause: Option<(u32, usize)>) {
        let _ = self.order_behind(work, pause, Link::Lan, None);
    }

    /// The same as `order`, over links of a kind, with a router between rank 0 and one rank, which
    /// must be the last one: others would dial it at the router. Returns the address of rank 0.
    pub(crate) fn order_behind(
        &mut self,
        work: Work,
        pause: Option<(u32, usize)>,
        link: Link,
        behind: Option<u32>,
    ) -> (SocketAddr, Option<Router>) {
        self.epoch += 1;
        // Another port than before: a closed rank keeps its own for a short time, for its last packets.
        let coordinator = SocketAddr::from((self.address(0), free_address().port()));
        let router = behind.map(|_| Router::new(coordinator));
        for rank in 0..work.ranks() {
            let _ = std::fs::remove_file(result_file(self.folder.path(), rank));
            let order = Order {
                epoch: self.epoch,
                rank,
                coordinator: router
                    .as_ref()
                    .filter(|_| behind == Some(rank))
                    .map_or(coordinator, |it| it.address),
                bind: IpAddr::V4(self.address(rank)),
                pause: pause.and_then(|(who, step)| (who == rank).then_some(step)),
                link,
                work,
            };
            self.ranks[rank as usize].tell(&order.line());
        }
        (coordinator, router)
    }

    /// The bytes of a rank's result.
    pub(crate) fn result(&self, rank: u32) -> Vec<u8> {
        std::fs::read(result_file(self.folder.path(), rank)).unwrap_or_default()
    }

    /// Checks that all ranks of `work` succeed, with the right bytes.
    pub(crate) fn must_be_right(&self, work: Work, right: &[Vec<u8>]) {
        for rank in 0..work.ranks() {
            assert_eq!(self.ranks[rank as usize].end(), End::Done, "rank {rank} of {work:?}");
            assert!(self.result(rank) == right[rank as usize], "rank {rank} of {work:?} has other bytes");
        }
    }
}
