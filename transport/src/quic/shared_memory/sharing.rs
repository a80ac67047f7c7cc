//! Whether two ranks share memory.

use std::sync::Arc;

use tokio::sync::watch;

use super::sender::SharedSender;

/// Whether messages to one other rank go through shared memory. At first they do not.
#[derive(Debug)]
pub(crate) struct Sharing(watch::Sender<State>);

#[derive(Clone, Debug)]
enum State {
    No,
    /// An offer is not answered yet.
    Offered,
    Yes(Arc<SharedSender>),
}

impl Sharing {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(State::No))
    }

    /// An offer has been made. False if there was one already.
    pub(crate) fn offered(&self) -> bool {
        self.0.send_if_modified(|state| {
            let is_first = matches!(state, State::No);
            if is_first {
                *state = State::Offered;
            }
            is_first
        })
    }

    /// The offer has been declined.
    pub(crate) fn declined(&self) {
        self.0.send_if_modified(|state| {
            let is_open = matches!(state, State::Offered);
            if is_open {
                *state = State::No;
            }
            is_open
        });
    }

    /// The two ranks have each other's memory.
    pub(crate) fn begins(&self, sender: Arc<SharedSender>) {
        self.0.send_replace(State::Yes(sender));
    }

    /// The shared memory, once it is known whether there is any.
    pub(crate) async fn sender(&self) -> Option<Arc<SharedSender>> {
        let mut state = self.0.subscribe();
        let known = state.wait_for(|state| !matches!(state, State::Offered)).await.ok()?;
        match &*known {
            State::Yes(sender) => Some(Arc::clone(sender)),
            State::No | State::Offered => None,
        }
    }

    /// Payload bytes sent and received through shared memory.
    pub(crate) fn moved_bytes(&self) -> (u64, u64) {
        match &*self.0.borrow() {
            State::Yes(sender) => sender.moved_bytes(),
            State::No | State::Offered => (0, 0),
        }
    }
}
