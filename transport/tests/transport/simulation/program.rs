//! The program of every rank in a world, and its log.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::quic::{QuicConfig, QuicTransport};
use kyklos_transport::{
    Abort, AbortCause, Group, Posted, Progress, Rank, RefusalReason, Tag, TransportError, Vote,
};

use crate::simulation::identities::{JOB, identity};
use crate::simulation::network::address;
use crate::simulation::stage::Stage;
use crate::simulation::world::{Boundary, FaultKind, Operation, Phase};

/// Time after which a rank counts as stuck if other ranks wait for it; longer than outages that end
/// without an error.
pub(crate) const STUCK: Duration = Duration::from_secs(12);

/// A call of one rank, with times since the start of the world.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) what: What,
    pub(crate) posted: Duration,
    pub(crate) ended: Duration,
    pub(crate) patience: Duration,
    pub(crate) result: Result<(), TransportError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Form,
    Vote { round: u64 },
    Send { to: u32, tag: Tag },
    Receive { from: u32, tag: Tag },
    Close,
}

/// One run of a rank, from its start or restart.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    pub(crate) rank: u32,
    pub(crate) life: u32,
    pub(crate) calls: Vec<Call>,
    /// Violations that the rank detects itself.
    pub(crate) complaints: Vec<String>,
}

/// A planted fault, for tests of the judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sabotage {
    /// Sends one wrong byte.
    WrongByte,
    /// Votes with the note of another operation.
    WrongNote,
    /// Records the end of a call too late.
    Late,
    /// Never closes, and never drops its transport.
    Stays,
}

/// The bytes that one rank sends to another in an operation.
fn payload(seed: u64, op: u64, from: u32, to: u32, bytes: usize) -> Bytes {
    let mut rng =
        crate::simulation::rng::Rng::new(seed, 1000 + op * 100 + u64::from(from) * 10 + u64::from(to));
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        out.extend_from_slice(&rng.next().to_le_bytes());
    }
    out.truncate(bytes);
    out.into()
}

/// The note of a rank's vote: empty in every fourth operation on all ranks, else of up to 1024
/// bytes.
fn note(seed: u64, op: u64, rank: u32) -> Bytes {
    let bytes = [0, 12, 150, 1024][(op % 4) as usize];
    payload(seed, op, rank, rank, bytes)
}

/// The future of a call. It yields the bytes that the call received.
type Boxed = Pin<Box<dyn Future<Output = Result<Vec<Bytes>, TransportError>> + Send>>;

fn send<T: Send + 'static>(posted: Posted<T>) -> Boxed {
    Box::pin(async { posted.await.map(|_| Vec::new()) })
}

/// Runs a rank from one start to its end.
pub(crate) async fn run(stage: Arc<Stage>, rank: u32, life: u32, sabotage: Option<Sabotage>) -> Log {
    let log = Log { rank, life, calls: Vec::new(), complaints: Vec::new() };
    let mut program = Program { stage, rank, slot: life as usize * 16 + rank as usize, log, sabotage };
    program.form().await;
    if program.failed() {
        return program.log;
    }
    for op in 0..program.stage.world.operations.len() as u64 {
        program.operation(op).await;
        if program.failed() {
            program.make_everyones(op);
            break;
        }
    }
    program.close().await;
    program.log
}

struct Program {
    stage: Arc<Stage>,
    rank: u32,
    slot: usize,
    log: Log,
    sabotage: Option<Sabotage>,
}

impl Program {
    fn transport(&self) -> Option<Group> {
        self.stage.transport(self.slot)
    }

    fn patience(&self) -> Duration {
        self.stage.world.limits().patience
    }

    fn failed(&self) -> bool {
        self.log.calls.iter().any(|call| call.result.is_err())
    }

    async fn form(&mut self) {
        let posted = self.stage.now();
        let mut config =
            QuicConfig::new(Rank(self.rank), self.stage.world.ranks, JOB, address(0), identity(self.rank));
        config.bind = address(self.rank).ip();
        config.port = address(self.rank).port();
        config.connect_deadline = self.stage.world.limits().connect;
        config.stuck_after = STUCK;
        config.link.mtu = self.stage.world.mtu;
        config.link.lanes = self.stage.world.lanes;
        config.link.profile = self.stage.world.profile;
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.stage.world.seed.to_le_bytes());
        seed[8] = self.slot as u8;
        let sockets = self.stage.network.sockets(self.rank, self.stage.world.lanes);
        let formed = QuicTransport::form_over(config, sockets, seed).await;
        let result = formed.map(|transport| self.stage.formed(self.slot, transport));
        self.note(What::Form, posted, self.stage.now(), self.stage.world.limits().connect, result);
    }

    fn note(
        &mut self,
        what: What,
        posted: Duration,
        ended: Duration,
        patience: Duration,
        result: Result<(), TransportError>,
    ) {
        self.log.calls.push(Call { what, posted, ended, patience, result });
    }

    /// Waits for all calls, and records when each ended. Returns the received bytes.
    async fn all(&mut self, calls: Vec<(What, Boxed)>) -> Vec<Vec<Bytes>> {
        let posted = self.stage.now();
        let count = calls.len();
        let mut waiting: Vec<_> = calls.into_iter().enumerate().collect();
        let mut brought = vec![Vec::new(); count];
        std::future::poll_fn(|context| {
            let mut ended = Vec::new();
            waiting.retain_mut(|(index, (what, future))| match future.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(result) => {
                    ended.push((*index, *what, result));
                    false
                }
            });
            for (index, what, result) in ended {
                let result = result.map(|parts| brought[index] = parts);
                let late =
                    if self.sabotage == Some(Sabotage::Late) { 2 * self.patience() } else { Duration::ZERO };
                let now = self.stage.now() + late;
                self.note(what, posted, now, self.patience(), result);
            }
            if waiting.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        brought
    }

    async fn operation(&mut self, op: u64) {
        let boundary = |phase| Boundary { op, phase };
        self.stage.reached(self.rank, boundary(Phase::BeforeVote));
        let Some(transport) = self.transport() else { return self.gone() };
        transport.report_progress(Progress { op, step: 1 });
        let refuses = self.stage.fault_here(self.rank, op, |kind| matches!(kind, FaultKind::Refuse { .. }));
        let noted = if self.sabotage == Some(Sabotage::WrongNote) { op + 1 } else { op };
        let vote = match refuses {
            Some(_) => {
                self.stage.strike();
                Vote::Refuse { reason: RefusalReason::Other(9), text: format!("rank {} will not", self.rank) }
            }
            None => {
                Vote::Ready { plan_hash: [op as u8; 32], note: note(self.stage.world.seed, noted, self.rank) }
            }
        };
        let agreed = transport.agree(vote, self.patience());
        drop(transport);
        let notes = self.all(vec![(What::Vote { round: op }, Box::pin(agreed))]).await;
        if self.failed() {
            return;
        }
        let (seed, ranks) = (self.stage.world.seed, self.stage.world.ranks);
        if notes != [(0..ranks).map(|rank| note(seed, op, rank)).collect::<Vec<_>>()] {
            self.log.complaints.push(format!("the notes of op {op} have come wrong"));
        }
        self.stage.reached(self.rank, boundary(Phase::Agreed));
        let slow = self.stage.fault_here(self.rank, op, |kind| matches!(kind, FaultKind::Slow { .. }));
        if let Some(FaultKind::Slow { by, .. }) = slow {
            self.stand_about(op, by).await;
        }
        let computes =
            self.stage.fault_here(self.rank, op, |kind| matches!(kind, FaultKind::Computes { .. }));
        if let Some(FaultKind::Computes { by, .. }) = computes {
            self.compute(by).await;
        }
        match self.stage.world.operations[op as usize] {
            Operation::Ring { bytes } => self.ring(op, bytes).await,
            Operation::AllToAll { bytes } => self.all_to_all(op, bytes).await,
        }
        if let Some(transport) = self.transport()
            && !transport.outstanding().is_empty()
        {
            self.log.complaints.push(format!("all calls of op {op} have ended, but not for the transport"));
        }
    }

    /// A receiver that posts late. Unrequested bytes must not accumulate at this rank.
    async fn stand_about(&mut self, op: u64, by: Duration) {
        self.stage.strike();
        let before = self.stage.network.delivered_to(self.rank);
        tokio::time::sleep(by).await;
        let came = self.stage.network.delivered_to(self.rank) - before;
        let senders = u64::from(self.stage.world.ranks - 1);
        let unasked = match self.stage.world.operations[op as usize] {
            Operation::Ring { bytes } | Operation::AllToAll { bytes } if bytes <= EARLY_BYTES => bytes as u64,
            _ => 0,
        };
        // Some bytes arrive twice, and heartbeats arrive too.
        let most = senders * (3 * unasked + 20_000);
        if came > most {
            self.log.complaints.push(format!("{came} bytes came unasked, at most {most} may"));
        }
    }

    /// A device that is slow or hangs, while the I/O of its rank works.
    async fn compute(&mut self, by: Option<Duration>) {
        self.stage.strike();
        let Some(transport) = self.transport() else { return };
        let (pulse, stop) = (transport.pulse(), transport.stop_flag());
        drop(transport);
        let work = pulse.work();
        let until = self.stage.now() + by.unwrap_or(10 * STUCK);
        while self.stage.now() < until && !stop.load(std::sync::atomic::Ordering::Acquire) {
            tokio::time::sleep(Duration::from_millis(500)).await;
            if by.is_some() {
                pulse.beat();
            }
        }
        drop(work);
    }

    async fn ring(&mut self, op: u64, bytes: usize) {
        let (me, ranks) = (self.rank, self.stage.world.ranks);
        let (next, previous) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
        let seed = self.stage.world.seed;
        let mut mine = payload(seed, op, me, me, bytes);
        for hop in 0..ranks - 1 {
            let tag = Tag { op, message: hop };
            let Some(transport) = self.transport() else { return self.gone() };
            let received = transport.post_recv(Rank(previous), tag, &[bytes], self.patience());
            let sent = transport.post_send(Rank(next), tag, vec![self.forge(op, mine)], self.patience());
            drop(transport);
            if hop == 0 {
                self.stage.reached(me, Boundary { op, phase: Phase::Posted });
            }
            let calls = vec![
                (What::Receive { from: previous, tag }, Box::pin(received) as Boxed),
                (What::Send { to: next, tag }, send(sent)),
            ];
            let brought = self.all(calls).await;
            if self.failed() {
                return;
            }
            let origin = (previous + ranks - hop) % ranks;
            mine = brought[0][0].clone();
            self.check(tag, previous, &mine, &payload(seed, op, origin, origin, bytes));
        }
    }

    async fn all_to_all(&mut self, op: u64, bytes: usize) {
        let (me, ranks, seed) = (self.rank, self.stage.world.ranks, self.stage.world.seed);
        let others: Vec<u32> = (1..ranks).map(|step| (me + step) % ranks).collect();
        let tag = |from: u32, to: u32| Tag { op, message: from * 16 + to };
        let split = bytes / 3;
        let Some(transport) = self.transport() else { return self.gone() };
        let mut calls: Vec<(What, Boxed)> = Vec::new();
        for &from in &others {
            let tag = tag(from, me);
            let received = transport.post_recv(Rank(from), tag, &[split, bytes - split], self.patience());
            calls.push((What::Receive { from, tag }, Box::pin(received)));
        }
        for &to in &others {
            let tag = tag(me, to);
            let mut first = self.forge(op, payload(seed, op, me, to, bytes));
            let second = first.split_off(split);
            let sent = transport.post_send(Rank(to), tag, vec![first, second], self.patience());
            calls.push((What::Send { to, tag }, send(sent)));
        }
        drop(transport);
        self.stage.reached(me, Boundary { op, phase: Phase::Posted });
        let brought = self.all(calls).await;
        if self.failed() {
            return;
        }
        for (&from, parts) in others.iter().zip(brought) {
            self.check(tag(from, me), from, &parts.concat(), &payload(seed, op, from, me, bytes));
        }
    }

    fn forge(&self, op: u64, bytes: Bytes) -> Bytes {
        if self.sabotage != Some(Sabotage::WrongByte) || op != 1 {
            return bytes;
        }
        let mut forged = bytes.to_vec();
        forged[bytes.len() / 2] ^= 1;
        forged.into()
    }

    fn check(&mut self, tag: Tag, from: u32, came: &[u8], right: &[u8]) {
        if came != right {
            self.log.complaints.push(format!("{tag} from rank {from} has come with wrong bytes"));
        }
    }

    /// The stage has dropped this rank's transport.
    fn gone(&mut self) {
        let now = self.stage.now();
        self.note(What::Close, now, now, self.patience(), Err(TransportError::Closed));
    }

    /// Acts as an executor does: a deadline of one rank ends the operation on all ranks.
    fn make_everyones(&mut self, op: u64) {
        let Some(transport) = self.transport() else { return };
        for call in &self.log.calls {
            match &call.result {
                Err(TransportError::Deadline { pending, .. }) => {
                    let cause = AbortCause::Failed(format!("{pending}"));
                    transport.abort(Abort {
                        culprit: pending.peer,
                        cause,
                        progress: Progress { op, step: 2 },
                    });
                    break;
                }
                Err(TransportError::Aborted { .. })
                    if !transport.stop_flag().load(std::sync::atomic::Ordering::Acquire) =>
                {
                    self.log.complaints.push("aborted, but the stop flag is down".into());
                    break;
                }
                _ => {}
            }
        }
    }

    async fn close(&mut self) {
        if self.sabotage == Some(Sabotage::Stays) {
            return;
        }
        let Some(transport) = self.transport() else { return };
        let closed = transport.close(self.patience());
        drop(transport);
        self.all(vec![(What::Close, send(closed))]).await;
        self.stage.let_go(self.slot);
    }
}

/// Larger messages are sent only when they are requested (`WIRE.md`).
const EARLY_BYTES: usize = 64 << 10;
