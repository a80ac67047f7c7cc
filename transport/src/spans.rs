//! Spans of messages from their post to their end, the same on every transport. The spans of the
//! callers enclose them.

use tracing::{Span, debug_span};

use crate::rank::{Rank, Tag};

pub(crate) fn send(me: Rank, to: Rank, tag: Tag, bytes: u64) -> Span {
    debug_span!("send", rank = me.0, peer = to.0, op = tag.op, message = tag.message, bytes)
}

pub(crate) fn receive(me: Rank, from: Rank, tag: Tag, bytes: u64) -> Span {
    debug_span!("receive", rank = me.0, peer = from.0, op = tag.op, message = tag.message, bytes)
}
