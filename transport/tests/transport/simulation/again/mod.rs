//! Worlds in which ranks vanish, return and are cut off, and the survivors form a group again.

mod judge;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::quic::{QuicConfig, QuicTransport};
use kyklos_transport::{
    Abort, AbortCause, Group, Progress, Rank, Regroup, Tag, Transport, TransportError, Vote,
};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::simulation::identities::{JOB, MOST_RANKS, identity};
use crate::simulation::network::{Conditions, Cut, Network, address};
use crate::simulation::rng::Rng;

pub(crate) use judge::judge;

/// The contents of a world that a seed draws.
#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) ranks: u32,
    pub(crate) conditions: Conditions,
    pub(crate) everyone: bool,
    pub(crate) strikes: Vec<(Duration, Strike)>,
    /// Number of connections for messages between two ranks.
    pub(crate) lanes: u8,
    /// By rank, how long after the others it starts; a missing one starts at once.
    pub(crate) starts: Vec<Duration>,
}

#[derive(Clone, Debug)]
pub(crate) enum Strike {
    /// A host vanishes. Its rank may restart, and does not know the state of the group then.
    Crash { rank: u32, restarts: Option<Duration> },
    /// Some ranks are cut off from the others.
    Cut { side: Vec<u32>, one_way: bool, heals: Option<Duration> },
    /// Two ranks lose each other for good; both still reach the others.
    Link { a: u32, b: u32 },
    /// A rank reports its own failure, and joins the next group.
    Abort { rank: u32 },
}

/// The groups of a rank between its start and its crash or end.
#[derive(Clone, Debug)]
pub(crate) struct Life {
    pub(crate) rank: u32,
    pub(crate) life: u32,
    pub(crate) stays: Vec<Stay>,
    pub(crate) end: End,
    pub(crate) complaints: Vec<String>,
}

/// The time of a rank in one group.
#[derive(Clone, Debug)]
pub(crate) struct Stay {
    pub(crate) epoch: u32,
    pub(crate) members: Vec<Rank>,
    pub(crate) entered: Duration,
    pub(crate) left: Duration,
}

#[derive(Clone, Debug)]
pub(crate) enum End {
    Finished,
    /// No group formed, and why.
    Alone(TransportError),
    Never(String),
}

#[derive(Clone, Debug)]
pub(crate) struct Played {
    pub(crate) lives: Vec<Life>,
    /// When hosts vanished.
    pub(crate) crashed: BTreeMap<u32, Duration>,
    pub(crate) tasks_left: usize,
}

const OPERATIONS: u64 = 6;
const PATIENCE: Duration = Duration::from_secs(40);
/// How long a rank tries to join a group again.
const AGAIN: Duration = Duration::from_secs(60);
/// How long a group waits for returning ranks.
const WITHIN: Duration = Duration::from_secs(20);
const BYTES: usize = 20_000;
/// After this time no task of any group may remain. Connections that close during an outage need
/// long.
const AFTERMATH: Duration = Duration::from_secs(300);

impl World {
    pub(crate) fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed, 3);
        let ranks = rng.within(2..u64::from(MOST_RANKS) + 1) as u32;
        let latency = rng.micros(100..30_000);
        let conditions = Conditions {
            latency,
            jitter: rng.micros(0..latency.as_micros() as u64 + 1),
            loss_per_mille: if rng.per_mille(500) { 0 } else { rng.within(0..60) },
            reorder_per_mille: rng.within(0..60),
            duplicate_per_mille: rng.within(0..60),
            bytes_per_second: 10 << 20,
        };
        let everyone = rng.per_mille(400);
        let mut strikes = Vec::new();
        let mut cut = false;
        // Early enough that the group still works when the fault happens. Later faults follow soon after.
        let mut at = rng.millis(1200..4500);
        for _ in 0..rng.within(1..4) {
            let rank = rng.within(0..u64::from(ranks)) as u32;
            let strike = match rng.within(0..6) {
                0..=2 => Strike::Crash { rank, restarts: rng.per_mille(500).then(|| rng.millis(300..7000)) },
                3 | 4 if !cut => {
                    cut = true;
                    let mut side: Vec<u32> =
                        (0..ranks).filter(|&one| one == rank || rng.per_mille(300)).collect();
                    side.truncate(ranks as usize - 1);
                    let heals = rng.per_mille(600).then(|| rng.millis(500..20_000));
                    Strike::Cut { side, one_way: rng.per_mille(200), heals }
                }
                _ => Strike::Abort { rank },
            };
            strikes.push((at, strike));
            at += rng.millis(0..9000);
        }
        let lanes = [1, 1, 2][Rng::new(seed, 4).within(0..3) as usize];
        Self { seed, ranks, conditions, everyone, strikes, lanes, starts: Vec::new() }
    }
}

struct Stage {
    world: World,
    network: Arc<Network>,
    began: Instant,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    transports: BTreeMap<u32, Group>,
    crashed: BTreeMap<u32, Duration>,
    restarted: Vec<JoinHandle<Life>>,
}

/// Runs a world to its end, on this thread.
pub(crate) fn play(world: &World) -> Played {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(play_here(world.clone()))
}

async fn play_here(world: World) -> Played {
    let network = Network::new(world.seed, world.ranks, world.conditions);
    let pump = tokio::spawn(Arc::clone(&network).run());
    let stage = Arc::new(Stage { world, network, began: Instant::now(), inner: Mutex::default() });
    let ranks = stage.world.ranks;
    let lives: Vec<_> = (0..ranks).map(|rank| tokio::spawn(live(Arc::clone(&stage), rank, 0))).collect();
    let mut striking = Vec::new();
    for (at, strike) in stage.world.strikes.clone() {
        let stage = Arc::clone(&stage);
        striking.push(tokio::spawn(async move {
            sleep(at).await;
            stage.strike(strike).await;
        }));
    }
    let mut ended = Vec::new();
    for (rank, life) in (0..).zip(lives) {
        ended.push(end_of(life, rank, 0).await);
    }
    for strike in striking {
        let _ = timeout(4 * AGAIN, strike).await;
    }
    let restarted = std::mem::take(&mut stage.inner.lock().unwrap().restarted);
    for life in restarted {
        ended.push(end_of(life, u32::MAX, 1).await);
    }
    stage.inner.lock().unwrap().transports.clear();
    sleep(AFTERMATH).await;
    let tasks_left = tokio::runtime::Handle::current().metrics().num_alive_tasks() - 1;
    pump.abort();
    let crashed = stage.inner.lock().unwrap().crashed.clone();
    Played { lives: ended, crashed, tasks_left }
}

async fn end_of(life: JoinHandle<Life>, rank: u32, number: u32) -> Life {
    let never = |why: &str| Life {
        rank,
        life: number,
        stays: Vec::new(),
        end: End::Never(why.into()),
        complaints: Vec::new(),
    };
    match timeout(Duration::from_secs(1000), life).await {
        Ok(Ok(life)) => life,
        Ok(Err(_)) => never("its program has panicked"),
        Err(_) => never("its program did not end"),
    }
}

impl Stage {
    async fn strike(self: &Arc<Self>, strike: Strike) {
        match strike {
            Strike::Crash { rank, restarts } => {
                let at = self.began.elapsed();
                if self.inner.lock().unwrap().crashed.insert(rank, at).is_some() {
                    return;
                }
                self.network.crash(rank);
                if let Some(after) = restarts {
                    sleep(after).await;
                    let again = tokio::spawn(live(Arc::clone(self), rank, 1));
                    self.inner.lock().unwrap().restarted.push(again);
                }
            }
            Strike::Cut { side, one_way, heals } => {
                self.network.cut(Cut::around(&side, self.world.ranks, one_way));
                if let Some(after) = heals {
                    sleep(after).await;
                    self.network.heal();
                }
            }
            Strike::Link { a, b } => self.network.cut(Cut::between(a, b, false)),
            Strike::Abort { rank } => {
                let transport = self.inner.lock().unwrap().transports.get(&rank).cloned();
                if let Some(transport) = transport {
                    let (culprit, cause) =
                        (transport.rank(), AbortCause::Failed("a failure of its own".into()));
                    transport.abort(Abort { culprit, cause, progress: Progress { op: 9, step: 9 } });
                }
            }
        }
    }

    fn config(&self, rank: u32) -> QuicConfig {
        let mut config = QuicConfig::new(Rank(rank), self.world.ranks, JOB, address(0), identity(rank));
        config.bind = address(rank).ip();
        config.port = address(rank).port();
        config.link.lanes = self.world.lanes;
        config
    }
}

async fn live(stage: Arc<Stage>, rank: u32, life: u32) -> Life {
    let mut this = Life { rank, life, stays: Vec::new(), end: End::Finished, complaints: Vec::new() };
    let mut seed = [life as u8; 32];
    seed[..8].copy_from_slice(&stage.world.seed.to_le_bytes());
    seed[8] = rank as u8;
    let (config, sockets) = (stage.config(rank), stage.network.sockets(rank, stage.world.lanes));
    let who = if stage.world.everyone { Regroup::Everyone { within: WITHIN } } else { Regroup::Survivors };
    let formed = if life == 0 {
        let config = QuicConfig { connect_deadline: AGAIN, ..config };
        sleep(stage.world.starts.get(rank as usize).copied().unwrap_or_default()).await;
        QuicTransport::form_over_or_regroup(config, sockets, seed, who).await
    } else {
        QuicTransport::rejoin_over(QuicConfig { connect_deadline: AGAIN, ..config }, sockets, seed).await
    };
    let mut formed = match formed {
        Ok(formed) => formed,
        Err(error) => {
            this.end = End::Alone(error);
            return this;
        }
    };
    loop {
        let Group { transport, members, epoch } = formed;
        if life == 0 {
            stage.inner.lock().unwrap().transports.insert(rank, Arc::clone(&transport).into());
        }
        let entered = stage.began.elapsed();
        let done = work(&stage, &*transport, &members, epoch, &mut this.complaints).await;
        let left = stage.began.elapsed();
        this.stays.push(Stay { epoch, members, entered, left });
        stage.inner.lock().unwrap().transports.remove(&rank);
        match done {
            Ok(()) => {
                let _ = transport.close(PATIENCE).await;
                return this;
            }
            Err(TransportError::Aborted { .. }) => {}
            Err(error) => {
                let cause = AbortCause::Failed(error.to_string());
                transport.abort(Abort {
                    culprit: transport.rank(),
                    cause,
                    progress: Progress { op: 0, step: 0 },
                });
                // Rank 0 sends this rank's own abort request back.
                let _ = transport.agree(Vote::ready([0; 32]), PATIENCE).await;
            }
        }
        let asked = stage.began.elapsed();
        let again = transport.reform(who, AGAIN).await;
        drop(transport);
        if stage.began.elapsed() > asked + AGAIN + Duration::from_secs(3) {
            this.complaints
                .push(format!("formed a group again for longer than its deadline, from {asked:?} on"));
        }
        match again {
            Ok(again) => formed = again,
            Err(error) => {
                this.end = End::Alone(error);
                return this;
            }
        }
    }
}

/// A job: a few all-to-all operations whose bytes identify the sender and the group.
async fn work(
    stage: &Stage,
    transport: &dyn Transport,
    members: &[Rank],
    epoch: u32,
    complaints: &mut Vec<String>,
) -> Result<(), TransportError> {
    let (me, world) = (transport.rank().0, transport.size());
    if members.len() as u32 != world || !members.is_sorted() {
        complaints.push(format!("{members:?} are not the ranks of a world of {world}"));
    }
    let of = |op: u64, from: u32, to: u32| {
        let first = members[from as usize].0 as u8;
        let byte = (op as u8).wrapping_mul(37) ^ first.wrapping_mul(16) ^ to as u8 ^ (epoch as u8) << 4;
        Bytes::from(vec![byte; BYTES])
    };
    let mut rng = Rng::new(stage.world.seed, 100 + u64::from(epoch));
    for op in 0..OPERATIONS {
        let mut plan_hash = [op as u8; 32];
        plan_hash[0] = epoch as u8;
        let note = |rank: u32| of(op, rank, rank).slice(..1 + op as usize);
        let notes = transport.agree(Vote::Ready { plan_hash, note: note(me) }, PATIENCE).await?;
        if notes != (0..world).map(note).collect::<Vec<_>>() {
            complaints.push(format!("op {op} of epoch {epoch}: wrong notes"));
        }
        let others: Vec<u32> = (1..world).map(|step| (me + step) % world).collect();
        let tag = |from: u32, to: u32| Tag { op, message: from * 16 + to };
        let received: Vec<_> = others
            .iter()
            .map(|&from| transport.post_recv(Rank(from), tag(from, me), &[BYTES], PATIENCE))
            .collect();
        let sent: Vec<_> = others
            .iter()
            .map(|&to| transport.post_send(Rank(to), tag(me, to), vec![of(op, me, to)], PATIENCE))
            .collect();
        for (&from, received) in others.iter().zip(received) {
            if received.await? != [of(op, from, me)] {
                complaints.push(format!("op {op} of epoch {epoch}: wrong bytes from rank {from}"));
            }
        }
        for sent in sent {
            sent.await?;
        }
        sleep(rng.millis(100..1500)).await;
    }
    Ok(())
}
