//! Groups over a simulated network. Every random event of a world comes from one seed (ADR 0017).
//!
//! `KYKLOS_SEEDS=from..to cargo test -p kyklos-transport --features quic --test transport
//! simulation` runs other seeds.

mod again;
mod forming;
mod found;
mod identities;
mod judge;
mod many;
mod network;
mod outages;
mod program;
mod rng;
mod stage;
mod unreachable;
mod votes;
mod waits;
mod world;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::amount::amount;
use judge::judge;
use network::Cut;
use program::Sabotage;
use stage::{Played, Secret, play};
use world::{FaultKind, World};

/// The seeds of `KYKLOS_SEEDS`; without it the first ones, `sample` or `all` of them.
fn seeds(sample: u64, all: u64) -> Range<u64> {
    let Ok(text) = std::env::var("KYKLOS_SEEDS") else { return 0..amount(sample, all) };
    let range = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    range.unwrap_or_else(|| panic!("KYKLOS_SEEDS is from..to, such as 100..2000, not {text:?}"))
}

#[test]
fn every_seeded_world_keeps_the_contract() {
    let started = Instant::now();
    let mut failures = Vec::new();
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let mut simulated = Duration::ZERO;
    let mut traces = 0_u64;
    let seeds = seeds(180, 400);
    for seed in seeds.clone() {
        let world = World::draw(seed);
        let played = play(&world, &Secret::default());
        *counts.entry(in_a_word(&world, &played)).or_default() += 1;
        *counts.entry("packets").or_default() += played.trace.packets;
        simulated += played.ended;
        traces = traces.rotate_left(1) ^ played.trace.hash;
        let (wrong, by_chance) = judge(&world, &played);
        if by_chance {
            *counts.entry("silent by chance").or_default() += 1;
            println!("seed {seed}: a link fell silent by chance");
        }
        if !wrong.is_empty() {
            failures.push(seed);
            eprintln!("KYKLOS_SEEDS={seed}..{} plays this again: {world:#?}", seed + 1);
            eprintln!("struck: {:?}", played.struck);
            wrong.iter().for_each(|one| eprintln!("  seed {seed}: {one}"));
        }
    }
    let took = started.elapsed();
    println!("{seeds:?} in {took:?}, simulated {simulated:?}, traces {traces:016x}: {counts:?}");
    // If the sample lacked a kind of fault, that kind would not be tested.
    if std::env::var_os("KYKLOS_SEEDS").is_none() {
        for kind in KINDS {
            assert!(counts.contains_key(kind), "no seed has `{kind}`: {counts:?}");
        }
    }
    assert!(failures.is_empty(), "{} seeds fail: {failures:?}", failures.len());
}

/// All results of `in_a_word`.
const KINDS: [&str; 11] = [
    "no fault",
    "cut",
    "cut and healed",
    "crash",
    "crash and restart",
    "dropped",
    "abort",
    "refusal",
    "slow reader",
    "stuck",
    "slow device",
];

/// The kind of the world, for statistics.
fn in_a_word(world: &World, played: &Played) -> &'static str {
    match world.fault.as_ref().filter(|_| played.struck.is_some()).map(|fault| &fault.kind) {
        None => "no fault",
        Some(FaultKind::Partition { heals: None, .. } | FaultKind::Link { heals: None, .. }) => "cut",
        Some(FaultKind::Partition { .. } | FaultKind::Link { .. }) => "cut and healed",
        Some(FaultKind::Crash { restarts: None, .. }) => "crash",
        Some(FaultKind::Crash { .. }) => "crash and restart",
        Some(FaultKind::Dropped { .. }) => "dropped",
        Some(FaultKind::Abort { .. }) => "abort",
        Some(FaultKind::Refuse { .. }) => "refusal",
        Some(FaultKind::Slow { .. }) => "slow reader",
        Some(FaultKind::Computes { by: None, .. }) => "stuck",
        Some(FaultKind::Computes { .. }) => "slow device",
    }
}

#[test]
fn a_seed_gives_the_same_packets_and_calls_every_time() {
    let mut differ = Vec::new();
    for seed in seeds(4, 12) {
        let world = World::draw(seed);
        let [first, second] = [0; 2].map(|_| play(&world, &Secret::default()));
        let (first, second) = (format!("{first:?}"), format!("{second:?}"));
        if first != second {
            let from = first.bytes().zip(second.bytes()).take_while(|(one, other)| one == other).count();
            let shown = |text: &str| text[from.saturating_sub(200)..text.len().min(from + 200)].to_owned();
            differ.push(format!("seed {seed}: {}\n  or {}", shown(&first), shown(&second)));
        }
    }
    assert!(differ.is_empty(), "{} worlds differ: {}", differ.len(), differ.join("\n"));
}

#[test]
fn survivors_form_one_group_again_or_none() {
    let started = Instant::now();
    let mut failures = Vec::new();
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    // Fewer than of the other worlds, which take half as long.
    let seeds = seeds(50, 300);
    for seed in seeds.clone() {
        let world = again::World::draw(seed);
        let played = again::play(&world);
        for life in &played.lives {
            *counts.entry("groups").or_default() += life.stays.len() as u64;
            *counts
                .entry(if matches!(life.end, again::End::Finished) { "finished" } else { "alone" })
                .or_default() += 1;
        }
        let again = played.lives.iter().flat_map(|life| &life.stays).filter(|stay| stay.epoch > 0);
        let sizes = again.map(|stay| stay.members.len() as u32 == world.ranks);
        for whole in sizes {
            *counts.entry(if whole { "again in all" } else { "again in fewer" }).or_default() += 1;
        }
        let wrong = again::judge(&world, &played);
        if !wrong.is_empty() {
            failures.push(seed);
            eprintln!("KYKLOS_SEEDS={seed}..{} plays this again: {world:#?}", seed + 1);
            played.lives.iter().for_each(|life| eprintln!("  {life:?}"));
            wrong.iter().for_each(|one| eprintln!("  seed {seed}: {one}"));
        }
    }
    println!("{seeds:?} in {:?}: {counts:?}", started.elapsed());
    if std::env::var_os("KYKLOS_SEEDS").is_none() {
        for outcome in ["finished", "alone", "again in all", "again in fewer"] {
            assert!(counts.contains_key(outcome), "no seed has `{outcome}`: {counts:?}");
        }
    }
    assert!(failures.is_empty(), "{} seeds fail: {failures:?}", failures.len());
}

/// A world without a fault.
fn quiet_world() -> World {
    let mut world = World::draw(1);
    world.ranks = 3;
    world.starts = vec![Duration::ZERO; 3];
    world.fault = None;
    world
}

fn found(secret: Secret) -> String {
    let world = quiet_world();
    judge(&world, &play(&world, &secret)).0.join("\n")
}

#[test]
fn planted_faults_are_found() {
    assert_eq!(found(Secret::default()), "");
    let sabotage = |what| found(Secret { sabotage: Some((1, what)), ..Secret::default() });
    let wrong = sabotage(Sabotage::WrongByte);
    assert!(wrong.contains("from rank 1 has come with wrong bytes"), "{wrong}");
    let wrong = sabotage(Sabotage::WrongNote);
    assert!(wrong.contains("the notes of op 0 have come wrong"), "{wrong}");
    let wrong = sabotage(Sabotage::Late);
    assert!(wrong.contains("rank 1 (life 0): waited longer than its deadline"), "{wrong}");
    let wrong = sabotage(Sabotage::Stays);
    assert!(wrong.contains("an error without any fault") && wrong.contains("Close"), "{wrong}");
    let cut = |cut| found(Secret { cut: Some((Duration::from_millis(300), cut)), ..Secret::default() });
    let wrong = cut(Cut::between(1, 2, false));
    assert!(wrong.contains("an error without any fault"), "{wrong}");
}
