//! Looks after exchanges under way: a process group has no deadline that leaves it usable, and does
//! not learn that the group has been aborted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use kyklos::Error;
use kyklos_transport::{Pending, Rank, Tag, TransportError};

use super::{Messages, OPERATION};

/// Why an exchange failed.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The device of this rank, or PyTorch on it.
    Own(Error),
    /// It was not done in time.
    Late(TransportError),
    /// The group has been aborted.
    Group,
}

/// The end of an exchange.
pub(super) type Outcome = oneshot::Receiver<Result<(), Failure>>;

/// What errors say of an exchange.
pub(super) struct About {
    tag: Tag,
    /// Bytes from each peer, and to each peer.
    received: BTreeMap<Rank, u64>,
    sent: BTreeMap<Rank, u64>,
}

impl About {
    pub(super) fn new(tag: Tag) -> Self {
        Self { tag, received: BTreeMap::new(), sent: BTreeMap::new() }
    }

    pub(super) fn receive(&mut self, from: Rank, bytes: usize) {
        *self.received.entry(from).or_default() += bytes as u64;
    }

    pub(super) fn send(&mut self, to: Rank, bytes: usize) {
        *self.sent.entry(to).or_default() += bytes as u64;
    }

    /// That it is not done after `waited`. It ends with all its messages, so the error names all
    /// their ranks.
    fn late(&self, waited: Duration) -> TransportError {
        let peers: BTreeSet<Rank> = self.received.keys().chain(self.sent.keys()).copied().collect();
        let first =
            |messages: &BTreeMap<Rank, u64>| messages.iter().next().map(|(peer, bytes)| (*peer, *bytes));
        let (operation, message) = match (first(&self.received), first(&self.sent)) {
            (Some(received), _) => ("receive", Some(received)),
            (None, sent) => ("send", sent),
        };
        match message {
            Some((peer, bytes_expected)) if peers.len() == 1 => {
                let pending = Pending { operation, peer, tag: self.tag, bytes_done: 0, bytes_expected };
                TransportError::Deadline { pending, waited }
            }
            _ => TransportError::LateExchange { tag: self.tag, peers: peers.into_iter().collect(), waited },
        }
    }
}

struct Exchange {
    about: About,
    posted: Instant,
    /// When PyTorch failed, and what it said.
    broken: Option<(Instant, String)>,
    promise: oneshot::Sender<Result<(), Failure>>,
}

#[derive(Default)]
struct Queue {
    under_way: BTreeMap<u64, Exchange>,
    next: u64,
    /// Why no exchange can be posted any more.
    failure: Option<Failure>,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of an exchange among those under way.
pub(super) struct Place {
    shared: Arc<Shared>,
    number: u64,
}

impl Place {
    /// PyTorch has done it, or has failed.
    pub(super) fn end(self, error: Option<String>) {
        let mut queue = self.shared.lock();
        match error {
            None => {
                if let Some(exchange) = queue.under_way.remove(&self.number) {
                    // The rank may no longer wait for it.
                    let _ = exchange.promise.send(Ok(()));
                }
            }
            Some(text) => {
                if let Some(exchange) = queue.under_way.get_mut(&self.number) {
                    exchange.broken = Some((Instant::now(), text));
                }
            }
        }
    }
}

/// The thread that looks after exchanges, which ends when this is dropped.
pub(super) struct Watch {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    messages: Arc<Messages>,
}

/// What the thread knows of the group.
pub(super) struct Setup {
    /// True once the group has been aborted.
    pub(super) stop: Arc<AtomicBool>,
    pub(super) deadline: Duration,
    /// Name of the device.
    pub(super) device: String,
}

/// Between two looks at exchanges under way.
const LOOK: Duration = Duration::from_millis(10);
/// When PyTorch fails, a peer has probably died: so long the group has to tell which one.
const TELL: Duration = Duration::from_secs(20);

impl Watch {
    pub(super) fn start(setup: Setup, messages: Arc<Messages>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (stop, watched) = (setup.stop.clone(), shared.clone());
        // Left in order on the thread of the rank.
        let left = Arc::downgrade(&messages);
        let watch = move || {
            if watched.look(&setup)
                && let Some(messages) = left.upgrade()
            {
                messages.abandon();
            }
        };
        std::thread::Builder::new().name("kyklos-torch".to_owned()).spawn(watch)?;
        Ok(Self { shared, stop, messages })
    }

    /// A place for an exchange, and its end.
    pub(super) fn post(&self, about: About) -> Result<(Place, Outcome), Failure> {
        let mut queue = self.shared.lock();
        if self.stop.load(Ordering::Acquire) {
            queue.failure.get_or_insert(Failure::Group);
        }
        if let Some(failure) = &queue.failure {
            return Err(failure.clone());
        }
        let (promise, outcome) = oneshot::channel();
        let number = queue.next;
        queue.next += 1;
        queue.under_way.insert(number, Exchange { about, posted: Instant::now(), broken: None, promise });
        drop(queue);
        self.shared.changed.notify_all();
        Ok((Place { shared: self.shared.clone(), number }, outcome))
    }

    /// Ends what is under way with an error of this rank, unless the group has been aborted, and
    /// posts nothing any more. Returns the failure.
    pub(super) fn fail(&self, error: Error) -> Failure {
        let aborted = self.stop.load(Ordering::Acquire);
        let failure = if aborted { Failure::Group } else { Failure::Own(error) };
        self.shared.lock().fail(&failure);
        self.shared.changed.notify_all();
        failure
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        queue.closed = true;
        let in_order = queue.failure.is_none() && queue.under_way.is_empty();
        drop(queue);
        self.shared.changed.notify_all();
        if !in_order || self.stop.load(Ordering::Acquire) {
            self.messages.abandon();
        }
    }
}

impl Queue {
    fn fail(&mut self, failure: &Failure) {
        self.failure.get_or_insert_with(|| failure.clone());
        for exchange in std::mem::take(&mut self.under_way).into_values() {
            let _ = exchange.promise.send(Err(failure.clone()));
        }
    }

    /// Why exchanges under way have failed.
    fn verdict(&self, Setup { stop, deadline, device }: &Setup) -> Option<Failure> {
        if stop.load(Ordering::Acquire) {
            return Some(Failure::Group);
        }
        self.under_way.values().find_map(|exchange| {
            let waited = exchange.posted.elapsed();
            match &exchange.broken {
                Some((since, text)) if since.elapsed() >= TELL.min(*deadline) => {
                    Some(Failure::Own(Error::Device {
                        device: device.clone(),
                        operation: OPERATION.to_owned(),
                        native: text.clone(),
                    }))
                }
                None if waited >= *deadline => Some(Failure::Late(exchange.about.late(waited))),
                _ => None,
            }
        })
    }
}

impl Shared {
    /// Until the end. Returns whether an exchange has failed.
    fn look(&self, setup: &Setup) -> bool {
        let mut queue = self.lock();
        loop {
            if queue.closed || queue.failure.is_some() {
                return !queue.closed;
            }
            queue = if queue.under_way.is_empty() {
                self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner)
            } else {
                if let Some(failure) = queue.verdict(setup) {
                    queue.fail(&failure);
                    continue;
                }
                self.changed.wait_timeout(queue, LOOK).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }
}
