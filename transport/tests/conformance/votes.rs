//! Agreements end alike on all ranks.

use kyklos_transport::{Rank, TransportError, Vote};
use pollster::block_on;

use super::{Group, LONG, close, ready};

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

pub(crate) fn the_lowest_refusal_is_everyones_error_and_the_group_goes_on(make: fn(u32) -> Group) {
    let group = make(4);
    let refuse = |exit, text: &str| Vote::Refuse { exit, text: text.into() };
    let ballots = [ready(1), refuse(2, "3 heads are too few"), ready(9), refuse(1, "out of memory")];
    let votes: Vec<_> = group.iter().zip(ballots).map(|(rank, vote)| rank.agree(vote, LONG)).collect();
    for vote in votes {
        let expected = TransportError::Refused { rank: Rank(1), exit: 2, text: "3 heads are too few".into() };
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
    let TransportError::Refused { rank, exit, text } = &errors[0] else { panic!("{errors:?}") };
    assert_eq!((*rank, *exit), (Rank(2), 2));
    assert!(text.contains("000000") && text.contains("010101"), "{text}");
    close(group);
}
