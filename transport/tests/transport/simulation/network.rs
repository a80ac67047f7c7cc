//! A network in memory. The seed decides which packets are late, duplicated, reordered or lost.
//!
//! It runs on tokio's paused clock, so a simulated second takes no real time. Its resolution is
//! tokio's millisecond.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::simulation::rng::Rng;

/// The behaviour of every link of a network.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions {
    pub(crate) latency: Duration,
    /// The largest extra delay. Each packet draws its own.
    pub(crate) jitter: Duration,
    pub(crate) loss_per_mille: u64,
    /// Whether later packets can overtake a delayed one.
    pub(crate) reorder_per_mille: u64,
    pub(crate) duplicate_per_mille: u64,
    /// Bandwidth of each direction between two hosts. A packet that would wait longer than
    /// [`LONGEST_QUEUE`] is dropped.
    pub(crate) bytes_per_second: u64,
}

/// The capacity of a router's queue, as a time.
const LONGEST_QUEUE: Duration = Duration::from_millis(250);

/// The capacity of a host's socket.
const INBOX_PACKETS: usize = 4096;

/// Largest UDP payload that a link carries.
const LARGEST_PACKET: usize = 1452;

/// Which directions are dead, as a set of (from, to) ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cut(Vec<(u32, u32)>);

impl Cut {
    /// Between the ranks of `side` and all other ranks. With `one_way` only packets that the ranks
    /// of `side` send are lost.
    pub(crate) fn around(side: &[u32], world: u32, one_way: bool) -> Self {
        let mut directions = Vec::new();
        for &inner in side {
            for outer in (0..world).filter(|rank| !side.contains(rank)) {
                directions.push((inner, outer));
                if !one_way {
                    directions.push((outer, inner));
                }
            }
        }
        Self(directions)
    }

    /// The same, but these directions live.
    pub(crate) fn without(mut self, alive: &[(u32, u32)]) -> Self {
        self.0.retain(|direction| !alive.contains(direction));
        self
    }

    pub(crate) fn between(a: u32, b: u32, one_way: bool) -> Self {
        Self(if one_way { vec![(a, b)] } else { vec![(a, b), (b, a)] })
    }
}

#[derive(Debug)]
pub(crate) struct Network {
    inner: Mutex<Inner>,
    /// Signals that the next delivery is earlier than before.
    sent: Notify,
}

#[derive(Debug)]
struct Inner {
    rng: Rng,
    conditions: Conditions,
    cut: Cut,
    hosts: Vec<Host>,
    links: BTreeMap<(u32, u32), LinkState>,
    /// Packets in flight, by arrival time. The number distinguishes packets that arrive at the same
    /// time.
    under_way: BTreeMap<(Instant, u64), Packet>,
    sent: u64,
    started: Instant,
    trace: Trace,
    dials: BTreeMap<(u32, u32), BTreeSet<Vec<u8>>>,
}

/// A hash over (time, from, to, length) of every delivered packet, and totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trace {
    pub(crate) hash: u64,
    pub(crate) packets: u64,
}

#[derive(Debug, Default)]
struct Host {
    /// Counts restarts. Sockets from before a restart neither send nor receive.
    life: u32,
    /// One queue for each lane.
    sockets: Vec<Mailbox>,
    crashed: bool,
    /// Bytes received, over all restarts.
    delivered: u64,
}

#[derive(Debug, Default)]
struct Mailbox {
    inbox: VecDeque<(Place, Vec<u8>)>,
    reader: Option<Waker>,
}

/// A rank and one of its lanes.
type Place = (u32, u16);

#[derive(Clone, Copy, Debug)]
struct LinkState {
    free_at: Instant,
    last_arrival: Instant,
}

#[derive(Debug)]
struct Packet {
    from: Place,
    to: Place,
    bytes: Vec<u8>,
}

/// The socket address of the first lane of a rank.
pub(crate) fn address(rank: u32) -> SocketAddr {
    lane_address((rank, 0))
}

fn lane_address((rank, lane): Place) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(10, 0, 0, rank as u8 + 1), FIRST_PORT + lane))
}

/// The rank and the lane at an address of this network.
fn place(address: SocketAddr) -> Option<Place> {
    let IpAddr::V4(ip) = address.ip() else { return None };
    let [10, 0, 0, host] = ip.octets() else { return None };
    Some((u32::from(host).checked_sub(1)?, address.port().wrapping_sub(FIRST_PORT)))
}

/// The port of the first lane. The other lanes use the next ports.
const FIRST_PORT: u16 = 7000;

impl Network {
    /// Must be called in a tokio context; the network uses its clock.
    pub(crate) fn new(seed: u64, world: u32, conditions: Conditions) -> Arc<Self> {
        let inner = Inner {
            rng: Rng::new(seed, 2),
            conditions,
            cut: Cut::default(),
            hosts: (0..world).map(|_| Host::default()).collect(),
            links: BTreeMap::new(),
            under_way: BTreeMap::new(),
            sent: 0,
            started: Instant::now(),
            trace: Trace::default(),
            dials: BTreeMap::new(),
        };
        Arc::new(Self { inner: Mutex::new(inner), sent: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sockets of a rank that starts or restarts.
    pub(crate) fn sockets(self: &Arc<Self>, rank: u32, lanes: u8) -> Vec<Arc<dyn AsyncUdpSocket>> {
        let mut inner = self.lock();
        let host = &mut inner.hosts[rank as usize];
        let sockets = (0..lanes).map(|_| Mailbox::default()).collect();
        *host = Host { life: host.life + 1, delivered: host.delivered, sockets, crashed: false };
        let life = host.life;
        let socket = |lane| Socket { network: Arc::clone(self), rank, lane, life };
        (0..u16::from(lanes)).map(|lane| -> Arc<dyn AsyncUdpSocket> { Arc::new(socket(lane)) }).collect()
    }

    /// Removes the host of a rank: no packet leaves it or reaches it until the rank restarts.
    pub(crate) fn crash(&self, rank: u32) {
        let host = &mut self.lock().hosts[rank as usize];
        host.crashed = true;
        host.sockets.iter_mut().for_each(|socket| socket.inbox.clear());
    }

    pub(crate) fn cut(&self, cut: Cut) {
        self.lock().cut = cut;
    }

    pub(crate) fn heal(&self) {
        self.lock().cut = Cut::default();
    }

    pub(crate) fn trace(&self) -> Trace {
        self.lock().trace
    }

    /// Bytes received by a rank's host.
    pub(crate) fn delivered_to(&self, rank: u32) -> u64 {
        self.lock().hosts[rank as usize].delivered
    }

    /// How many connections each rank (the first of a pair) has begun to each other rank.
    pub(crate) fn dials(&self) -> BTreeMap<(u32, u32), usize> {
        self.lock().dials.iter().map(|(&pair, ids)| (pair, ids.len())).collect()
    }

    /// Delivers packets at their times, as long as it is polled.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            let mut sent = std::pin::pin!(self.sent.notified());
            sent.as_mut().enable();
            let next = self.lock().deliver(Instant::now());
            match next {
                // Not `select!`, because it draws its own random numbers.
                Some(next) => {
                    let _ = tokio::time::timeout_at(next, sent).await;
                }
                None => sent.await,
            }
        }
    }
}

impl Inner {
    fn send(&mut self, from: Place, to: Place, bytes: &[u8]) {
        // Every packet draws the same number of random numbers, delivered or not.
        let Conditions { latency, jitter, .. } = self.conditions;
        let lost = self.rng.per_mille(self.conditions.loss_per_mille);
        let twice = self.rng.per_mille(self.conditions.duplicate_per_mille);
        let late = self.rng.per_mille(self.conditions.reorder_per_mille);
        let jitters = [0; 2].map(|_| self.rng.micros(0..jitter.as_micros() as u64 + 1));
        let now = Instant::now();
        // Lanes share the link between two hosts.
        let hosts = (from.0, to.0);
        self.count_dial(hosts, bytes);
        if self.cut.0.contains(&hosts) || bytes.len() > LARGEST_PACKET {
            return;
        }
        let link = self.links.entry(hosts).or_insert(LinkState { free_at: now, last_arrival: now });
        let free_at = link.free_at.max(now);
        if free_at - now > LONGEST_QUEUE {
            return;
        }
        let takes = bytes.len() as u64 * 1_000_000_000 / self.conditions.bytes_per_second;
        link.free_at = free_at + Duration::from_nanos(takes);
        if lost {
            return;
        }
        let arrival = link.free_at + latency + jitters[0];
        let arrival = if late {
            arrival + 2 * (latency + jitter)
        } else {
            link.last_arrival = arrival.max(link.last_arrival);
            link.last_arrival
        };
        let again = twice.then(|| arrival + jitters[1]);
        for arrival in [arrival].into_iter().chain(again) {
            self.sent += 1;
            self.under_way.insert((arrival, self.sent), Packet { from, to, bytes: bytes.to_vec() });
        }
    }

    /// A client's connection is known by the source id in its Initial packets, which stays. A
    /// server answers to that id.
    fn count_dial(&mut self, (from, to): (u32, u32), bytes: &[u8]) {
        // A long header of the type Initial, and version 1.
        let [0xc0..=0xcf, 0, 0, 0, 1, ids @ ..] = bytes else { return };
        let id = |rest: &[u8]| -> Option<(Vec<u8>, usize)> {
            let length = usize::from(*rest.first()?);
            Some((rest.get(1..1 + length)?.to_vec(), 1 + length))
        };
        let Some((destination, length)) = id(ids) else { return };
        let Some((source, _)) = id(&ids[length..]) else { return };
        let answers = self.dials.get(&(to, from)).is_some_and(|ids| ids.contains(&destination));
        if !answers {
            self.dials.entry((from, to)).or_default().insert(source);
        }
    }

    /// Delivers all packets that are due by `now`. Returns the time of the next packet.
    fn deliver(&mut self, now: Instant) -> Option<Instant> {
        loop {
            let entry = self.under_way.first_entry()?;
            if entry.key().0 > now {
                return Some(entry.key().0);
            }
            let Packet { from, to, bytes } = entry.remove();
            let host = &mut self.hosts[to.0 as usize];
            let Some(socket) = host.sockets.get_mut(usize::from(to.1)) else { continue };
            if host.crashed || socket.inbox.len() >= INBOX_PACKETS {
                continue;
            }
            let at = (now - self.started).as_micros() as u64;
            for word in [at, u64::from(from.0), u64::from(to.0), bytes.len() as u64] {
                self.trace.hash =
                    (self.trace.hash ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
            }
            self.trace.packets += 1;
            host.delivered += bytes.len() as u64;
            socket.inbox.push_back((from, bytes));
            if let Some(reader) = socket.reader.take() {
                reader.wake();
            }
        }
    }
}

/// One of a rank's sockets, for the time between two restarts.
#[derive(Debug)]
struct Socket {
    network: Arc<Network>,
    rank: u32,
    lane: u16,
    life: u32,
}

impl Socket {
    fn is_alive(&self, inner: &Inner) -> bool {
        let host = &inner.hosts[self.rank as usize];
        host.life == self.life && !host.crashed
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(AlwaysWritable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let mut inner = self.network.lock();
        if self.is_alive(&inner)
            && let Some((to, lane)) = place(transmit.destination)
            && (to as usize) < inner.hosts.len()
        {
            inner.send((self.rank, self.lane), (to, lane), transmit.contents);
            drop(inner);
            self.network.sent.notify_one();
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.network.lock();
        if !self.is_alive(&inner) {
            return Poll::Pending;
        }
        let socket = &mut inner.hosts[self.rank as usize].sockets[usize::from(self.lane)];
        let mut count = 0;
        for (buffer, meta) in buffers.iter_mut().zip(meta) {
            let Some((from, bytes)) = socket.inbox.pop_front() else { break };
            buffer[..bytes.len()].copy_from_slice(&bytes);
            let mut one = RecvMeta::default();
            (one.addr, one.len, one.stride) = (lane_address(from), bytes.len(), bytes.len());
            *meta = one;
            count += 1;
        }
        if count == 0 {
            socket.reader = Some(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Ok(count))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(lane_address((self.rank, self.lane)))
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

/// A full link drops packets; the sender does not wait.
#[derive(Debug)]
struct AlwaysWritable;

impl UdpPoller for AlwaysWritable {
    fn poll_writable(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
