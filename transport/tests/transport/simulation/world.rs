//! The contents of a world that a seed draws: a network, a job, and in some worlds a fault.

use std::time::Duration;

use kyklos_transport::quic::LinkProfile;

use crate::simulation::identities::MOST_RANKS;
use crate::simulation::network::{Conditions, Cut};
use crate::simulation::rng::Rng;

/// A drawn world. It is printed when a seed fails.
#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) ranks: u32,
    pub(crate) conditions: Conditions,
    /// When each rank starts.
    pub(crate) starts: Vec<Duration>,
    pub(crate) operations: Vec<Operation>,
    pub(crate) fault: Option<Fault>,
    /// The MTU that the ranks are configured with.
    pub(crate) mtu: Option<u16>,
    /// Number of connections for messages between two ranks.
    pub(crate) lanes: u8,
    pub(crate) profile: LinkProfile,
}

/// The times by which the ranks of a world must have done something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// How long a group may take to form.
    pub(crate) connect: Duration,
    /// How much longer than that a rank may wait: 2 s longer than rank 0 for news, the time of a
    /// dial, and 1 s for a goodbye.
    pub(crate) form_grace: Duration,
    /// Deadline of a call of an operation, and of a close: far longer than the detection of any
    /// fault.
    pub(crate) patience: Duration,
    /// From a lasting fault until every waiting rank knows of it: the silence of a dead rank, or
    /// the time until a connection is idle, and then some packets that may be lost.
    pub(crate) news: Duration,
    /// The same if the links carry one direction only: a rank that is not heard and is not told
    /// counts a quarter longer.
    pub(crate) one_way_news: Duration,
    /// An outage so short that it may delay the ranks, and must cause no error.
    pub(crate) short_outage: Duration,
}

/// The work of the ranks between two agreements.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    /// A ring: the bytes of every rank visit all others.
    Ring { bytes: usize },
    /// An all-to-all.
    AllToAll { bytes: usize },
}

#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    pub(crate) when: When,
}

#[derive(Clone, Debug)]
pub(crate) enum FaultKind {
    /// Cuts some ranks off from all others. If one-way, only packets from these ranks are lost.
    Partition { side: Vec<u32>, one_way: bool, heals: Option<Duration> },
    /// Cuts the link between two ranks.
    Link { a: u32, b: u32, one_way: bool, heals: Option<Duration> },
    /// The host of a rank vanishes. In some worlds the rank restarts.
    Crash { rank: u32, restarts: Option<Duration> },
    /// A rank drops its transport without closing.
    Dropped { rank: u32 },
    /// A rank reports its own failure.
    Abort { rank: u32 },
    /// A rank votes `Refuse` for an operation.
    Refuse { rank: u32 },
    /// A rank is late with its receives.
    Slow { rank: u32, by: Duration },
    /// A rank computes before it posts anything: for the time `by` with beats, or forever without
    /// beats.
    Computes { rank: u32, by: Option<Duration> },
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum When {
    At(Duration),
    /// When the faulty rank reaches the place of the fault.
    Boundary(Boundary),
}

/// A place in the program of every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Boundary {
    pub(crate) op: u64,
    pub(crate) phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    BeforeVote,
    Agreed,
    /// The first messages of the operation are posted.
    Posted,
}

impl World {
    pub(crate) fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed, 1);
        let ranks = rng.within(2..u64::from(MOST_RANKS) + 1) as u32;
        let conditions = draw_conditions(&mut rng);
        let starts = (0..ranks).map(|_| rng.millis(0..1500)).collect();
        // From a separate stream of random numbers, so that the network and the fault of a seed do not
        // depend on it.
        let lanes = [1, 1, 2, 3][Rng::new(seed, 3).within(0..4) as usize];
        // Larger if several lanes share them, so that they are cut into chunks; and only if loss is low
        // enough to carry so many bytes in time.
        let scale = if lanes > 1 && conditions.loss_per_mille <= 60 { 4 } else { 1 };
        let operations: Vec<Operation> = (0..rng.within(2..5))
            .map(|_| {
                let bytes = scale * rng.within(10_000..200_000) as usize;
                if rng.per_mille(500) { Operation::Ring { bytes } } else { Operation::AllToAll { bytes } }
            })
            .collect();
        let fault = (!rng.per_mille(200)).then(|| draw_fault(&mut rng, ranks, operations.len() as u64));
        Self {
            seed,
            ranks,
            conditions,
            starts,
            operations,
            fault,
            mtu: None,
            lanes,
            profile: LinkProfile::Lan,
        }
    }
}

impl World {
    pub(crate) fn limits(&self) -> Limits {
        let seconds = Duration::from_secs;
        let is_long = self.conditions.latency >= Duration::from_millis(100);
        let (connect, form_grace, patience, news, one_way_news, short_outage) = match self.profile {
            LinkProfile::Lan if !is_long => (20, 8, 40, 9, 9, Duration::from_millis(1500)),
            LinkProfile::Lan => (60, 8, 200, 12, 13, Duration::from_millis(1500)),
            LinkProfile::Wan => (60, 14, 200, 30, 33, seconds(10)),
        };
        Limits {
            connect: seconds(connect),
            form_grace: seconds(form_grace),
            patience: seconds(patience),
            news: seconds(news),
            one_way_news: seconds(one_way_news),
            short_outage,
        }
    }
}

fn draw_conditions(rng: &mut Rng) -> Conditions {
    let latency = rng.micros(100..60_000);
    let some = |rng: &mut Rng, most| if rng.per_mille(400) { 0 } else { rng.within(0..most) };
    Conditions {
        latency,
        jitter: rng.micros(0..latency.as_micros() as u64 + 1),
        loss_per_mille: some(rng, 201),
        reorder_per_mille: some(rng, 100),
        duplicate_per_mille: some(rng, 100),
        bytes_per_second: [2 << 20, 10 << 20, 1 << 30][rng.within(0..3) as usize],
    }
}

fn draw_fault(rng: &mut Rng, ranks: u32, operations: u64) -> Fault {
    let rank = rng.within(0..u64::from(ranks)) as u32;
    let other = (rank + rng.within(1..u64::from(ranks)) as u32) % ranks;
    let heals = rng.per_mille(500).then(|| rng.millis(50..9000));
    let one_way = rng.per_mille(300);
    let by = rng.millis(500..8000);
    let kind = match rng.within(0..11) {
        0 | 1 => {
            let mut side: Vec<u32> = (0..ranks).filter(|&one| one == rank || rng.per_mille(300)).collect();
            if side.len() as u32 == ranks {
                side.retain(|&one| one != other);
            }
            FaultKind::Partition { side, one_way, heals }
        }
        2 => FaultKind::Link { a: rank, b: other, one_way, heals },
        3..=5 => FaultKind::Crash { rank, restarts: rng.per_mille(400).then_some(by) },
        6 => FaultKind::Dropped { rank },
        7 => FaultKind::Abort { rank },
        8 => FaultKind::Refuse { rank },
        9 => FaultKind::Computes { rank, by: rng.per_mille(500).then_some(3 * by) },
        _ => FaultKind::Slow { rank, by },
    };
    let phase = [Phase::BeforeVote, Phase::Agreed, Phase::Posted][rng.within(0..3) as usize];
    let boundary = When::Boundary(Boundary { op: rng.within(0..operations), phase });
    let longest = [300, 1500, 5000][rng.within(0..3) as usize];
    let at = When::At(rng.millis(0..longest));
    let when = match kind {
        FaultKind::Refuse { .. } | FaultKind::Slow { .. } | FaultKind::Computes { .. } => boundary,
        _ if rng.per_mille(600) => boundary,
        _ => at,
    };
    Fault { kind, when }
}

impl FaultKind {
    /// The rank whose progress triggers a fault at a boundary.
    pub(crate) fn rank(&self) -> u32 {
        match *self {
            Self::Partition { ref side, .. } => side[0],
            Self::Link { a, .. } => a,
            Self::Crash { rank, .. }
            | Self::Dropped { rank }
            | Self::Abort { rank }
            | Self::Refuse { rank }
            | Self::Slow { rank, .. }
            | Self::Computes { rank, .. } => rank,
        }
    }

    /// The links that the fault cuts, and for how long.
    pub(crate) fn cut(&self, world: u32) -> Option<(Cut, Option<Duration>)> {
        match *self {
            Self::Partition { ref side, one_way, heals } => Some((Cut::around(side, world, one_way), heals)),
            Self::Link { a, b, one_way, heals } => Some((Cut::between(a, b, one_way), heals)),
            _ => None,
        }
    }

    /// The rank that is permanently gone, whatever its program still does.
    pub(crate) fn gone(&self) -> Option<u32> {
        match *self {
            Self::Crash { rank, .. } | Self::Dropped { rank } => Some(rank),
            _ => None,
        }
    }
}
