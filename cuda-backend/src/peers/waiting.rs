//! Messages between ranks of this process, from the sender to the receiver.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kyklos_transport::{Rank, Tag};

use crate::device::CudaBuffer;

/// The sender, the receiver and the tag of a message.
pub(super) type Key = (Rank, Rank, Tag);

/// The messages that the receiver has not taken yet: their pieces, on the device of the sender.
#[derive(Debug, Default)]
pub(super) struct Waiting(Mutex<BTreeMap<Key, Entry>>);

#[derive(Debug)]
enum Entry {
    Message(Vec<CudaBuffer>),
    /// The receiver has ended without it.
    Unwanted,
    /// The sender has ended before it knew that the receiver was told.
    Withdrawn,
}

/// What a receiver finds that was told of a message.
#[derive(Debug)]
pub(super) enum Found {
    Pieces(Vec<CudaBuffer>),
    /// The sender has taken them back: it has failed, or its group has.
    Withdrawn,
    Nothing,
}

impl Waiting {
    /// Puts a message there, unless its receiver does not want it any more.
    pub(super) fn put(&self, key: Key, pieces: Vec<CudaBuffer>) -> Offered<'_> {
        self.lock().entry(key).or_insert(Entry::Message(pieces));
        Offered { waiting: self, key, is_told: false }
    }

    /// A message that the receiver has asked for. If it is dropped before the message is taken,
    /// nobody keeps the pieces.
    pub(super) fn expect(&self, key: Key) -> Expected<'_> {
        Expected { waiting: self, key, taken: false }
    }

    /// A rank leaves: it takes nothing any more.
    pub(super) fn leave(&self, rank: Rank) {
        self.lock().retain(|(_, to, _), _| *to != rank);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A message that the sender has put there. If it is dropped before the receiver has been told, the
/// message is taken back.
#[derive(Debug)]
pub(super) struct Offered<'w> {
    waiting: &'w Waiting,
    key: Key,
    is_told: bool,
}

impl Offered<'_> {
    /// From now on the message is the receiver's.
    pub(super) fn told(mut self) {
        self.is_told = true;
    }
}

impl Drop for Offered<'_> {
    fn drop(&mut self) {
        if self.is_told {
            return;
        }
        // The receiver may have been told all the same, and must not take that for a false message.
        if let Some(entry @ Entry::Message(_)) = self.waiting.lock().get_mut(&self.key) {
            *entry = Entry::Withdrawn;
        }
    }
}

/// A message that the receiver has asked for.
#[derive(Debug)]
pub(super) struct Expected<'w> {
    waiting: &'w Waiting,
    key: Key,
    taken: bool,
}

impl Expected<'_> {
    /// Takes the message.
    pub(super) fn take(mut self) -> Found {
        self.taken = true;
        match self.waiting.lock().remove(&self.key) {
            Some(Entry::Message(pieces)) => Found::Pieces(pieces),
            Some(Entry::Withdrawn) => Found::Withdrawn,
            Some(Entry::Unwanted) | None => Found::Nothing,
        }
    }
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        if !self.taken {
            // The sender may put it there later.
            self.waiting.lock().insert(self.key, Entry::Unwanted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = (Rank(0), Rank(1), Tag { op: 3, message: 2 });

    fn is_there(waiting: &Waiting) -> bool {
        matches!(waiting.lock().get(&KEY), Some(Entry::Message(_)))
    }

    #[test]
    fn a_message_is_taken_once() {
        let waiting = Waiting::default();
        waiting.put(KEY, Vec::new()).told();
        assert!(matches!(waiting.expect(KEY).take(), Found::Pieces(_)));
        assert!(matches!(waiting.expect(KEY).take(), Found::Nothing));
        assert!(waiting.lock().is_empty());
    }

    #[test]
    fn nothing_is_kept_for_a_receiver_that_has_ended() {
        let waiting = Waiting::default();
        waiting.put(KEY, Vec::new()).told();
        assert!(is_there(&waiting));
        drop(waiting.expect(KEY));
        assert!(!is_there(&waiting));
        // It may come after that, too.
        waiting.put(KEY, Vec::new()).told();
        assert!(!is_there(&waiting));
        waiting.leave(Rank(1));
        assert!(waiting.lock().is_empty());
    }

    #[test]
    fn a_message_is_taken_back_by_a_sender_that_ends_before_the_receiver_is_told() {
        let waiting = Waiting::default();
        let offered = waiting.put(KEY, Vec::new());
        assert!(is_there(&waiting));
        drop(offered);
        assert!(!is_there(&waiting));
        // The receiver can tell that from a message that was never there.
        assert!(matches!(waiting.expect(KEY).take(), Found::Withdrawn));
        assert!(waiting.lock().is_empty());
    }

    #[test]
    fn a_rank_that_leaves_takes_nothing_any_more() {
        let waiting = Waiting::default();
        waiting.put(KEY, Vec::new()).told();
        waiting.leave(Rank(0));
        assert!(is_there(&waiting));
        waiting.leave(Rank(1));
        assert!(waiting.lock().is_empty());
    }
}
