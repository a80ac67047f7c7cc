//! Counting of votes: the pure half of [`crate::Transport::agree`], shared by all implementations.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::rank::{Rank, RefusalReason, Vote};

/// How a round ended: all ranks are ready with one plan, and these are their notes by rank; or one
/// refusal becomes the error of all ranks.
pub(crate) type Verdict = Result<Vec<Bytes>, Refusal>;

/// The refusal that a round ended with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) rank: Rank,
    pub(crate) reason: RefusalReason,
    pub(crate) text: String,
}

/// Votes of all ranks. Rounds are counted per rank: the n-th vote of one rank meets the n-th of the
/// others.
#[derive(Debug)]
pub(crate) struct Ballot {
    /// Round that each rank votes in next.
    next_round: Vec<u64>,
    /// Rounds that lack votes, with the votes they have. Memory grows with the votes that were
    /// cast.
    open: BTreeMap<u64, BTreeMap<Rank, Vote>>,
}

impl Ballot {
    pub(crate) fn new(size: u32) -> Self {
        Self { next_round: vec![0; size as usize], open: BTreeMap::new() }
    }

    /// Counts a vote of `rank` and returns its round, with the verdict if it was the round's last
    /// vote.
    ///
    /// Fails when `rank` is more than [`MAX_OPEN_ROUNDS`] rounds ahead of the slowest rank: memory
    /// is bounded whatever a peer sends.
    pub(crate) fn cast(&mut self, rank: Rank, vote: Vote) -> Result<(u64, Option<Verdict>), String> {
        let round = self.next_round[rank.0 as usize];
        if !self.open.contains_key(&round) && self.open.len() >= MAX_OPEN_ROUNDS {
            return Err(format!("voted in {MAX_OPEN_ROUNDS} rounds that other ranks have not voted in"));
        }
        self.next_round[rank.0 as usize] += 1;
        let votes = self.open.entry(round).or_default();
        votes.insert(rank, vote);
        if votes.len() < self.next_round.len() {
            return Ok((round, None));
        }
        let votes = self.open.remove(&round).unwrap_or_default();
        Ok((round, Some(count(votes))))
    }

    /// Whether `rank` has voted in `round`.
    pub(crate) fn has_voted(&self, rank: Rank, round: u64) -> bool {
        self.next_round[rank.0 as usize] > round
    }

    /// The ranks that have not voted in `round`, lowest first.
    pub(crate) fn missing(&self, round: u64) -> impl Iterator<Item = Rank> {
        (0..).map(Rank).zip(&self.next_round).filter(move |&(_, &next)| next <= round).map(|(rank, _)| rank)
    }
}

/// Lookups for the rank that counts the votes: what it must tell the other ranks.
#[cfg(feature = "quic")]
impl Ballot {
    /// The ranks that have voted in `round`, lowest first.
    pub(crate) fn voted(&self, round: u64) -> impl Iterator<Item = Rank> {
        (0..).map(Rank).zip(&self.next_round).filter(move |&(_, &next)| next > round).map(|(rank, _)| rank)
    }

    /// The rounds that lack votes, earliest first.
    pub(crate) fn open_rounds(&self) -> impl Iterator<Item = u64> {
        self.open.keys().copied()
    }
}

/// The verdict over one vote per rank.
fn count(votes: BTreeMap<Rank, Vote>) -> Verdict {
    let mut ready = Vec::with_capacity(votes.len());
    for (rank, vote) in votes {
        match vote {
            Vote::Ready { plan_hash, note } => ready.push((rank, plan_hash, note)),
            Vote::Refuse { reason, text } => return Err(Refusal { rank, reason, text }),
        }
    }
    if let Some((first_rank, first, _)) = ready.first()
        && let Some((rank, hash, _)) = ready.iter().find(|(_, hash, _)| hash != first)
    {
        let text = match (kind(first), kind(hash)) {
            (None, None) => format!(
                "the ranks are about to run different plans: rank {first_rank} has plan {}, rank {rank} has plan {}; \
                 start every rank with the same options and the same inputs",
                short_hex(first),
                short_hex(hash),
            ),
            (first, other) => {
                let named = |kind: Option<&str>| {
                    kind.map_or("a vote on plans".to_owned(), |kind| format!("`{kind}`"))
                };
                format!(
                    "the ranks begin different operations: rank {first_rank} {}, rank {rank} {}; make the same calls in the \
                     same order on all ranks",
                    named(first),
                    named(other),
                )
            }
        };
        return Err(Refusal { rank: *rank, reason: RefusalReason::WrongRequest, text });
    }
    Ok(ready.into_iter().map(|(.., note)| note).collect())
}

/// Bytes of the notes of all ranks, if the round ended well.
pub(crate) fn note_bytes(verdict: &Verdict) -> u64 {
    verdict.iter().flatten().map(|note| note.len() as u64).sum()
}

/// The kind of operation, of a vote that is not on the hash of plans: its hash is a text then, such
/// as `attend: a kyklos call, release 2`. A real hash is no text of 32 printable characters, but
/// for one in 10^13.
fn kind(hash: &[u8; 32]) -> Option<&str> {
    let text = std::str::from_utf8(hash).ok()?;
    text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()).then_some(text)
}

fn short_hex(hash: &[u8; 32]) -> String {
    hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

/// Most rounds that may be open at once: at most this many votes of a rank, with their notes, are
/// kept.
const MAX_OPEN_ROUNDS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(first_byte: u8) -> Vote {
        let mut plan_hash = [0; 32];
        plan_hash[0] = first_byte;
        Vote::ready(plan_hash)
    }

    fn noted(note: &'static str) -> Vote {
        Vote::Ready { plan_hash: [0; 32], note: Bytes::from_static(note.as_bytes()) }
    }

    fn by_rank(votes: impl IntoIterator<Item = Vote>) -> BTreeMap<Rank, Vote> {
        (0..).map(Rank).zip(votes).collect()
    }

    #[test]
    fn a_rank_that_is_rounds_ahead_meets_the_others_in_order() {
        let (mut ballot, empty) = (Ballot::new(2), vec![Bytes::new(); 2]);
        assert_eq!(ballot.cast(Rank(1), ready(1)), Ok((0, None)));
        assert_eq!(ballot.cast(Rank(1), ready(2)), Ok((1, None)));
        assert_eq!(ballot.missing(0).collect::<Vec<_>>(), [Rank(0)]);
        assert_eq!(ballot.cast(Rank(0), ready(1)), Ok((0, Some(Ok(empty.clone())))));
        assert_eq!(ballot.cast(Rank(0), ready(2)), Ok((1, Some(Ok(empty)))));
        assert!(ballot.open.is_empty());
    }

    #[test]
    fn the_lowest_refusal_wins_over_a_hash_mismatch() {
        let refuse = |text: &str| Vote::Refuse { reason: RefusalReason::Failed, text: text.into() };
        let verdict = count(by_rank([ready(1), refuse("first"), ready(2), refuse("second")]));
        assert_eq!(
            verdict,
            Err(Refusal { rank: Rank(1), reason: RefusalReason::Failed, text: "first".into() })
        );
    }

    #[test]
    fn notes_are_in_rank_order_whatever_the_order_of_the_votes() {
        let mut ballot = Ballot::new(3);
        for (rank, note) in [(2, "third"), (0, "first")] {
            assert_eq!(ballot.cast(Rank(rank), noted(note)), Ok((0, None)));
        }
        // A rank that is a round ahead: its second note is not in the first round.
        assert_eq!(ballot.cast(Rank(2), noted("later")), Ok((1, None)));
        let notes = vec![Bytes::from("first"), Bytes::new(), Bytes::from("third")];
        assert_eq!(note_bytes(&Ok(notes.clone())), 10);
        assert_eq!(ballot.cast(Rank(1), noted("")), Ok((0, Some(Ok(notes)))));
    }

    #[test]
    fn the_lowest_rank_whose_plan_differs_is_named() {
        let refusal = count(by_rank([ready(1), ready(1), ready(2), ready(3)])).unwrap_err();
        assert_eq!((refusal.rank, refusal.reason), (Rank(2), RefusalReason::WrongRequest));
        assert!(refusal.text.contains("rank 0 has plan 01") && refusal.text.contains("rank 2 has plan 02"));
    }

    #[test]
    fn kinds_of_operations_are_named_by_their_texts() {
        let cache = Vote::ready(*b"cache: a kyklos key/value cache.");
        let call = Vote::ready(*b"attend: a kyklos call, release 2");
        let refusal = count(by_rank([cache.clone(), call])).unwrap_err();
        assert_eq!(
            refusal.text,
            "the ranks begin different operations: rank 0 `cache: a kyklos key/value cache.`, rank 1 `attend: a kyklos call, \
             release 2`; make the same calls in the same order on all ranks"
        );
        let refusal = count(by_rank([ready(1), cache])).unwrap_err();
        assert!(refusal.text.contains("rank 0 a vote on plans, rank 1 `cache: "), "{}", refusal.text);
    }

    #[test]
    fn open_rounds_are_bounded() {
        let mut ballot = Ballot::new(2);
        for _ in 0..MAX_OPEN_ROUNDS {
            assert!(ballot.cast(Rank(1), ready(0)).is_ok());
        }
        assert!(ballot.cast(Rank(1), ready(0)).is_err());
    }
}
