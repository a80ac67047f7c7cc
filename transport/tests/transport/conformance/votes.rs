//! Agreements end the same way on all ranks.

use std::time::Duration;

use kyklos_transport::{AbortCause, Rank, RefusalReason, TransportError, Vote};
use pollster::block_on;

use super::{Group, LONG, abort_of, close, ready};

pub(crate) fn ranks_agree_when_all_are_ready_with_one_plan(make: fn(u32) -> Group) {
    for world in [1, 3] {
        let group = make(world);
        for round in 0..3 {
            let votes: Vec<_> = group.iter().map(|rank| rank.agree(ready(round), LONG)).collect();
            for vote in votes {
                assert_eq!(block_on(vote), Ok(()));
            }
        }
        close(group);
    }
}

pub(crate) fn the_lowest_refusal_is_the_error_of_all_ranks_and_the_group_continues(make: fn(u32) -> Group) {
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

pub(crate) fn different_plans_are_noticed_by_everyone(make: fn(u32) -> Group) {
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

pub(crate) fn an_agreement_that_times_out_names_the_missing_voters(make: fn(u32) -> Group) {
    for silent in 0..3 {
        let group = make(3);
        // Long enough for every rank to learn which vote is missing, early voters included.
        let patience = Duration::from_secs(2);
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

pub(crate) fn a_rank_that_leaves_instead_of_voting_is_an_error(make: fn(u32) -> Group) {
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
