//! The thread of a communicator, the only one that calls NCCL for it.
//!
//! It brings exchanges into the stream in the order in which they were posted, and looks after
//! those under way: NCCL has no deadlines. When one of them fails or is late, or when the group has
//! been aborted, it aborts the communicator. Then the messages under way end at once, with
//! unspecified bytes, and so does everything on the device that waits for them. Every exchange of
//! this rank, now and later, ends with the failure.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use kyklos_transport::{Abort, AbortCause, EventKind, Rank, Recorder, Transport, TransportError};

use super::communicator::{Blocks, Communicator, Fault};
use super::exchange::{Exchange, Failure, Outcome, Promise, Shared, Transfer};
use super::library::{Nccl, UniqueId};
use crate::device::{AwaitsMessages, MessageStream};
use crate::driver::Event;

/// What the thread needs to make a communicator.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) nccl: &'static Nccl,
    pub(super) id: UniqueId,
    /// Of this rank in the communicator.
    pub(super) number: u32,
    /// Of the communicator.
    pub(super) ranks: u32,
    pub(super) blocks: Blocks,
    pub(super) stream: MessageStream,
    /// The thread keeps no group alive: other ranks find a rank dead when its group is
    /// dropped.
    pub(super) group: Weak<dyn Transport>,
    pub(super) rank: Rank,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) recorder: Arc<Recorder>,
    /// For making the communicator.
    pub(super) form_within: Duration,
    /// For each exchange.
    pub(super) deadline: Duration,
}

/// An exchange in the stream. Its buffers stay allocated until its messages have moved.
#[derive(Debug)]
struct InFlight {
    exchange: Exchange,
    event: Arc<Event>,
    awaited: AwaitsMessages,
}

/// Between two looks at a communicator without exchanges.
const IDLE: Duration = Duration::from_millis(200);
/// Longest time for leaving in order, and for messages to end after an abort.
const LEAVE: Duration = Duration::from_secs(10);

/// Starts the thread, which makes the communicator. The outcome is that of making it.
pub(super) fn start(shared: Arc<Shared>, setup: Setup) -> std::io::Result<Outcome> {
    let (made, outcome) = oneshot::channel();
    let thread = Thread { shared, setup, communicator: None, in_flight: VecDeque::new() };
    std::thread::Builder::new().name("kyklos-nccl".to_owned()).spawn(move || thread.run(made))?;
    Ok(outcome)
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
        let Setup { nccl, id, number, ranks, blocks, stream, form_within, .. } = &self.setup;
        let made = Communicator::begin(nccl, stream.context(), id, [*number, *ranks], *blocks);
        let communicator = made.map_err(|fault| self.failure(MAKE, fault))?;
        let late = |waited: Duration| {
            let text = format!("the ranks had not met after {} s", waited.as_secs());
            Failure::Own(stream.error(MAKE, &text))
        };
        let is_wanted = || !self.shared.lock().closed;
        match self.until_ready(&communicator, MAKE, (Instant::now(), *form_within), late, is_wanted) {
            Ok(()) => Ok(communicator),
            Err(failure) => {
                communicator.abort();
                Err(failure)
            }
        }
    }

    /// Waits until what was begun is done, until the deadline after `since`, or until the group is
    /// aborted.
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

    /// Waits for the next exchange, or until it is time to look after those under way; `since` is
    /// when there was news last.
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
        exchange.note(&self.setup.recorder, [EventKind::SendPosted, EventKind::ReceivePosted]);
        match self.try_submit(&exchange) {
            Ok(event) => {
                if let Some(submitted) = exchange.submitted.take() {
                    let _ = submitted.send(Ok(()));
                }
                let awaited = self.setup.stream.await_messages();
                self.in_flight.push_back(InFlight { exchange, event, awaited });
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
        posted.map_err(|fault| self.failure(MOVE, cause(communicator, fault)))?;
        // NCCL may still connect to peers. Only then is the exchange in the stream, and an event can follow
        // it.
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
        let before = self.in_flight.len();
        if let Err(error) = self.end_those_that_have_moved() {
            self.fail(&Failure::Own(error), None);
            return true;
        }
        if let Some(InFlight { exchange, .. }) = self.in_flight.front()
            && exchange.posted.elapsed() >= self.setup.deadline
        {
            let failure = exchange.late(exchange.posted.elapsed());
            self.fail(&failure, None);
            return true;
        }
        self.in_flight.len() < before
    }

    /// Ends the exchanges whose messages have moved.
    fn end_those_that_have_moved(&mut self) -> kyklos::Result<()> {
        while let Some(InFlight { event, .. }) = self.in_flight.front()
            && self.setup.stream.is_complete(event)?
        {
            if let Some(InFlight { exchange, .. }) = self.in_flight.pop_front() {
                exchange.note(&self.setup.recorder, [EventKind::Sent, EventKind::Received]);
                self.shared.ended.fetch_add(1, Ordering::Relaxed);
                let _ = exchange.moved.send(Ok(()));
            }
        }
        Ok(())
    }

    /// Tells this rank and the group of a failure, and aborts the communicator. `also` is not in
    /// flight.
    fn fail(&mut self, failure: &Failure, also: Option<Exchange>) {
        // What had moved before the failure has ended well. If the device does not tell, nothing more has.
        let _ = self.end_those_that_have_moved();
        let queued = {
            let mut queue = self.shared.lock();
            queue.failure = Some(failure.clone());
            std::mem::take(&mut queue.exchanges)
        };
        self.tell_group(failure);
        // The device uses these buffers until the abort has ended the messages.
        let (under_way, awaited): (Vec<_>, Vec<_>) =
            self.in_flight.drain(..).map(|InFlight { exchange, awaited, .. }| (exchange, awaited)).unzip();
        let all = under_way.into_iter().chain(also).chain(queued);
        let ended = |exchange: Exchange| {
            exchange.note(&self.setup.recorder, [EventKind::EndedEarly; 2]);
            exchange.fail(failure)
        };
        let used: Vec<Transfer> = all.flat_map(ended).collect();
        if let Some(communicator) = self.communicator.take() {
            communicator.abort();
        }
        if !self.becomes_idle() {
            // The device may use them as long as the process lives.
            std::mem::forget(used);
        }
        drop(awaited);
    }

    /// Aborts the group, unless it has been aborted.
    fn tell_group(&self, failure: &Failure) {
        let (culprit, text) = match failure {
            Failure::Own(error) => (self.setup.rank, error.to_string()),
            Failure::Late(error @ TransportError::Deadline { pending, .. }) => {
                (pending.peer, error.to_string())
            }
            Failure::Late(error @ TransportError::LateExchange { peers, .. }) => {
                (self.least_advanced(peers), error.to_string())
            }
            Failure::Late(error) => (self.setup.rank, error.to_string()),
            Failure::Group => return,
        };
        if let Some(group) = self.setup.group.upgrade() {
            let progress = self.shared.progress();
            group.abort(Abort { culprit, cause: AbortCause::Failed(text), progress });
        }
    }

    /// Of these ranks, the one that was least advanced when it was last heard; the first one where
    /// none is known to be behind. Heartbeats go to rank 0, so only rank 0 knows.
    fn least_advanced(&self, peers: &[Rank]) -> Rank {
        let heard = self.setup.recorder.peers();
        let place = |rank: &Rank| {
            let progress = heard.get(rank.0 as usize).and_then(|peer| peer.progress);
            progress.map_or((u64::MAX, u32::MAX), |progress| (progress.op, progress.step))
        };
        peers.iter().copied().min_by_key(place).unwrap_or(self.setup.rank)
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

/// Why an exchange could not be posted: an exchange before it may have failed meanwhile, and NCCL
/// then refuses all others.
fn cause(communicator: &Communicator, refused: Fault) -> Fault {
    match (communicator.is_ready(), refused) {
        (Err(Fault::Nccl(found)), Fault::Nccl(told)) if found.code != told.code => Fault::Nccl(found),
        (_, refused) => refused,
    }
}

/// Between two looks, `since` the last news: an event is noticed late by at most a small part of
/// its own duration.
fn pause(since: Instant) -> Duration {
    (since.elapsed() / 16).clamp(Duration::from_micros(10), Duration::from_millis(1))
}

/// Words for errors.
const MAKE: &str = "make a communicator of NCCL";
const MOVE: &str = "exchange messages by NCCL";
