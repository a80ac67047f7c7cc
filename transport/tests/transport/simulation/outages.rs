//! Links between data centres: long, lossy, and away for seconds. No healthy rank counts as dead,
//! and every dead one does within the limit of the profile.

use std::time::Duration;

use kyklos_transport::quic::LinkProfile;

use crate::simulation::identities::MOST_RANKS;
use crate::simulation::judge::judge;
use crate::simulation::network::{Conditions, Cut};
use crate::simulation::rng::Rng;
use crate::simulation::seeds;
use crate::simulation::stage::{Secret, play};
use crate::simulation::world::{Boundary, Fault, FaultKind, Operation, Phase, When, World};

/// What happens in a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Nothing,
    Outage(Duration),
    Cut,
    Crash,
}

fn draw(seed: u64, profile: LinkProfile, event: Event) -> World {
    let mut rng = Rng::new(seed, 7);
    let ranks = rng.within(2..u64::from(MOST_RANKS) + 1) as u32;
    let latency = Duration::from_millis([1, 20, 100, 300][rng.within(0..4) as usize]);
    let conditions = Conditions {
        latency,
        jitter: rng.micros(0..latency.as_micros() as u64 / 4 + 1),
        loss_per_mille: [0, 10, 50, 100][rng.within(0..4) as usize],
        reorder_per_mille: rng.within(0..100),
        duplicate_per_mille: rng.within(0..100),
        bytes_per_second: [1 << 20, 1 << 27][rng.within(0..2) as usize],
    };
    let operations = (0..3).map(|_| {
        let bytes = rng.within(1000..40_000) as usize;
        if rng.per_mille(500) { Operation::Ring { bytes } } else { Operation::AllToAll { bytes } }
    });
    let operations: Vec<Operation> = operations.collect();
    let rank = rng.within(0..u64::from(ranks)) as u32;
    let other = (rank + rng.within(1..u64::from(ranks)) as u32) % ranks;
    let cut = |rng: &mut Rng, heals| match rng.per_mille(500) {
        true => FaultKind::Link { a: rank, b: other, one_way: rng.per_mille(300), heals },
        false => FaultKind::Partition { side: vec![rank], one_way: rng.per_mille(300), heals },
    };
    let kind = match event {
        Event::Nothing => None,
        Event::Outage(lasts) => Some(cut(&mut rng, Some(lasts))),
        Event::Cut => Some(cut(&mut rng, None)),
        Event::Crash => Some(FaultKind::Crash { rank, restarts: None }),
    };
    let phase = [Phase::BeforeVote, Phase::Agreed, Phase::Posted][rng.within(0..3) as usize];
    let at = Boundary { op: rng.within(0..3), phase };
    let when = if rng.per_mille(700) { When::Boundary(at) } else { When::At(rng.millis(0..6000)) };
    World {
        seed,
        ranks,
        conditions,
        starts: (0..ranks).map(|_| rng.millis(0..500)).collect(),
        operations,
        fault: kind.map(|kind| Fault { kind, when }),
        mtu: None,
        lanes: 1,
        profile,
    }
}

fn all_play_well(profile: LinkProfile, events: &[Event], sample: u64, all: u64) {
    let (mut failures, mut struck) = (Vec::new(), 0);
    for seed in seeds(sample, all) {
        let world = draw(seed, profile, events[seed as usize % events.len()]);
        let played = play(&world, &Secret::default());
        struck += u32::from(played.struck.is_some());
        let (wrong, by_chance) = judge(&world, &played);
        if !wrong.is_empty() || by_chance {
            failures.push(seed);
            eprintln!("KYKLOS_SEEDS={seed}..{} plays this again: {world:#?}", seed + 1);
            eprintln!("struck: {:?}", played.struck);
            wrong.iter().for_each(|one| eprintln!("  seed {seed}: {one}"));
        }
    }
    println!("{profile} {events:?}: {struck} worlds had a fault");
    assert!(failures.is_empty(), "{} seeds fail: {failures:?}", failures.len());
}

#[test]
fn outages_of_up_to_ten_seconds_end_nothing_between_data_centres() {
    let outages = [1, 3, 10].map(|seconds| Event::Outage(Duration::from_secs(seconds)));
    all_play_well(LinkProfile::Wan, &outages, 60, 600);
}

#[test]
fn dead_ranks_and_links_between_data_centres_are_found_within_the_limit() {
    all_play_well(LinkProfile::Wan, &[Event::Cut, Event::Crash], 40, 400);
}

/// A rank that hears the others and is not heard by them. Before they give it up, the other
/// direction is cut too, so that it is not told: that must not cost it another silence.
fn an_unheard_rank_knows_soon(rank: u32) {
    let mut world = draw(1, LinkProfile::Wan, Event::Cut);
    let at = Duration::from_secs(20);
    (world.ranks, world.starts) = (3, vec![Duration::ZERO; 3]);
    world.conditions.latency = Duration::from_millis(20);
    world.conditions.jitter = Duration::ZERO;
    (world.conditions.loss_per_mille, world.conditions.reorder_per_mille) = (0, 0);
    // Slow enough that it still lasts then.
    world.conditions.bytes_per_second = 1 << 20;
    world.operations = vec![Operation::Ring { bytes: 16 << 20 }; 3];
    let kind = FaultKind::Partition { side: vec![rank], one_way: true, heals: None };
    world.fault = Some(Fault { kind, when: When::At(at) });
    let whole = Cut::around(&[rank], 3, false);
    let played =
        play(&world, &Secret { cut: Some((at + Duration::from_millis(14_900), whole)), sabotage: None });
    assert_eq!(judge(&world, &played), (Vec::new(), false));
    let ended = played.logs.iter().flat_map(|log| &log.calls).map(|call| call.ended).max().unwrap();
    assert!(ended > at && ended < at + Duration::from_secs(22), "rank {rank}: {:#?}", played.logs);
}

#[test]
fn a_rank_that_is_not_heard_knows_it_as_soon_as_the_others() {
    an_unheard_rank_knows_soon(1);
    an_unheard_rank_knows_soon(0);
}

#[test]
fn no_healthy_rank_counts_as_dead_on_a_long_lossy_path() {
    all_play_well(LinkProfile::Wan, &[Event::Nothing], 30, 300);
    all_play_well(LinkProfile::Lan, &[Event::Nothing], 30, 300);
}

#[test]
fn dead_ranks_on_a_long_lossy_path_are_found_soon() {
    all_play_well(LinkProfile::Lan, &[Event::Cut, Event::Crash], 40, 400);
}
