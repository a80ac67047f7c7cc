//! Two ranks cannot reach each other, and both reach all others: the group continues without one of
//! them, whether it waits for every rank (`rejoin`) or forms of the survivors only (`shrink`).

use std::time::Duration;

use crate::simulation::again::{End, Strike, World, judge, play};

/// Ranks `a` and `b` lose each other. Returns the rank that the group continues without, its error,
/// and the case for messages.
fn one_is_dropped(everyone: bool, ranks: u32, (a, b): (u32, u32)) -> (u32, String, String) {
    let strikes = vec![(Duration::from_secs(2), Strike::Link { a, b })];
    let world = World { ranks, everyone, strikes, lanes: 1, ..World::draw(1) };
    let played = play(&world);
    let case = format!("everyone: {everyone}, {a} and {b} of {ranks}: {:#?}", played.lives);
    assert_eq!(judge(&world, &played), Vec::<String>::new(), "{case}");
    let mut dropped = Vec::new();
    for life in &played.lives {
        let last = life.stays.last().unwrap();
        match &life.end {
            End::Finished => {
                assert_eq!(last.members.len() as u32, ranks - 1, "{case}");
                let (left, entered) = (life.stays[0].left, last.entered);
                assert!(entered < left + Duration::from_secs(30), "{case}");
            }
            End::Alone(error) if [a, b].contains(&life.rank) => dropped.push((life.rank, error.to_string())),
            _ => panic!("rank {}: {case}", life.rank),
        }
    }
    let [(rank, text)] = &dropped[..] else { panic!("{case}") };
    (*rank, text.clone(), case)
}

const PAIRS: [(u32, (u32, u32)); 3] = [(3, (1, 2)), (4, (1, 3)), (5, (2, 3))];

#[test]
fn a_pair_that_cannot_reach_each_other_costs_the_group_one_rank() {
    for (ranks, (a, b)) in PAIRS {
        let (dropped, text, case) = one_is_dropped(true, ranks, (a, b));
        assert_eq!(dropped, b, "{case}");
        let pair = format!("rank {a} and rank {b} cannot reach each other");
        assert!(text.contains(&pair), "{text}: {case}");
    }
}

/// The first of the pair that reports the dead link names the other, which counts as lost then. The
/// survivors do not wait for it.
#[test]
fn survivors_continue_without_one_rank_of_a_pair_that_cannot_reach_each_other() {
    for (ranks, pair) in PAIRS {
        let (dropped, text, case) = one_is_dropped(false, ranks, pair);
        let continued = format!("the group has continued without rank {dropped}");
        let named = format!("rank {} and rank {} cannot reach each other", pair.0, pair.1);
        assert!(text.contains(&continued) || text.contains(&named), "{text}: {case}");
    }
}
