//! Runs a world: its network, its ranks' transports, and the moment of its fault.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use kyklos_transport::{Abort, AbortCause, Group, Progress, Rank};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::simulation::network::{Cut, Network, Trace};
use crate::simulation::program::{Log, Sabotage, run};
use crate::simulation::world::{Boundary, Fault, FaultKind, When, World};

/// The result of a world.
#[derive(Clone, Debug)]
pub(crate) struct Played {
    pub(crate) logs: Vec<Log>,
    /// When the fault happened, if it did.
    pub(crate) struck: Option<Duration>,
    pub(crate) ended: Duration,
    /// Number of tasks that still ran after every rank had ended.
    pub(crate) tasks_left: usize,
    pub(crate) panics: u32,
    pub(crate) trace: Trace,
}

/// Extra faults that the world does not describe, for tests of the judge.
#[derive(Clone, Debug, Default)]
pub(crate) struct Secret {
    pub(crate) sabotage: Option<(u32, Sabotage)>,
    /// One or two dead directions, from this time on.
    pub(crate) cut: Option<(Duration, Cut)>,
}

#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) world: World,
    pub(crate) network: Arc<Network>,
    began: Instant,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// By slot. A rank has one slot for its first start and one for each restart.
    transports: BTreeMap<usize, Group>,
    struck: Option<Duration>,
    /// A restarted rank.
    restarted: Option<JoinHandle<Log>>,
    healer: Option<JoinHandle<()>>,
}

thread_local! {
    static PANICS: Cell<u32> = const { Cell::new(0) };
}

/// Runs a world to its end, on this thread.
pub(crate) fn play(world: &World, secret: &Secret) -> Played {
    static COUNT_PANICS: Once = Once::new();
    COUNT_PANICS.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // tokio catches a panic of a task, so this hook counts it.
            PANICS.set(PANICS.get() + 1);
            print(info);
        }));
    });
    PANICS.set(0);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(play_here(world.clone(), secret.clone()))
}

async fn play_here(world: World, secret: Secret) -> Played {
    let network = Network::new(world.seed, world.ranks, world.conditions);
    let pump = tokio::spawn(Arc::clone(&network).run());
    let began = Instant::now();
    let stage = Arc::new(Stage { world, network, began, inner: Mutex::default() });
    let clock = tokio::spawn(Arc::clone(&stage).strike_in_time());
    let cutter = tokio::spawn({
        let (cut, network) = (secret.cut, Arc::clone(&stage.network));
        async move {
            let Some((after, cut)) = cut else { return };
            sleep(after).await;
            network.cut(cut);
        }
    });
    let programs: Vec<JoinHandle<Log>> = (0..stage.world.ranks)
        .map(|rank| {
            let stage = Arc::clone(&stage);
            let sabotage = secret.sabotage.filter(|&(who, _)| who == rank).map(|(_, what)| what);
            tokio::spawn(async move {
                sleep(stage.world.starts[rank as usize]).await;
                run(stage, rank, 0, sabotage).await
            })
        })
        .collect();
    let mut logs = Vec::new();
    for (rank, program) in programs.into_iter().enumerate() {
        logs.push(ended(program, rank as u32, 0).await);
    }
    let restarted = stage.lock().restarted.take();
    if let Some(program) = restarted {
        let rank = stage.world.fault.as_ref().map_or(0, |fault| fault.kind.rank());
        logs.push(ended(program, rank, 1).await);
    }
    let healer = stage.lock().healer.take();
    for timer in [Some(clock), Some(cutter), healer].into_iter().flatten() {
        timer.abort();
    }
    let ended = stage.now();
    // The last packets, and connections whose peer no longer answers.
    sleep(AFTERMATH).await;
    let tasks_left = tokio::runtime::Handle::current().metrics().num_alive_tasks() - 1;
    pump.abort();
    let struck = stage.lock().struck;
    Played { logs, struck, ended, tasks_left, panics: PANICS.get(), trace: stage.network.trace() }
}

async fn ended(program: JoinHandle<Log>, rank: u32, life: u32) -> Log {
    let nothing = |complaint: &str| Log { rank, life, calls: Vec::new(), complaints: vec![complaint.into()] };
    match timeout(FOR_EVER, program).await {
        Ok(Ok(log)) => log,
        Ok(Err(_)) => nothing("its program has panicked"),
        Err(_) => nothing("its program did not end"),
    }
}

/// Upper limit for the time of a program.
const FOR_EVER: Duration = Duration::from_secs(1000);

/// After this time nothing of a group may remain. quinn drains a connection for three probe
/// timeouts, and an outage extends that to half a minute.
const AFTERMATH: Duration = Duration::from_secs(120);

impl Stage {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn transport(&self, slot: usize) -> Option<Group> {
        self.lock().transports.get(&slot).cloned()
    }

    pub(crate) fn formed(&self, slot: usize, transport: Group) {
        self.lock().transports.insert(slot, transport);
    }

    pub(crate) fn let_go(&self, slot: usize) {
        let transport = self.lock().transports.remove(&slot);
        drop(transport);
    }

    /// A rank has reached a place of its program.
    pub(crate) fn reached(self: &Arc<Self>, rank: u32, here: Boundary) {
        if let Some(Fault { kind, when: When::Boundary(there) }) = &self.world.fault
            && kind.rank() == rank
            && *there == here
            && !matches!(kind, FaultKind::Refuse { .. } | FaultKind::Slow { .. } | FaultKind::Computes { .. })
        {
            self.strike();
        }
    }

    /// The fault, if it has this kind and belongs to this rank's program in this operation.
    pub(crate) fn fault_here(
        &self,
        rank: u32,
        op: u64,
        is: impl Fn(&FaultKind) -> bool,
    ) -> Option<FaultKind> {
        let Some(Fault { kind, when: When::Boundary(there) }) = &self.world.fault else { return None };
        (kind.rank() == rank && there.op == op && is(kind)).then(|| kind.clone())
    }

    async fn strike_in_time(self: Arc<Self>) {
        if let Some(Fault { when: When::At(at), .. }) = &self.world.fault {
            sleep(*at).await;
            self.strike();
        }
    }

    /// Applies the fault, unless it has already happened or its rank is gone.
    pub(crate) fn strike(self: &Arc<Self>) {
        let Some(Fault { kind, .. }) = &self.world.fault else { return };
        let transport = self.transport(kind.rank() as usize);
        if self.lock().struck.is_some() {
            return;
        }
        match *kind {
            FaultKind::Dropped { .. } | FaultKind::Abort { .. } if transport.is_none() => return,
            FaultKind::Crash { rank, .. } if self.now() < self.world.starts[rank as usize] => return,
            FaultKind::Dropped { rank } => self.let_go(rank as usize),
            FaultKind::Abort { rank } => {
                let cause = AbortCause::Failed(FAILURE.into());
                let progress = Progress { op: 77, step: 7 };
                if let Some(transport) = &transport {
                    transport.abort(Abort { culprit: Rank(rank), cause, progress });
                }
            }
            FaultKind::Crash { rank, restarts } => {
                self.network.crash(rank);
                if let Some(after) = restarts {
                    let stage = Arc::clone(self);
                    let again = tokio::spawn(async move {
                        sleep(after).await;
                        run(stage, rank, 1, None).await
                    });
                    self.lock().restarted = Some(again);
                }
            }
            FaultKind::Partition { .. } | FaultKind::Link { .. } => {
                let Some((cut, heals)) = kind.cut(self.world.ranks) else { return };
                self.network.cut(cut);
                if let Some(after) = heals {
                    let network = Arc::clone(&self.network);
                    let healer = tokio::spawn(async move {
                        sleep(after).await;
                        network.heal();
                    });
                    self.lock().healer = Some(healer);
                }
            }
            FaultKind::Refuse { .. } | FaultKind::Slow { .. } | FaultKind::Computes { .. } => {}
        }
        self.lock().struck = Some(self.began.elapsed());
    }
}

/// The error text of a rank that aborts.
pub(crate) const FAILURE: &str = "a failure of its own";
