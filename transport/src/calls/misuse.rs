//! Checks of a call's arguments that every implementation makes alike.

use crate::error::TransportError;
use crate::rank::{MAX_NOTE_BYTES, Rank, Tag, Vote};

/// Total bytes of a message from or to `peer`, or why the call is wrong.
pub(crate) fn check_message(
    me: Rank,
    size: u32,
    peer: Rank,
    tag: Tag,
    part_bytes: impl Iterator<Item = usize>,
) -> Result<u64, TransportError> {
    let misuse = |text: String| Err(TransportError::Misuse { text });
    if peer.0 >= size {
        return misuse(format!("rank {peer} is not in the group of {size} ranks ({tag})"));
    }
    if peer == me {
        return misuse(format!("rank {me} must not send to or receive from itself ({tag})"));
    }
    let mut total = 0_u64;
    for bytes in part_bytes {
        total = total.saturating_add(bytes as u64);
    }
    if total == 0 {
        return misuse(format!(
            "an empty message must be neither sent nor received (rank {me}, rank {peer}, {tag})"
        ));
    }
    Ok(total)
}

/// Bytes of the note of a vote, or why the vote is wrong.
pub(crate) fn check_vote(me: Rank, vote: &Vote) -> Result<u64, TransportError> {
    let note = match vote {
        Vote::Ready { note, .. } => note.len(),
        Vote::Refuse { .. } => 0,
    };
    if note > MAX_NOTE_BYTES {
        let text =
            format!("the note of rank {me}'s vote has {note} bytes, at most {MAX_NOTE_BYTES} are allowed");
        return Err(TransportError::Misuse { text });
    }
    Ok(note as u64)
}

/// The call reuses a name that is outstanding.
pub(crate) fn outstanding_already(operation: &str, peer: Rank, tag: Tag) -> TransportError {
    TransportError::Misuse { text: format!("a {operation} with rank {peer} of {tag} is outstanding already") }
}
