//! Groups that form, work and suffer random failures, one after another, for any duration.
//!
//! Five processes take part, with changing ranks; one of them, the elder, is never killed. The
//! choices come from a seed; the exact timing of the processes does not.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use crate::accident::{Accident, Chance};
use crate::network::{Flood, SlowLinks, cut};
use crate::processes::{End, Group};
use crate::right;
use crate::router::Router;
use crate::work::Work;

/// Meshes of three to five ranks.
const MESHES: [(u32, u32); 6] = [(1, 3), (3, 1), (2, 2), (1, 4), (4, 1), (1, 5)];

/// The counts so far.
#[derive(Default)]
struct Tally {
    groups: u32,
    by_accident: BTreeMap<&'static str, u32>,
    ignored: u32,
    /// Packets and streams of strangers.
    strangers: u64,
    right: u32,
    ended: u32,
    wrong: Vec<String>,
    hangs: Vec<String>,
    /// Times from an accident to the error of each other rank.
    known: Vec<Duration>,
    rss_kib: Vec<u64>,
    descriptors: Vec<usize>,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.rss_kib.last().copied().unwrap_or(0) as f64 / 1024.0;
        let descriptors = self.descriptors.last().copied().unwrap_or(0);
        write!(
            f,
            "{} groups: {} ranks right, {} ended with an error, {} wrong, {} hangs; the elder has {mib:.1} MiB and \
             {descriptors} descriptors",
            self.groups,
            self.right,
            self.ended,
            self.wrong.len(),
            self.hangs.len()
        )
    }
}

#[test]
#[ignore = "runs for as long as KYKLOS_SOAK_MINUTES says: scripts/soak.sh"]
fn soak() {
    let number = |name, usual: u64| std::env::var(name).map_or(usual, |text| text.parse().unwrap());
    let (minutes, seed) = (number("KYKLOS_SOAK_MINUTES", 10), number("KYKLOS_SOAK_SEED", 1));
    // A test may change the routes of loopback only in its own network namespace.
    let may_cut = number("KYKLOS_SOAK_CUTS", 0) == 1;
    let (mut chance, mut tally) = (Chance(seed), Tally::default());
    let mut group = Group::new(5, true);
    let elder = group.ranks[0].pid();
    println!("seed {seed}, {minutes} minutes");
    let (started, mut told) = (Instant::now(), 0);
    while started.elapsed().as_secs() < 60 * minutes {
        one_group(&mut group, &mut chance, &mut tally, elder, may_cut);
        tally.rss_kib.push(resident_kib(elder));
        let minute = started.elapsed().as_secs() / 60;
        if minute > told {
            told = minute;
            tally.descriptors.push(settled_descriptors(elder));
            println!("minute {minute}: {tally}");
        }
    }
    summary(&mut tally);
}

fn one_group(group: &mut Group, chance: &mut Chance, tally: &mut Tally, elder: u32, may_cut: bool) {
    let (ulysses, ring) = MESHES[chance.below(MESHES.len() as u64) as usize];
    let work = Work { ulysses, ring, seed: chance.below(4) };
    group.ranks.rotate_left(chance.below(5) as usize);
    let mut victim = chance.below(u64::from(work.ranks())) as u32;
    if group.ranks[victim as usize].pid() == elder {
        victim = (victim + 1) % work.ranks();
    }
    let mut accident = chance.accident(work.set().plan(kyklos_transport::Rank(victim)).steps.len());
    if accident.changes_the_network() && !may_cut {
        tally.ignored += 1;
        accident = Accident::Nothing;
    }
    if let Accident::Rebound { step } = &mut accident {
        victim = work.ranks() - 1;
        *step = (*step).min(work.set().plan(kyklos_transport::Rank(victim)).steps.len() - 1);
    }
    tally.groups += 1;
    *tally.by_accident.entry(accident.name()).or_default() += 1;
    let link = chance.link(accident);
    let what = format!("group {}: {work:?} over {link:?}, rank {victim}: {accident:?}", tally.groups);

    let slow = matches!(accident, Accident::Slow).then(SlowLinks::new);
    let pause = accident.step().map(|step| (victim, step));
    let behind = matches!(accident, Accident::Rebound { .. }).then_some(victim);
    let (coordinator, router) = group.order_behind(work, pause, link, behind);
    let flood =
        matches!(accident, Accident::Flooded).then(|| Flood::start(coordinator, chance.below(u64::MAX)));
    let process = &mut group.ranks[victim as usize];
    if accident.step().is_some() && process.is_here().is_err() {
        tally.hangs.push(format!("{what}: it never got there"));
    }
    let mut happened = Instant::now();
    match accident {
        Accident::Nothing | Accident::Flooded | Accident::Slow => {}
        Accident::Rebound { .. } => {
            router.iter().for_each(Router::restart);
            process.tell("go on");
        }
        Accident::Killed { .. } => happened = process.kill(),
        Accident::KilledAnyTime { after } => {
            std::thread::sleep(after);
            happened = process.kill();
        }
        Accident::Stopped { during, .. } => {
            process.signal("STOP");
            process.tell("go on");
            std::thread::sleep(during);
            process.signal("CONT");
        }
        Accident::StoppedForLong { .. } => {
            process.signal("STOP");
            process.tell("go on");
        }
        Accident::CutOff { during, .. } | Accident::Outage { during, .. } => {
            cut(group, victim, true);
            group.ranks[victim as usize].tell("go on");
            std::thread::sleep(during);
            cut(group, victim, false);
        }
        Accident::CutOffForLong { .. } => {
            cut(group, victim, true);
            group.ranks[victim as usize].tell("go on");
        }
    }
    let right = right(work);
    let killed = matches!(accident, Accident::Killed { .. } | Accident::KilledAnyTime { .. });
    // The stopped rank is read last. The other ranks must not wait for it.
    let others = (0..work.ranks()).filter(|&rank| rank != victim);
    for rank in others.chain((!killed).then_some(victim)) {
        if rank == victim && matches!(accident, Accident::StoppedForLong { .. }) {
            group.ranks[victim as usize].signal("CONT");
        }
        match group.ranks[rank as usize].end() {
            End::Hang => tally.hangs.push(format!("{what}: rank {rank}")),
            End::Done if group.result(rank) != right[rank as usize] => {
                tally.wrong.push(format!("{what}: rank {rank} has other bytes"));
            }
            End::Done if accident.step().is_some() && !accident.is_harmless() => {
                tally.wrong.push(format!("{what}: rank {rank} ended well without it"));
            }
            End::Done => tally.right += 1,
            End::Failed { text, .. } if accident.is_harmless() => {
                tally.wrong.push(format!("{what}: rank {rank} gave up: {text}"));
            }
            End::Failed { at, culprit, text } => {
                tally.ended += 1;
                if matches!(accident, Accident::Killed { .. } | Accident::StoppedForLong { .. })
                    && rank != victim
                {
                    tally.known.push(at.saturating_duration_since(happened));
                    if culprit != Some(victim) {
                        tally.wrong.push(format!("{what}: rank {rank} blames {culprit:?}: {text}"));
                    }
                }
            }
        }
    }
    tally.strangers += flood.map_or(0, Flood::stop);
    drop((slow, router));
    if matches!(accident, Accident::CutOffForLong { .. }) {
        cut(group, victim, false);
    }
    if killed {
        group.restart(victim);
    }
}

fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Descriptors of an idle process. The descriptors of its last group are closed after a short time.
fn settled_descriptors(pid: u32) -> usize {
    let count = || std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let counts = (0..15).map(|_| {
        std::thread::sleep(Duration::from_millis(100));
        count()
    });
    counts.min().unwrap()
}

fn summary(tally: &mut Tally) {
    println!("{tally}");
    println!("accidents: {:?}", tally.by_accident);
    if tally.ignored > 0 {
        println!("ignored: {} accidents of the network: no network namespace of its own", tally.ignored);
    }
    println!("strangers: {} packets and streams", tally.strangers);
    tally.known.sort_unstable();
    if let [least, .., most] = tally.known[..] {
        let median = tally.known[tally.known.len() / 2];
        println!(
            "{} survivors of a killed or stopped rank knew after {least:.1?} to {most:.1?}, median {median:.1?}",
            tally.known.len()
        );
    }
    let most = |of: &[u64]| of.iter().max().copied().unwrap_or(0);
    let third = tally.rss_kib.len() / 3;
    let (first, last) = (most(&tally.rss_kib[..third]), most(&tally.rss_kib[2 * third..]));
    println!("the elder's memory: at most {first} KiB in the first third, {last} KiB in the last");
    println!("the elder's descriptors, by minute: {:?}", tally.descriptors);
    for line in tally.wrong.iter().chain(&tally.hangs) {
        println!("FAULT {line}");
    }
    assert!(tally.wrong.is_empty() && tally.hangs.is_empty(), "see above");
    assert!(last < first + FLAT_KIB, "memory grows");
    let (least, most) = (tally.descriptors.iter().min(), tally.descriptors.iter().max());
    assert_eq!(least, most, "descriptors leak");
}

/// Memory that the allocator may keep.
const FLAT_KIB: u64 = 8 << 10;
