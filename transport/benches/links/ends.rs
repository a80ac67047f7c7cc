//! Both ends of a transfer.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos_transport::quic::{ClusterAuthority, Identity, JobId, QuicConfig, QuicTransport};
use kyklos_transport::{Group, Posted, Rank, RefusalReason, Tag, Taken, Transport, Vote};
use pollster::block_on;

use crate::streams;
use crate::{Kind, Mode};

/// The cost of a transfer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ended {
    /// Bytes moved, in all directions.
    pub(crate) mib: f64,
    pub(crate) seconds: f64,
    pub(crate) cpu_sending_s: f64,
    pub(crate) cpu_receiving_s: f64,
    pub(crate) pings_ms: Vec<f64>,
    pub(crate) packets_lost: Option<u64>,
}

impl Ended {
    pub(crate) fn mib_per_s(&self) -> f64 {
        self.mib / self.seconds
    }

    pub(crate) fn cpu_s_per_gib(&self) -> f64 {
        (self.cpu_sending_s + self.cpu_receiving_s) * 1024.0 / self.mib
    }

    /// The quantile of the pings: this share of all pings is faster.
    pub(crate) fn ping_ms(&self, share: f64) -> Option<f64> {
        let mut pings = self.pings_ms.clone();
        pings.sort_by(f64::total_cmp);
        pings.get((pings.len() as f64 * share) as usize).copied()
    }
}

/// Bytes of one message: a common size of a hop of keys and values.
pub(crate) const MESSAGE_BYTES: usize = 16 << 20;

/// User and system time of this process, all threads.
pub(crate) fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields[at].parse::<f64>().expect("a number");
    (ticks(11) + ticks(12)) / 100.0
}

const LONG: Duration = Duration::from_secs(120);

/// Identities for two ranks of a new job. Returns the identity of rank 1.
pub(crate) fn issue(folder: &Path) -> Identity {
    let authority = ClusterAuthority::new(JobId::random().expect("random numbers")).expect("an authority");
    let identity = |rank| authority.issue(Rank(rank)).expect("an identity");
    identity(0).write_file(&folder.join("rank-0.pem")).expect("a file");
    identity(1)
}

/// The receiving end: prints its certificate (for TLS), receives, and prints its CPU seconds.
pub(crate) fn serve(arguments: &[String]) {
    let [mode, address, mib, identity] = arguments else { panic!("{arguments:?}") };
    let (mode, mib) = (Mode::parse(mode), mib.parse().expect("a number"));
    let address: SocketAddr = address.parse().expect("an address");
    let cpu_s = match mode.kind {
        Kind::Tcp => streams::receive(address, mib, None),
        Kind::Tls => streams::receive(address, mib, Some(streams::Server::new())),
        Kind::Quic(_) => {
            say("");
            let identity = Identity::read_file(Path::new(identity)).expect("an identity");
            let me = connect(&mode, Rank(0), address, address.ip(), identity);
            let (ended, _) = transfer(&*me, &mode, mib);
            ended.cpu_sending_s
        }
    };
    say(&cpu_s.to_string());
}

pub(crate) fn say(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

/// The sending end.
pub(crate) fn dial(
    mode: &Mode,
    (here, there, port): (IpAddr, IpAddr, u16),
    mib: usize,
    certificate: &str,
    identity: &Identity,
) -> Ended {
    let address = SocketAddr::new(there, port);
    match mode.kind {
        Kind::Tcp => streams::send(address, mib, None),
        Kind::Tls => streams::send(address, mib, Some(certificate)),
        Kind::Quic(_) => {
            let me = connect(mode, Rank(1), address, here, identity.clone());
            let (mut ended, lost) = transfer(&*me, mode, mib);
            ended.packets_lost = Some(lost);
            ended
        }
    }
}

fn connect(mode: &Mode, rank: Rank, coordinator: SocketAddr, bind: IpAddr, identity: Identity) -> Group {
    let job = identity.claims().expect("claims").job;
    let mut config = QuicConfig::new(rank, 2, job, coordinator, identity);
    config.bind = bind;
    if let Kind::Quic(link) = mode.kind {
        config.link = link;
    }
    QuicTransport::connect(config).expect("a group of two")
}

fn agree(me: &dyn Transport) -> Posted<Vec<Bytes>> {
    me.agree(Vote::ready([0; 32]), LONG)
}

/// Rank 1 sends to rank 0. If the mode is a hop, rank 0 sends as much to rank 1. Returns the
/// measurements of this end, and the number of lost packets.
fn transfer(me: &dyn Transport, mode: &Mode, mib: usize) -> (Ended, u64) {
    let (rank, peer) = (me.rank(), Rank(1 - me.rank().0));
    let (sends, receives) = (rank == Rank(1) || mode.hop, rank == Rank(0) || mode.hop);
    let messages = u32::try_from((mib << 20) / MESSAGE_BYTES).expect("fewer");
    let payload = Bytes::from(vec![1; MESSAGE_BYTES]);
    block_on(agree(me)).expect("a start");
    let (before, started) = (cpu_s(), Instant::now());
    let done = AtomicBool::new(false);
    let mut ended = Ended::default();
    std::thread::scope(|scope| {
        let pinging = mode.ping.then(|| scope.spawn(|| ping(me, &done)));
        let mut under_way: Vec<UnderWay> = Vec::new();
        for message in 0..messages {
            let tag = Tag { op: 0, message };
            let received = receives.then(|| me.post_recv(peer, tag, &[MESSAGE_BYTES], LONG));
            let sent = sends.then(|| me.post_send(peer, tag, vec![payload.clone()], LONG));
            under_way.push((sent, received));
            if under_way.len() == 2 {
                end(under_way.remove(0));
            }
        }
        under_way.into_iter().for_each(end);
        done.store(true, Ordering::Relaxed);
        if let Some(pinging) = pinging {
            ended.pings_ms = pinging.join().expect("pings");
        }
    });
    block_on(agree(me)).expect("an end");
    ended.seconds = started.elapsed().as_secs_f64();
    ended.cpu_sending_s = cpu_s() - before;
    ended.mib = mib as f64 * if mode.hop { 2.0 } else { 1.0 };
    let lost = me.connections()[peer.0 as usize].map_or(0, |figures| figures.packets_lost);
    block_on(me.close(LONG)).expect("a goodbye");
    (ended, lost)
}

/// A send and a receive, if this end does both.
type UnderWay = (Option<Posted<Taken>>, Option<Posted<Vec<Bytes>>>);

fn end((sent, received): UnderWay) {
    if let Some(received) = received {
        block_on(received).expect("a message");
    }
    if let Some(sent) = sent {
        block_on(sent).expect("a message");
    }
}

/// Agreements, one after the other. Rank 0 always votes early. So rank 1 waits until its own vote
/// has reached rank 0 and the verdict has come back. Ends when both ranks are done: a rank that is
/// done refuses, and this refusal is the last agreement.
fn ping(me: &dyn Transport, done: &AtomicBool) -> Vec<f64> {
    let mut pings = Vec::new();
    let is_first = me.rank() == Rank(0);
    loop {
        if !is_first {
            std::thread::sleep(Duration::from_millis(5));
        }
        let over = !is_first && done.load(Ordering::Relaxed);
        let vote = match over {
            true => Vote::Refuse { reason: RefusalReason::Other(0), text: "over".into() },
            false => Vote::ready([0; 32]),
        };
        let started = Instant::now();
        if block_on(me.agree(vote, LONG)).is_err() {
            return pings;
        }
        pings.push(started.elapsed().as_secs_f64() * 1e3);
    }
}
