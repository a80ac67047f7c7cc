//! Ranks that are killed, stopped and restarted at every step of their plans. Every other rank
//! names the culprit within seconds, no rank hangs, and the results equal the results of
//! undisturbed runs, byte for byte.
//!
//! Every rank is a process, over QUIC with the default settings. A rank pauses before a step until
//! the test orders it to continue, so the failure happens exactly at this step. `soak.rs` has
//! random failures, for any duration.
//!
//! A program of its own, because these tests depend on time: few others compute while they run.

#![cfg(unix)]
#![expect(unreachable_pub, reason = "`common` is shared by several programs")]
#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod accident;
#[path = "../../amount.rs"]
mod amount;
#[path = "../common/mod.rs"]
mod common;
#[path = "../../free_address.rs"]
mod free_address;
mod network;
mod processes;
mod rank;
mod router;
mod soak;
mod work;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use amount::amount;
use kyklos_transport::Rank;
use processes::{End, Group};
use work::Work;

/// A ring, an all-to-all, and both.
const WORKS: [Work; 3] = [
    Work { ulysses: 1, ring: 3, seed: 1 },
    Work { ulysses: 3, ring: 1, seed: 2 },
    Work { ulysses: 2, ring: 2, seed: 3 },
];

/// All survivors report the failure within this time, with the default settings: after 2.4 s, and
/// on a machine with so much other work that round trips take a second, a rank may be silent for
/// eight of them longer, which are 10.4 s, and each heartbeat may be late.
const KNOWN_UNDER_LOAD: Duration = Duration::from_secs(25);

/// Steps at which ranks of one group fail, one after another.
const STEPS_OF_GROUP: usize = 3;

/// Causes a failure at every step of the plans, of each rank in turn. Groups run in parallel,
/// because they mostly wait. Only one test at a time does this, because each test has dozens of
/// processes.
fn at_every_step(works: &[Work], accident: impl Fn(&mut Group, Work, u32, usize) + Sync) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        for &work in works {
            let set = work.set();
            let steps = |rank| set.plan(Rank(rank)).steps.len();
            let longest = (0..work.ranks()).map(steps).max().unwrap();
            // A sample has the last step and every fifth step. So each of 3 or 4 ranks has its turn.
            let every = amount(5, 1);
            let all: Vec<(u32, usize)> = (0..longest)
                .filter(|step| step % every == 0 || step + 1 == longest)
                .map(|step| (step as u32 % work.ranks(), step))
                .map(|(rank, step)| (rank, step.min(steps(rank) - 1)))
                .collect();
            for some in all.chunks(STEPS_OF_GROUP) {
                let (some, accident) = (some.to_vec(), &accident);
                scope.spawn(move || {
                    let mut group = Group::new(work.ranks(), false);
                    for (rank, step) in some {
                        accident(&mut group, work, rank, step);
                    }
                });
            }
        }
    });
}

fn right(work: Work) -> Vec<Vec<u8>> {
    static KNOWN: Mutex<Vec<(Work, Vec<Vec<u8>>)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap();
    if let Some((_, results)) = known.iter().find(|(of, _)| *of == work) {
        return results.clone();
    }
    let results = work.undisturbed();
    known.push((work, results.clone()));
    results
}

/// Checks that every rank except `victim` ends with an error that names `victim`. Returns the times
/// of these errors, by rank.
fn all_name(group: &Group, work: Work, victim: u32) -> Vec<std::time::Instant> {
    let survivors = (0..work.ranks()).filter(|&rank| rank != victim);
    survivors
        .map(|rank| match group.ranks[rank as usize].end() {
            End::Failed { at, culprit, .. } if culprit == Some(victim) => at,
            other => panic!("rank {victim} of {work:?} is gone, and rank {rank} ended with {other:?}"),
        })
        .collect()
}

#[test]
fn a_rank_killed_at_any_step_is_named_by_all_and_the_group_forms_again() {
    let took = Mutex::new(Vec::new());
    at_every_step(&WORKS, |group, work, victim, step| {
        group.order(work, Some((victim, step)));
        group.ranks[victim as usize].is_here().expect("the rank pauses at the step");
        let killed = group.ranks[victim as usize].kill();
        for at in all_name(group, work, victim) {
            took.lock().unwrap().push(at - killed);
        }
        // The survivors' processes continue, with a new process for the killed rank.
        group.restart(victim);
        group.order(work, None);
        group.must_be_right(work, &right(work));
    });
    let mut took = took.into_inner().unwrap();
    took.sort_unstable();
    let [least, median, most] = [0, took.len() / 2, took.len() - 1].map(|at| took[at]);
    println!("{} survivors knew after {least:.1?} to {most:.1?}, median {median:.1?}", took.len());
    assert!(most < KNOWN_UNDER_LOAD, "{took:?}");
}

#[test]
fn a_rank_stopped_for_a_second_at_any_step_loses_nothing() {
    at_every_step(&WORKS, |group, work, victim, step| {
        group.order(work, Some((victim, step)));
        let stopped = &mut group.ranks[victim as usize];
        stopped.is_here().expect("the rank pauses at the step");
        stopped.signal("STOP");
        stopped.tell("go on");
        std::thread::sleep(Duration::from_millis(700));
        stopped.signal("CONT");
        group.must_be_right(work, &right(work));
    });
}

#[test]
fn a_rank_that_stays_stopped_is_named_by_all_and_learns_it_when_it_continues() {
    let one = |work: Work, victim: u32| {
        let mut group = Group::new(work.ranks(), false);
        group.order(work, Some((victim, 2)));
        let stopped = &mut group.ranks[victim as usize];
        stopped.is_here().expect("the rank pauses at the step");
        stopped.signal("STOP");
        stopped.tell("go on");
        all_name(&group, work, victim);
        group.ranks[victim as usize].signal("CONT");
        let end = group.ranks[victim as usize].end();
        assert!(matches!(end, End::Failed { .. }), "rank {victim} of {work:?}: {end:?}");
        group.order(work, None);
        group.must_be_right(work, &right(work));
    };
    std::thread::scope(|scope| {
        for work in WORKS {
            scope.spawn(move || [0, 1].map(|victim| one(work, victim)));
        }
    });
}
