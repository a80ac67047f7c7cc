//! The thread of a communicator, the only one that calls NCCL for it.
//!
//! It brings exchanges into the stream in the order in which they were posted, and looks after those under way: NCCL has no deadlines.
//! When one of them fails or is late, or when the group has been aborted, it aborts the communicator. Then the messages under way end
//! at once, with unspecified bytes, and so does everything on the device that waits for them. Every exchange of this rank, now and
//! later, ends with the failure.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use kyklos::Error;
use kyklos_transport::{Abort, AbortCause, Pending, Progress, Rank, Tag, Transport, TransportError};

use super::communicator::{Blocks, Communicator, Fault, Part};
use super::library::{Nccl, UniqueId};
use crate::device::{CudaBuffer, MessageStream};
use crate::driver::Event;

/// Why the messages of a rank do not move.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The device of this rank, or NCCL on it.
    Own(Error),
    /// An exchange was not done in time.
    Late(TransportError),
    /// The group has been aborted.
    Group,
}

/// Ends when something has happened or has failed.
pub(super) type Outcome = oneshot::Receiver<Result<(), Failure>>;
type Promise = oneshot::Sender<Result<(), Failure>>;

/// Bytes of a buffer that go to a peer or come from it.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) peer: Rank,
    pub(super) buffer: CudaBuffer,
    pub(super) bytes: Range<usize>,
}

impl Transfer {
    fn part(&self) -> Part {
        let Self { peer, buffer, bytes } = self;
        Part { address: buffer.address() + bytes.start as u64, bytes: bytes.len(), peer: peer.0 }
    }
}

/// An exchange that was posted.
#[derive(Debug)]
struct Exchange {
    tag: Tag,
    sends: Vec<Transfer>,
    recvs: Vec<Transfer>,
    posted: Instant,
    /// `None` once it is in the stream.
    submitted: Option<Promise>,
    moved: Promise,
}

/// An exchange in the stream. Its buffers stay allocated until its messages have moved.
#[derive(Debug)]
struct InFlight {
    exchange: Exchange,
    event: Arc<Event>,
}

/// What the thread needs to make a communicator.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) nccl: &'static Nccl,
    pub(super) id: UniqueId,
    pub(super) ranks: u32,
    pub(super) blocks: Blocks,
    pub(super) stream: MessageStream,
    /// The thread keeps no transport alive: other ranks find a rank dead when its transport is dropped.
    pub(super) group: Weak<dyn Transport>,
    pub(super) rank: Rank,
    pub(super) stop: Arc<AtomicBool>,
    /// For making the communicator, and for each exchange.
    pub(super) deadline: Duration,
}

/// The owner of the thread. Dropping it does not block: the thread then ends by itself.
#[derive(Debug)]
pub(super) struct Worker(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// The progress of the rank.
    op: AtomicU64,
    step: AtomicU32,
}

#[derive(Debug, Default)]
struct Queue {
    exchanges: VecDeque<Exchange>,
    closed: bool,
    failure: Option<Failure>,
}

/// Between two looks at a communicator without exchanges.
const IDLE: Duration = Duration::from_millis(200);
/// Longest time for leaving in order, and for messages to end after an abort.
const LEAVE: Duration = Duration::from_secs(10);

impl Worker {
    /// Starts the thread, which makes the communicator. The outcome is that of making it.
    pub(super) fn start(setup: Setup) -> Result<(Self, Outcome), std::io::Error> {
        let shared = Arc::new(Shared::default());
        let (made, outcome) = oneshot::channel();
        let thread = Thread { shared: shared.clone(), setup, communicator: None, in_flight: VecDeque::new() };
        let builder = std::thread::Builder::new().name("kyklos-nccl".to_owned());
        builder.spawn(move || thread.run(made))?;
        Ok((Self(shared), outcome))
    }

    /// Posts an exchange. The first outcome: it is in the stream, and operations of the backend that are submitted from then on wait
    /// for its messages. The second: they have moved.
    pub(super) fn post(&self, tag: Tag, sends: Vec<Transfer>, recvs: Vec<Transfer>) -> [Outcome; 2] {
        let ((submitted, first), (moved, second)) = (oneshot::channel(), oneshot::channel());
        let exchange =
            Exchange { tag, sends, recvs, posted: Instant::now(), submitted: Some(submitted), moved };
        let mut queue = self.0.lock();
        match queue.failure.clone() {
            Some(failure) => drop(exchange.fail(&failure)),
            None => queue.exchanges.push_back(exchange),
        }
        drop(queue);
        self.0.changed.notify_one();
        [first, second]
    }

    /// Notes which step this rank has reached, for the abort by which other ranks learn of a failure here.
    pub(super) fn report_progress(&self, progress: Progress) {
        self.0.op.store(progress.op, Ordering::Relaxed);
        self.0.step.store(progress.step, Ordering::Relaxed);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exchange {
    /// The buffers that it reads, and those that it writes.
    fn buffers(&self) -> [Vec<&CudaBuffer>; 2] {
        [&self.sends, &self.recvs].map(|all| all.iter().map(|transfer| &transfer.buffer).collect())
    }

    /// Ends it with a failure, and returns its buffers. The rank may no longer wait for it.
    fn fail(self, failure: &Failure) -> impl Iterator<Item = Transfer> {
        for promise in self.submitted.into_iter().chain([self.moved]) {
            let _ = promise.send(Err(failure.clone()));
        }
        self.sends.into_iter().chain(self.recvs)
    }

    /// That it is not done after `waited`: names its first peer.
    fn late(&self, waited: Duration) -> Failure {
        let (operation, transfer) = match (self.recvs.first(), self.sends.first()) {
            (Some(recv), _) => ("receive", Some(recv)),
            (None, send) => ("send", send),
        };
        let pending = Pending {
            operation,
            peer: transfer.map_or(Rank::COORDINATOR, |transfer| transfer.peer),
            tag: self.tag,
            bytes_done: 0,
            bytes_expected: transfer.map_or(0, |transfer| transfer.bytes.len() as u64),
        };
        Failure::Late(TransportError::Deadline { pending, waited })
    }
}

/// What the thread does next.
enum Next {
    Submit(Exchange),
    Look,
    Leave,
}

struct Thread {
    shared: Arc<Shared>,
    setup: Setup,
    /// `None` before it is made and after it was aborted.
    communicator: Option<Communicator>,
    in_flight: VecDeque<InFlight>,
}

impl Thread {
    fn run(mut self, made: Promise) {
        match self.make() {
            Ok(communicator) => self.communicator = Some(communicator),
            Err(failure) => {
                self.shared.lock().failure = Some(failure.clone());
                let _ = made.send(Err(failure));
                return;
            }
        }
        let _ = made.send(Ok(()));
        let mut since = Instant::now();
        loop {
            match self.next(since) {
                Next::Submit(exchange) => {
                    self.submit(exchange);
                    since = Instant::now();
                }
                Next::Look => {
                    if self.look() {
                        since = Instant::now();
                    }
                }
                Next::Leave => return self.leave(),
            }
        }
    }

    fn make(&self) -> Result<Communicator, Failure> {
        let Setup { nccl, id, ranks, blocks, stream, rank, deadline, .. } = &self.setup;
        let made = Communicator::begin(nccl, stream.context(), id, [rank.0, *ranks], *blocks);
        let communicator = made.map_err(|fault| self.failure(MAKE, fault))?;
        let late = |waited: Duration| {
            let text = format!("the ranks had not met after {} s", waited.as_secs());
            Failure::Own(stream.error(MAKE, &text))
        };
        let is_wanted = || !self.shared.lock().closed;
        match self.until_ready(&communicator, MAKE, (Instant::now(), *deadline), late, is_wanted) {
            Ok(()) => Ok(communicator),
            Err(failure) => {
                communicator.abort();
                Err(failure)
            }
        }
    }

    /// Waits until what was begun is done, until the deadline after `since`, or until the group is aborted.
    fn until_ready(
        &self,
        communicator: &Communicator,
        operation: &str,
        (since, deadline): (Instant, Duration),
        late: impl Fn(Duration) -> Failure,
        is_wanted: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        let start = Instant::now();
        while !communicator.is_ready().map_err(|fault| self.failure(operation, fault))? {
            if self.setup.stop.load(Ordering::Acquire) || !is_wanted() {
                return Err(Failure::Group);
            }
            if since.elapsed() >= deadline {
                return Err(late(since.elapsed()));
            }
            std::thread::sleep(pause(start));
        }
        Ok(())
    }

    /// Waits for the next exchange, or until it is time to look after those under way; `since` is when there was news last.
    fn next(&self, since: Instant) -> Next {
        let mut queue = self.shared.lock();
        let time = if self.in_flight.is_empty() { IDLE } else { pause(since) };
        let start = Instant::now();
        loop {
            if let Some(exchange) = queue.exchanges.pop_front() {
                return Next::Submit(exchange);
            }
            if queue.closed && self.in_flight.is_empty() {
                return Next::Leave;
            }
            let left = time.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Next::Look;
            }
            queue = self.shared.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Brings an exchange into the stream.
    fn submit(&mut self, mut exchange: Exchange) {
        match self.try_submit(&exchange) {
            Ok(event) => {
                if let Some(submitted) = exchange.submitted.take() {
                    let _ = submitted.send(Ok(()));
                }
                self.in_flight.push_back(InFlight { exchange, event });
            }
            Err(failure) => self.fail(&failure, Some(exchange)),
        }
    }

    fn try_submit(&self, exchange: &Exchange) -> Result<Arc<Event>, Failure> {
        let Some(communicator) = &self.communicator else { return Err(Failure::Group) };
        let Setup { stream, deadline, .. } = &self.setup;
        let [reads, writes] = exchange.buffers();
        stream.order(&reads, &writes).map_err(Failure::Own)?;
        let parts = |all: &[Transfer]| all.iter().map(Transfer::part).collect::<Vec<_>>();
        let posted = communicator.exchange(stream.stream(), &parts(&exchange.sends), &parts(&exchange.recvs));
        posted.map_err(|fault| self.failure(MOVE, fault))?;
        // NCCL may still connect to peers. Only then is the exchange in the stream, and an event can follow it.
        let late = |waited| exchange.late(waited);
        self.until_ready(communicator, MOVE, (exchange.posted, *deadline), late, || true)?;
        stream.note(&reads, &writes).map_err(Failure::Own)
    }

    /// Looks after the exchanges under way. Returns whether there is news.
    fn look(&mut self) -> bool {
        let Some(communicator) = &self.communicator else { return false };
        if self.setup.stop.load(Ordering::Acquire) {
            self.fail(&Failure::Group, None);
            return true;
        }
        if let Err(fault) = communicator.is_ready() {
            let failure = self.failure(MOVE, fault);
            self.fail(&failure, None);
            return true;
        }
        let mut news = false;
        while let Some(InFlight { exchange, event }) = self.in_flight.front() {
            match self.setup.stream.is_complete(event) {
                Ok(true) => {
                    if let Some(InFlight { exchange, .. }) = self.in_flight.pop_front() {
                        let _ = exchange.moved.send(Ok(()));
                    }
                    news = true;
                }
                Ok(false) if exchange.posted.elapsed() < self.setup.deadline => break,
                Ok(false) => {
                    let failure = exchange.late(exchange.posted.elapsed());
                    self.fail(&failure, None);
                    return true;
                }
                Err(error) => {
                    self.fail(&Failure::Own(error), None);
                    return true;
                }
            }
        }
        news
    }

    /// Tells this rank and the group of a failure, and aborts the communicator. `also` is not in flight.
    fn fail(&mut self, failure: &Failure, also: Option<Exchange>) {
        let queued = {
            let mut queue = self.shared.lock();
            queue.failure = Some(failure.clone());
            std::mem::take(&mut queue.exchanges)
        };
        self.tell_group(failure);
        // The device uses these buffers until the abort has ended the messages.
        let under_way =
            self.in_flight.drain(..).map(|in_flight| in_flight.exchange).chain(also).chain(queued);
        let used: Vec<Transfer> = under_way.flat_map(|exchange| exchange.fail(failure)).collect();
        if let Some(communicator) = self.communicator.take() {
            communicator.abort();
        }
        if !self.becomes_idle() {
            // The device may use them as long as the process lives.
            std::mem::forget(used);
        }
    }

    /// Aborts the group, unless it has been aborted.
    fn tell_group(&self, failure: &Failure) {
        let (culprit, text) = match failure {
            Failure::Own(error) => (self.setup.rank, error.to_string()),
            Failure::Late(error @ TransportError::Deadline { pending, .. }) => {
                (pending.peer, error.to_string())
            }
            Failure::Late(error) => (self.setup.rank, error.to_string()),
            Failure::Group => return,
        };
        if let Some(group) = self.setup.group.upgrade() {
            let Shared { op, step, .. } = &*self.shared;
            let progress = Progress { op: op.load(Ordering::Relaxed), step: step.load(Ordering::Relaxed) };
            group.abort(Abort { culprit, cause: AbortCause::Failed(text), progress });
        }
    }

    /// Whether the stream has nothing to do, in a while.
    fn becomes_idle(&self) -> bool {
        let stream = &self.setup.stream;
        let Ok(end) = stream.stream().record() else { return false };
        let start = Instant::now();
        while start.elapsed() < LEAVE {
            match stream.is_complete(&end) {
                Ok(true) => return true,
                Ok(false) => std::thread::sleep(pause(start)),
                Err(_) => return false,
            }
        }
        false
    }

    /// Leaves the communicator. Nothing is under way.
    fn leave(mut self) {
        let Some(communicator) = self.communicator.take() else { return };
        let late = |_| Failure::Group;
        let finalize = || {
            communicator.finalize().map_err(|fault| self.failure(MOVE, fault))?;
            self.until_ready(&communicator, MOVE, (Instant::now(), LEAVE), late, || true)
        };
        match finalize() {
            Ok(()) => communicator.destroy(),
            Err(_) => communicator.abort(),
        }
    }

    fn failure(&self, operation: &str, fault: Fault) -> Failure {
        let stream = &self.setup.stream;
        Failure::Own(match fault {
            Fault::Nccl(error) => stream.error(operation, &error.to_string()),
            Fault::Driver(error) => stream.driver_error(operation, &error),
        })
    }
}

/// Between two looks, `since` the last news: an event is noticed late by at most a small part of its own duration.
fn pause(since: Instant) -> Duration {
    (since.elapsed() / 16).clamp(Duration::from_micros(10), Duration::from_millis(1))
}

/// Words for errors.
const MAKE: &str = "make a communicator of NCCL";
const MOVE: &str = "exchange messages by NCCL";
