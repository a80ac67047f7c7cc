//! Checks for every world in which the survivors form a group again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kyklos_transport::Rank;

use super::{End, Life, Played, Stay, Strike, World};

/// By epoch: the ranks of a group, and how long each rank was in it.
type Groups = BTreeMap<u32, (Vec<Rank>, Vec<(u32, Duration, Duration)>)>;

/// All violations of the contract in a run.
pub(crate) fn judge(world: &World, played: &Played) -> Vec<String> {
    let mut wrong = Vec::new();
    if played.tasks_left > 0 {
        wrong.push(format!("{} tasks are left after everybody has gone", played.tasks_left));
    }
    let crashed_at = |life: &Life| played.crashed.get(&life.rank).copied().filter(|_| life.life == 0);
    let mut groups: Groups = BTreeMap::new();
    for life in &played.lives {
        let who = format!("rank {} (life {})", life.rank, life.life);
        wrong.extend(life.complaints.iter().map(|text| format!("{who}: {text}")));
        if let End::Never(why) = &life.end {
            wrong.push(format!("{who}: {why}"));
        }
        let mut last = None;
        // A host that has vanished has no process in a later group.
        let is_there = |stay: &&Stay| crashed_at(life).is_none_or(|at| stay.entered < at);
        for stay in life.stays.iter().filter(is_there) {
            if last.is_some_and(|last| stay.epoch <= last) {
                wrong.push(format!("{who}: epoch {} after {last:?}", stay.epoch));
            }
            last = Some(stay.epoch);
            let (members, stays) =
                groups.entry(stay.epoch).or_insert_with(|| (stay.members.clone(), Vec::new()));
            if *members != stay.members {
                wrong.push(format!("epoch {} is of {members:?} and of {:?}", stay.epoch, stay.members));
            }
            let left = crashed_at(life).map_or(stay.left, |at| at.min(stay.left));
            stays.push((life.rank, stay.entered, left));
        }
    }
    wrong.extend(two_wholes(&groups));
    let crashes = played.crashed.len() as u32;
    let cuts = |strike: &Strike| matches!(strike, Strike::Cut { .. } | Strike::Link { .. });
    let calm = !world.strikes.iter().any(|(_, strike)| cuts(strike));
    // Without cuts, more than half of the ranks are always enough.
    if calm && 2 * (world.ranks - crashes) > world.ranks {
        let first = played.lives.iter().filter(|life| life.life == 0);
        // The exception: some ranks closed their last group in order while other ranks failed in it. The
        // check also requires that a group has formed.
        let epoch = |life: &Life| life.stays.last().map(|stay| stay.epoch);
        let done =
            played.lives.iter().filter(|life| matches!(life.end, End::Finished)).filter_map(epoch).max();
        let formed = first.clone().all(|life| !life.stays.is_empty());
        for life in first {
            let should = formed && crashed_at(life).is_none() && done != epoch(life);
            if should && !matches!(life.end, End::Finished) {
                wrong.push(format!("rank {} should have finished: {:?}", life.rank, life.end));
            }
        }
    }
    wrong.extend(came_again(world, played));
    wrong
}

/// At no time do two groups have all their ranks.
fn two_wholes(groups: &Groups) -> Vec<String> {
    let whole = |(members, stays): &(Vec<Rank>, Vec<(u32, Duration, Duration)>)| {
        let there: BTreeSet<u32> = stays.iter().map(|(rank, ..)| *rank).collect();
        let all = members.iter().all(|rank| there.contains(&rank.0));
        let (from, until) = (stays.iter().map(|stay| stay.1).max()?, stays.iter().map(|stay| stay.2).min()?);
        (all && from < until).then_some((from, until))
    };
    let wholes: Vec<(u32, (Duration, Duration))> =
        groups.iter().filter_map(|(&epoch, group)| Some((epoch, whole(group)?))).collect();
    let pairs =
        wholes.iter().enumerate().flat_map(|(at, one)| wholes[at + 1..].iter().map(move |two| (one, two)));
    pairs
        .filter(|((_, one), (_, two))| one.0 < two.1 && two.0 < one.1)
        .map(|(one, two)| format!("two groups have all their ranks at a time: {one:?}, {two:?}"))
        .collect()
}

/// A rank that crashes and soon returns to a waiting group is a member again, and the job finishes.
fn came_again(world: &World, played: &Played) -> Option<String> {
    let [(at, Strike::Crash { rank, restarts: Some(_) })] = &world.strikes[..] else { return None };
    let life = |number| played.lives.iter().find(move |life| life.rank == *rank && life.life == number);
    let was_done = matches!(life(0)?.end, End::Finished)
        || played.lives.iter().any(|life| life.stays.len() == 1 && life.stays[0].left < *at);
    let enough = 2 * (world.ranks - 1) > world.ranks || (world.ranks == 2 && *rank == 1);
    let formed = played.lives.iter().all(|life| life.life > 0 || !life.stays.is_empty());
    if !world.everyone || was_done || !enough || !formed {
        return None;
    }
    let again = life(1)?;
    let whole = again.stays.last().is_some_and(|stay| stay.members.len() as u32 == world.ranks);
    (!whole || !matches!(again.end, End::Finished))
        .then(|| format!("rank {rank} did not come again: {again:?}"))
}
