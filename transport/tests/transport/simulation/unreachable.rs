//! Two ranks cannot reach each other, and both reach all others: the group continues without one of
//! them, whether it waits for every rank (`rejoin`) or forms of the survivors only (`shrink`). The
//! first group does not form, and every rank names them.

use std::time::Duration;

use kyklos_transport::quic::LinkProfile;

use crate::simulation::again::{End, Strike, World, judge, play};
use crate::simulation::network::Cut;
use crate::simulation::program::Log;
use crate::simulation::stage::{self as first, Secret};
use crate::simulation::world::{self as drawn, Fault, FaultKind, When};

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

/// What every rank says of a first group that cannot form because of `cut`, with ranks that start
/// at these times (ms).
fn refused_while_forming(cut: Cut, starts: &[u64], profile: LinkProfile) -> Vec<String> {
    refused_from(Duration::ZERO, cut, starts, profile)
}

/// The same of a cut at this time; empty where the group has formed before.
fn refused_from(at: Duration, cut: Cut, starts: &[u64], profile: LinkProfile) -> Vec<String> {
    let starts: Vec<Duration> = starts.iter().copied().map(Duration::from_millis).collect();
    let mut world =
        drawn::World { ranks: starts.len() as u32, starts, fault: None, profile, ..drawn::World::draw(1) };
    (world.conditions.latency, world.conditions.loss_per_mille) = (Duration::from_millis(20), 0);
    let secret = Secret { cut: Some((at, cut)), sabotage: None };
    let played = first::play(&world, &secret);
    let said = |log: &Log| log.calls[0].result.as_ref().map_or_else(ToString::to_string, |_| String::new());
    played.logs.iter().map(said).collect()
}

/// Whoever starts last, and whichever of the ranks comes to its deadline first.
#[test]
fn every_rank_names_the_pair_that_keeps_the_first_group_from_forming() {
    for (lan, starts) in [
        (true, [0, 0, 0]),
        (true, [8000, 0, 0]),
        (true, [0, 9000, 0]),
        (true, [0, 0, 9000]),
        // Just before the deadline of rank 0.
        (true, [0, 0, 19_500]),
        (true, [0, 19_500, 19_500]),
        (true, [15_000, 0, 0]),
        (false, [0, 0, 0]),
        (false, [9000, 0, 0]),
        (false, [0, 0, 59_000]),
    ] {
        let profile = if lan { LinkProfile::Lan } else { LinkProfile::Wan };
        for cut in [Cut::between(1, 2, false), Cut::between(2, 1, true), Cut::between(1, 2, true)] {
            let case = format!("{profile}, {starts:?}, {cut:?}");
            for (rank, text) in refused_while_forming(cut, &starts, profile).iter().enumerate() {
                let pair = "rank 2 did not reach rank 1 at 10.0.0.2:7000";
                assert!(
                    text.contains(pair) && text.contains("let UDP through"),
                    "rank {rank}: {text}: {case}"
                );
                assert!(
                    !text.contains("was lost") && !text.contains("did not come"),
                    "rank {rank}: {text}: {case}"
                );
            }
        }
    }
}

/// A rank that has all its connections waits for the start as long as rank 0 waits for the last
/// reports.
#[test]
fn no_rank_that_is_ready_gives_up_before_the_pair_of_a_late_rank_is_known() {
    for (profile, late) in [(LinkProfile::Lan, 19_600), (LinkProfile::Wan, 59_600)] {
        let texts = refused_while_forming(Cut::between(2, 3, false), &[0, 0, 0, late], profile);
        for (rank, text) in texts.iter().enumerate() {
            assert!(text.contains("rank 3 did not reach rank 2 at 10.0.0.3:7000"), "rank {rank}: {text}");
            assert!(!text.contains("gave up"), "rank {rank}: {text}");
        }
    }
}

/// They are lost, and no firewall is to blame.
#[test]
fn two_ranks_that_fall_silent_at_once_while_the_group_forms_are_no_pairs() {
    let mut named = 0;
    for at in (20..400).step_by(20).map(Duration::from_millis) {
        let texts = refused_from(at, Cut::around(&[1, 2], 5, false), &[0; 5], LinkProfile::Lan);
        for rank in [0, 3, 4] {
            let text = &texts[rank];
            assert!(!text.contains("did not reach"), "{at:?}, rank {rank}: {text}");
            named += u32::from(text.contains("was lost"));
        }
    }
    assert!(named > 4, "{named}");
}

#[test]
fn all_pairs_are_named_and_no_other_rank() {
    let cut = Cut::around(&[1], 5, false).without(&[(0, 1), (1, 0), (1, 2), (2, 1)]);
    for (rank, text) in refused_while_forming(cut, &[0; 5], LinkProfile::Lan).iter().enumerate() {
        for pair in
            ["rank 3 did not reach rank 1 at 10.0.0.2:7000", "rank 4 did not reach rank 1 at 10.0.0.2:7000"]
        {
            assert!(text.contains(pair), "rank {rank}: {text}");
        }
        assert!(!text.contains("rank 2 did") && !text.contains("reach rank 2"), "rank {rank}: {text}");
    }
}

/// The ranks that dial it in vain are not the cause.
#[test]
fn a_rank_that_dies_while_the_group_forms_is_named_and_no_pair() {
    let mut named = 0;
    for at in (20..400).step_by(20).map(Duration::from_millis) {
        let mut world = drawn::World { ranks: 3, starts: vec![Duration::ZERO; 3], ..drawn::World::draw(1) };
        (world.conditions.latency, world.conditions.loss_per_mille) = (Duration::from_millis(20), 0);
        let kind = FaultKind::Crash { rank: 1, restarts: None };
        world.fault = Some(Fault { kind, when: When::At(at) });
        for log in first::play(&world, &Secret::default()).logs.iter().filter(|log| log.rank != 1) {
            let Err(error) = &log.calls[0].result else { continue };
            let text = error.to_string();
            assert!(text.contains("rank 1"), "{at:?}, rank {}: {text}", log.rank);
            assert!(!text.contains("did not reach"), "{at:?}, rank {}: {text}", log.rank);
            named += 1;
        }
    }
    assert!(named > 4, "{named}");
}
