//! Which messages have ended: a tag is used once.

use std::collections::BTreeMap;

use crate::error::TransportError;
use crate::rank::{Rank, Tag};

/// Calls that have ended, of one direction between two ranks. Bounded: it remembers recent
/// operations.
#[derive(Debug, Default)]
pub(crate) struct History {
    ended: BTreeMap<Tag, Ended>,
    /// Latest operation of which a message was posted.
    latest_op: u64,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The message has arrived.
    Done,
    /// Its deadline passed, the group was aborted, or this rank closed.
    GivenUp,
}

impl History {
    /// Notes that a call is about to be posted, or returns the reason why it must not be posted.
    pub(crate) fn post(&mut self, operation: &str, peer: Rank, tag: Tag) -> Result<(), TransportError> {
        if let Some(ended) = self.ended.get(&tag) {
            let how = match ended {
                Ended::Done => "done",
                Ended::GivenUp => "given up",
            };
            let text = format!(
                "the {operation} with rank {peer} of {tag} has been {how} already; a tag is used once"
            );
            return Err(TransportError::Misuse { text });
        }
        self.latest_op = self.latest_op.max(tag.op);
        Ok(())
    }

    /// Notes that the call of `tag` has ended, and forgets old calls.
    pub(crate) fn end(&mut self, tag: Tag, ended: Ended) {
        self.ended.insert(tag, ended);
        let oldest = Tag { op: self.latest_op.saturating_sub(REMEMBERED_OPS), message: 0 };
        if self.ended.first_key_value().is_some_and(|(&first, _)| first < oldest) {
            self.ended = self.ended.split_off(&oldest);
        }
    }
}

/// Lookups for the messages of peers. A rank checks its own calls when they are posted.
#[cfg(feature = "quic")]
impl History {
    /// How the call of `tag` ended, if it did and is remembered.
    pub(crate) fn of(&self, tag: Tag) -> Option<Ended> {
        self.ended.get(&tag).copied()
    }

    /// The current operation, if `tag` belongs to an operation so old that its end would be
    /// forgotten.
    pub(crate) fn is_past(&self, tag: Tag) -> Option<u64> {
        (tag.op.saturating_add(REMEMBERED_OPS) < self.latest_op).then_some(self.latest_op)
    }
}

/// Operations whose ends are remembered.
const REMEMBERED_OPS: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_operations_are_forgotten_and_recent_ones_are_not() {
        let mut history = History::default();
        let tag = |op| Tag { op, message: 1 };
        for op in 0..200 {
            assert_eq!(history.post("send", Rank(1), tag(op)), Ok(()));
            history.end(tag(op), Ended::Done);
        }
        assert!(history.post("send", Rank(1), tag(200 - REMEMBERED_OPS)).is_err());
        assert!(history.ended.len() as u64 <= REMEMBERED_OPS + 1);
    }
}
