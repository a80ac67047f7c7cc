//! Two ranks cannot reach each other, and both reach all others: the group continues without one of them.

use std::time::Duration;

use crate::simulation::again::{End, Strike, World, judge, play};

/// Ranks `a` and `b` lose each other. The others and the lower one of the pair finish, and the error of the higher one names both.
fn the_higher_one_is_dropped(ranks: u32, (a, b): (u32, u32)) {
    let strikes = vec![(Duration::from_secs(2), Strike::Link { a, b })];
    let world = World { ranks, everyone: true, strikes, lanes: 1, ..World::draw(1) };
    let played = play(&world);
    let case = format!("{a} and {b} of {ranks}: {:#?}", played.lives);
    assert_eq!(judge(&world, &played), Vec::<String>::new(), "{case}");
    for life in &played.lives {
        let last = life.stays.last().unwrap();
        match &life.end {
            End::Finished if life.rank != b => {
                assert_eq!(last.members.len() as u32, ranks - 1, "{case}");
                let (left, entered) = (life.stays[0].left, last.entered);
                assert!(entered < left + Duration::from_secs(30), "{case}");
            }
            End::Alone(error) if life.rank == b => {
                let text = error.to_string();
                let pair = format!("rank {a} and rank {b} cannot reach each other");
                assert!(text.contains(&pair), "{text}: {case}");
            }
            _ => panic!("rank {}: {case}", life.rank),
        }
    }
}

#[test]
fn a_pair_that_cannot_reach_each_other_costs_the_group_one_rank() {
    the_higher_one_is_dropped(3, (1, 2));
    the_higher_one_is_dropped(4, (1, 3));
    the_higher_one_is_dropped(5, (2, 3));
}
