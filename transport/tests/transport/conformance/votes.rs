//! Agreements end the same way on all ranks.

use std::time::Duration;

use bytes::Bytes;
use kyklos_transport::{
    AbortCause, Group, MAX_NOTE_BYTES, Posted, Rank, RefusalReason, TransportError, Vote,
};
use pollster::block_on;

use super::{LONG, Ranks, abort_of, close, payload, ready};

pub(crate) fn ranks_agree_when_all_are_ready_with_one_plan(make: fn(u32) -> Ranks) {
    for size in [1, 3] {
        let group = make(size);
        for round in 0..3 {
            let votes: Vec<_> = group.iter().map(|rank| rank.agree(ready(round), LONG)).collect();
            for vote in votes {
                assert_eq!(block_on(vote), Ok(vec![Bytes::new(); size as usize]));
            }
        }
        close(group);
    }
}

pub(crate) fn the_lowest_refusal_is_the_error_of_all_ranks_and_the_group_continues(make: fn(u32) -> Ranks) {
    let group = make(4);
    let refuse = |reason, text: &str| Vote::Refuse { reason, text: text.into() };
    let ballots = [
        ready(1),
        refuse(RefusalReason::WrongRequest, "3 heads are too few"),
        ready(9),
        refuse(RefusalReason::Failed, "out of memory"),
    ];
    let votes: Vec<_> = group.iter().zip(ballots).map(|(rank, vote)| rank.agree(vote, LONG)).collect();
    for vote in votes {
        let expected = TransportError::Refused {
            rank: Rank(1),
            reason: RefusalReason::WrongRequest,
            text: "3 heads are too few".into(),
        };
        assert_eq!(block_on(vote), Err(expected));
    }
    let votes: Vec<_> = group.iter().map(|rank| rank.agree(ready(7), LONG)).collect();
    assert!(votes.into_iter().all(|vote| block_on(vote).is_ok()));
    close(group);
}

pub(crate) fn different_plans_are_noticed_by_everyone(make: fn(u32) -> Ranks) {
    let group = make(3);
    let votes: Vec<_> =
        group.iter().map(|rank| rank.agree(ready(u8::from(rank.rank() == Rank(2))), LONG)).collect();
    let errors: Vec<_> = votes.into_iter().map(|vote| block_on(vote).unwrap_err()).collect();
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    let TransportError::Refused { rank, reason, text } = &errors[0] else { panic!("{errors:?}") };
    assert_eq!((*rank, *reason), (Rank(2), RefusalReason::WrongRequest));
    assert!(text.contains("000000") && text.contains("010101"), "{text}");
    close(group);
}

fn with_note(byte: u8, note: &Bytes) -> Vote {
    Vote::Ready { plan_hash: [byte; 32], note: note.clone() }
}

/// Every rank votes with its note, the highest rank first.
fn vote_all(group: &Ranks, byte: u8, notes: &[Bytes]) -> Vec<Posted<Vec<Bytes>>> {
    let votes = group.iter().zip(notes).rev().map(|(rank, note)| rank.agree(with_note(byte, note), LONG));
    let mut votes: Vec<_> = votes.collect();
    votes.reverse();
    votes
}

pub(crate) fn notes_of_all_ranks_arrive_whole_and_in_rank_order(make: fn(u32) -> Ranks) {
    for size in [1, 4] {
        let group = make(size);
        let of = |bytes: [usize; 4]| {
            (0..size as usize).map(|rank| payload(bytes[rank], rank as u64 + 1)).collect::<Vec<_>>()
        };
        // Unlike lengths, some of them 0; the same notes on all ranks; a note of one rank only; none at
        // all.
        let same = vec![Bytes::from_static(b"the same"); size as usize];
        let rounds = [
            of([3, 0, 200, 17]),
            same,
            of([0, 0, 0, 1]),
            of([0, 0, 0, 0]),
            of([0, 40, 0, 0]),
            of([5, 6, 7, 8]),
        ];
        for (round, notes) in (0..).zip(rounds) {
            for (rank, vote) in vote_all(&group, round, &notes).into_iter().enumerate() {
                assert_eq!(block_on(vote), Ok(notes.clone()), "round {round} on rank {rank}");
            }
        }
        close(group);
    }
}

pub(crate) fn notes_of_the_longest_size_arrive_and_one_byte_more_is_refused_at_the_caller(
    make: fn(u32) -> Ranks,
) {
    let group = make(3);
    let longest: Vec<Bytes> = (0..3).map(|rank| payload(MAX_NOTE_BYTES, rank + 9)).collect();
    for (rank, one) in group.iter().enumerate() {
        // Refused at once, and not counted as a vote: no other rank has voted.
        let error = block_on(one.agree(with_note(1, &payload(MAX_NOTE_BYTES + 1, 3)), LONG)).unwrap_err();
        let text = format!("the note of rank {rank}'s vote has 1025 bytes, at most 1024 are allowed");
        assert_eq!(error, TransportError::Misuse { text });
        assert_eq!(one.outstanding(), []);
    }
    for round in 0..2 {
        for vote in vote_all(&group, round, &longest) {
            assert_eq!(block_on(vote), Ok(longest.clone()));
        }
    }
    assert!(group.iter().all(|one| !one.recorder().is_aborted()));
    close(group);
}

pub(crate) fn a_refusal_wins_over_notes(make: fn(u32) -> Ranks) {
    let group = make(3);
    let notes: Vec<Bytes> = (0..3).map(|rank| payload(500, rank)).collect();
    for refuses in 0..3 {
        let vote = |rank: &Group| match rank.rank() == Rank(refuses) {
            true => Vote::Refuse { reason: RefusalReason::Failed, text: "no memory".into() },
            false => with_note(1, &notes[rank.rank().0 as usize]),
        };
        let votes: Vec<_> = group.iter().map(|rank| rank.agree(vote(rank), LONG)).collect();
        let (rank, text) = (Rank(refuses), "no memory".to_owned());
        let expected = TransportError::Refused { rank, reason: RefusalReason::Failed, text };
        for vote in votes {
            assert_eq!(block_on(vote), Err(expected.clone()));
        }
        // The notes of a refused round are gone.
        for vote in vote_all(&group, 2, &notes) {
            assert_eq!(block_on(vote), Ok(notes.clone()));
        }
    }
    close(group);
}

pub(crate) fn different_plans_are_noticed_whatever_the_notes(make: fn(u32) -> Ranks) {
    let group = make(4);
    let note = payload(64, 1);
    let plan = |rank: &Group| with_note(u8::from(rank.rank() >= Rank(2)), &note);
    let votes: Vec<_> = group.iter().map(|rank| rank.agree(plan(rank), LONG)).collect();
    for vote in votes {
        let error = block_on(vote).unwrap_err();
        let TransportError::Refused { rank, reason, text } = &error else { panic!("{error:?}") };
        assert_eq!((*rank, *reason), (Rank(2), RefusalReason::WrongRequest));
        assert!(text.contains("rank 0 has plan 000000") && text.contains("rank 2 has plan 010101"), "{text}");
    }
    close(group);
}

/// One rank after the other votes in all rounds before the others vote in any.
pub(crate) fn notes_of_consecutive_rounds_do_not_mix(make: fn(u32) -> Ranks) {
    const ROUNDS: u64 = 20;
    for ahead in 0..3 {
        let group = make(3);
        let notes = |round: u64| -> Vec<Bytes> {
            (0..3).map(|rank| payload(((round * 7 + rank * 50) % 130) as usize, round * 10 + rank)).collect()
        };
        let vote = |rank: u32, round: u64| {
            group[rank as usize].agree(with_note(round as u8, &notes(round)[rank as usize]), LONG)
        };
        let mut votes: Vec<_> = (0..ROUNDS).map(|round| (round, vote(ahead, round))).collect();
        std::thread::sleep(Duration::from_millis(50));
        for round in 0..ROUNDS {
            votes.extend((0..3).filter(|&rank| rank != ahead).map(|rank| (round, vote(rank, round))));
        }
        for (round, vote) in votes {
            assert_eq!(block_on(vote), Ok(notes(round)), "round {round}, rank {ahead} is ahead");
        }
        close(group);
    }
}

pub(crate) fn an_agreement_that_times_out_names_the_missing_voters(make: fn(u32) -> Ranks) {
    for silent in 0..3 {
        let group = make(3);
        // Long enough for every rank to learn which vote is missing, early voters included.
        let patience = Duration::from_secs(4);
        let voters = group.iter().rev().filter(|rank| rank.rank() != Rank(silent));
        let votes: Vec<_> = voters.map(|rank| (rank.rank(), rank.agree(ready(1), patience))).collect();
        for (voter, vote) in votes {
            let error = block_on(vote).unwrap_err();
            let TransportError::Deadline { pending, waited } = &error else { panic!("{error:?}") };
            assert_eq!((pending.operation, pending.peer), ("agree", Rank(silent)), "of rank {voter}");
            assert_eq!(*waited, patience);
        }
        // No rank waits for the missing vote any more.
        close(group);
    }
}

pub(crate) fn a_rank_that_leaves_instead_of_voting_is_an_error(make: fn(u32) -> Ranks) {
    for (leaver, voter) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
        for vote_first in [true, false] {
            let group = make(3);
            // The third rank has not voted either, but it still may.
            let vote = || group[voter as usize].agree(ready(1), LONG);
            let early = vote_first.then(vote);
            std::thread::sleep(Duration::from_millis(100));
            let _leaving = group[leaver as usize].close(LONG);
            std::thread::sleep(Duration::from_millis(100));
            let abort = abort_of(block_on(early.unwrap_or_else(vote)).unwrap_err());
            assert_eq!(abort.culprit, Rank(leaver), "{abort}");
            let AbortCause::Failed(text) = &abort.cause else { panic!("{abort}") };
            let waited = format!("left the group while rank {voter} waited for its vote");
            assert!(text.contains(&waited), "{text}");
        }
    }
}
