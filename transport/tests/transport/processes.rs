//! Ranks as separate processes, and what the survivors report when one is killed.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos_transport::quic::{
    Carrier, ClusterAuthority, Identity, JobId, LinkSettings, QuicConfig, QuicTransport, Subject,
};
use kyklos_transport::{AbortCause, Group, Progress, Rank, Tag, Transport, TransportError, Vote};
use pollster::block_on;

use crate::common::{free_address, over_quic};

/// Tells a copy of this test program that it runs as a rank: rank, world, coordinator, identity,
/// way, task.
const RANK: &str = "KYKLOS_TEST_RANK";

const LONG: Duration = Duration::from_secs(120);

over_every_carrier! {
    a_rank_whose_compute_thread_blocks_is_named_by_all_waiting_ranks
    a_slow_rank_that_makes_progress_is_not_stuck
    processes_exchange_and_leave_in_order
    survivors_of_a_killed_rank_name_it_within_seconds
}

/// The same between ranks that share memory.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod shared_memory {
    use super::Way;

    #[test]
    fn processes_exchange_and_leave_in_order() {
        super::processes_exchange_and_leave_in_order(Way::SharedMemory);
    }

    #[test]
    fn survivors_of_a_killed_rank_name_it_within_seconds() {
        super::survivors_of_a_killed_rank_name_it_within_seconds(Way::SharedMemory);
    }

    #[test]
    fn a_rank_in_another_process_namespace_shares_no_memory() {
        super::a_rank_in_another_process_namespace_shares_no_memory();
    }
}

/// How messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Over(Carrier),
    SharedMemory,
}

impl From<Carrier> for Way {
    fn from(carrier: Carrier) -> Self {
        Self::Over(carrier)
    }
}

impl Way {
    const ALL: [(Self, &str); 3] = [
        (Self::Over(Carrier::Udp), "udp"),
        (Self::Over(Carrier::Tcp), "tcp"),
        (Self::SharedMemory, "memory"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(way, _)| *way == self).unwrap().1
    }

    fn link(name: &str) -> LinkSettings {
        match Self::ALL.into_iter().find(|(_, known)| *known == name).unwrap().0 {
            Self::Over(carrier) => LinkSettings { carrier, ..over_quic() },
            Self::SharedMemory => LinkSettings::default(),
        }
    }
}

/// A rank's process, killed at the latest when the test ends.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Job {
    way: Way,
    size: u32,
    coordinator: SocketAddr,
    folder: tempfile::TempDir,
}

impl Job {
    fn new(way: impl Into<Way>, size: u32) -> Self {
        let authority = ClusterAuthority::new(JobId::random().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        for rank in 0..size {
            authority
                .issue(Rank(rank))
                .unwrap()
                .write_file(&folder.path().join(format!("{rank}.pem")))
                .unwrap();
        }
        Self { way: way.into(), size, coordinator: free_address(), folder }
    }

    fn start(&self, task: &str) -> Vec<Process> {
        (0..self.size).map(|rank| self.start_under(&[], rank, task)).collect()
    }

    /// Starts a rank by a command that runs the program in its last arguments.
    fn start_under(&self, by: &[&str], rank: u32, task: &str) -> Process {
        let identity = self.folder.path().join(format!("{rank}.pem"));
        let (size, coordinator, identity) = (self.size, self.coordinator, identity.display());
        let what = format!("{rank} {size} {coordinator} {identity} {} {task}", self.way.name());
        let log = std::fs::File::create(self.log(rank)).unwrap();
        let (_, module) = module_path!().split_once("::").expect("a module of the program");
        let test = format!("{module}::runs_as_a_rank");
        let program = std::env::current_exe().unwrap();
        let mut words = by.iter().map(std::ffi::OsStr::new).chain([program.as_os_str()]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(["--exact", &test, "--ignored", "--nocapture"]).env(RANK, what);
        Process(command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    }

    fn log(&self, rank: u32) -> std::path::PathBuf {
        self.folder.path().join(format!("{rank}.log"))
    }

    fn said(&self, rank: u32) -> String {
        std::fs::read_to_string(self.log(rank)).unwrap_or_default()
    }

    /// Waits until a rank's output contains `words`.
    fn wait_for(&self, rank: u32, words: &str) {
        let started = Instant::now();
        while !self.said(rank).contains(words) {
            assert!(started.elapsed() < LONG, "rank {rank} never said {words:?}:\n{}", self.said(rank));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn join(config: QuicConfig) -> Group {
    QuicTransport::connect(config).expect("the group forms")
}

/// Runs as a rank when another test started it; does nothing otherwise.
#[test]
#[ignore = "a rank of the other tests"]
fn runs_as_a_rank() {
    let Ok(what) = std::env::var(RANK) else { return };
    let [rank, size, coordinator, identity, way, task] = what.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{what}")
    };
    let identity = Identity::read_file(Path::new(identity)).unwrap();
    let claims = identity.claims().unwrap();
    let (rank, size): (u32, u32) = (rank.parse().unwrap(), size.parse().unwrap());
    assert_eq!(claims.subject, Subject::Rank(Rank(rank)));
    let mut config = QuicConfig::new(Rank(rank), size, claims.job, coordinator.parse().unwrap(), identity);
    config.link = Way::link(way);
    config.stuck_after = STUCK;
    config.warn = |text, _| println!("warning: {text}");
    let me = join(config);
    println!("joined");
    match task {
        "ring" => ring(&*me),
        "endless" => endless(&*me),
        "stuck" => computes(&*me, None),
        "slow" => computes(&*me, Some(2 * STUCK)),
        other => panic!("{other}"),
    }
}

/// Twenty ring hops; then each rank closes as soon as it is done.
fn ring(me: &dyn Transport) {
    let (rank, size) = (me.rank().0, me.size());
    block_on(me.agree(Vote::ready([1; 32]), LONG)).unwrap();
    let bytes = 1 << 20;
    for message in 0..20 {
        let tag = Tag { op: 0, message };
        let parts = vec![Bytes::from(vec![rank as u8; bytes])];
        let sent = me.post_send(Rank((rank + 1) % size), tag, parts, LONG);
        let before = (rank + size - 1) % size;
        let received = block_on(me.post_recv(Rank(before), tag, &[bytes], LONG)).unwrap();
        assert!(received[0].iter().all(|&byte| byte == before as u8));
        block_on(sent).unwrap();
    }
    println!("shared {} bytes", shared_bytes(me));
    block_on(me.close(LONG)).unwrap();
    println!("closed in order");
}

/// Payload bytes that a rank has received through shared memory.
fn shared_bytes(me: &dyn Transport) -> u64 {
    me.connections().iter().flatten().map(|figures| figures.shared_bytes_received).sum()
}

/// Ring hops until an error ends them.
fn endless(me: &dyn Transport) {
    let (rank, size) = (me.rank().0, me.size());
    let bytes = 8 << 20;
    let payload = Bytes::from(vec![rank as u8; bytes]);
    for message in 0.. {
        me.report_progress(Progress { op: 7, step: message + 1 });
        let tag = Tag { op: 7, message };
        let sent = me.post_send(Rank((rank + 1) % size), tag, vec![payload.clone()], LONG);
        let received = me.post_recv(Rank((rank + size - 1) % size), tag, &[bytes], LONG);
        let ended = block_on(received).map(drop).and(block_on(sent));
        match ended {
            Ok(_) if message == 10 => println!("under way, shared {} bytes", shared_bytes(me)),
            Ok(_) => {}
            Err(TransportError::Aborted { abort, pending }) => {
                assert!(matches!(abort.cause, AbortCause::Died(_)), "{abort}");
                assert!(abort.progress.step >= 1 || abort.culprit == Rank(0), "{abort}");
                println!("culprit {} pending {}", abort.culprit, pending.is_some());
                println!("{abort}");
                let later = block_on(me.agree(Vote::ready([1; 32]), LONG)).unwrap_err();
                assert!(matches!(later, TransportError::Aborted { .. }), "{later}");
                let _ = block_on(me.close(Duration::from_secs(2)));
                println!("survived");
                return;
            }
            Err(other) => panic!("{other}"),
        }
    }
}

/// Rank 1 computes before it sends to rank 2, which waits for it; rank 0 waits for rank 2. Rank 1
/// beats for a while, or computes forever without a beat.
fn computes(me: &dyn Transport, by: Option<Duration>) {
    let (rank, tag) = (me.rank().0, Tag { op: 7, message: 3 });
    me.report_progress(Progress { op: 7, step: 4 + rank });
    if rank == 1 {
        let pulse = me.pulse();
        let work = pulse.work();
        println!("computes");
        let started = Instant::now();
        while by.is_none_or(|by| started.elapsed() < by) {
            std::thread::sleep(Duration::from_millis(100));
            if by.is_some() {
                pulse.beat();
            }
        }
        drop(work);
    }
    let got = match rank {
        0 => block_on(me.post_recv(Rank(2), tag, &[3], LONG)).map(drop),
        1 => block_on(me.post_send(Rank(2), tag, vec!["hop".into()], LONG)).map(drop),
        _ => block_on(me.post_recv(Rank(1), tag, &[3], LONG))
            .and_then(|parts| block_on(me.post_send(Rank(0), tag, parts, LONG)).map(drop)),
    };
    match got {
        Ok(()) => block_on(me.close(LONG)).unwrap(),
        Err(error) => {
            println!("{error}");
            let _ = block_on(me.close(Duration::from_secs(2)));
        }
    }
    println!("through");
}

/// When a rank of these tests counts as stuck.
const STUCK: Duration = Duration::from_secs(2);

fn a_rank_whose_compute_thread_blocks_is_named_by_all_waiting_ranks(way: impl Into<Way>) {
    let job = Job::new(way, 3);
    let _ranks = job.start("stuck");
    job.wait_for(1, "computes");
    let started = Instant::now();
    for rank in [0, 2] {
        job.wait_for(rank, "through");
        let said = job.said(rank);
        for word in ["rank 1 is stuck: no progress for", "(operation 7, step 5)", "while rank 2 waited"] {
            assert!(said.contains(word), "no `{word}` in what rank {rank} said: {said}");
        }
    }
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
    assert!(job.said(0).contains("warning: rank 1 has made no progress for"), "{}", job.said(0));
}

fn a_slow_rank_that_makes_progress_is_not_stuck(way: impl Into<Way>) {
    let job = Job::new(way, 3);
    for (rank, mut process) in (0..).zip(job.start("slow")) {
        let status = process.0.wait().unwrap();
        let said = job.said(rank);
        assert!(status.success() && said.contains("through"), "rank {rank}: {said}");
        // A loaded machine may make it slow enough for a warning.
        assert!(!said.contains("stuck"), "rank {rank}: {said}");
    }
}

fn processes_exchange_and_leave_in_order(way: impl Into<Way>) {
    let way = way.into();
    let job = Job::new(way, 4);
    for (rank, mut process) in (0..).zip(job.start("ring")) {
        let status = process.0.wait().unwrap();
        let said = job.said(rank);
        assert!(status.success() && said.contains("closed in order"), "rank {rank}: {said}");
        let shared = if way == Way::SharedMemory { 20 << 20 } else { 0 };
        assert!(said.contains(&format!("shared {shared} bytes\n")), "rank {rank}: {said}");
    }
}

/// Such a rank is in another container. It has the same user and the same network.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn a_rank_in_another_process_namespace_shares_no_memory() {
    let by = ["unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child"];
    let may = Command::new(by[0]).args(&by[1..]).arg("true").stderr(Stdio::null()).status();
    if !may.is_ok_and(|status| status.success()) {
        eprintln!("not tested: this system makes no process namespace for this user");
        return;
    }
    for apart in [0, 1] {
        let job = Job::new(Way::SharedMemory, 2);
        let start = |rank| job.start_under(if rank == apart { &by } else { &[] }, rank, "ring");
        let ranks: Vec<Process> = (0..2).map(start).collect();
        for (rank, mut process) in (0..).zip(ranks) {
            let status = process.0.wait().unwrap();
            let said = job.said(rank);
            assert!(status.success() && said.contains("shared 0 bytes\n"), "rank {rank}: {said}");
        }
    }
}

fn survivors_of_a_killed_rank_name_it_within_seconds(way: impl Into<Way>) {
    let way = way.into();
    for victim in [2, 0] {
        let job = Job::new(way, 3);
        let mut ranks = job.start("endless");
        for rank in 0..3 {
            job.wait_for(rank, "under way");
            let shares = !job.said(rank).contains("shared 0 bytes");
            assert_eq!(shares, way == Way::SharedMemory, "rank {rank}: {}", job.said(rank));
        }
        // A rank's progress travels with its heartbeats. The coordinator hears several before the kill.
        std::thread::sleep(Duration::from_secs(1));
        // SIGKILL on unix: no destructor runs, and no closing packet is sent.
        ranks[victim as usize].0.kill().unwrap();
        let killed = Instant::now();
        let survivors: Vec<u32> = (0..3).filter(|&rank| rank != victim).collect();
        for &rank in &survivors {
            job.wait_for(rank, "culprit");
            let took = killed.elapsed();
            let said = job.said(rank);
            assert!(said.contains(&format!("culprit {victim} pending true")), "rank {rank}: {said}");
            assert!(took < LONG / 2, "rank {rank} took {took:?}");
            println!(
                "rank {rank} knew after {took:?}: {}",
                said.lines().find(|line| line.contains("died")).unwrap()
            );
        }
        for &rank in &survivors {
            let status = ranks[rank as usize].0.wait().unwrap();
            assert!(status.success() && job.said(rank).contains("survived"), "{}", job.said(rank));
            assert!(killed.elapsed() < LONG / 2, "{:?}", killed.elapsed());
        }
    }
}
