//! Which ranks may form the next group: the pure half of [`crate::Transport::reform`].
//!
//! Two groups must never both continue the job. Every rank keeps claims: the last group that it saw
//! start, and every later group that it was ready for, which may have started without its
//! knowledge. A rank that calls `reform` has left its last group for good, and a group starts only
//! when all its ranks were ready for it. So if every new group has more than half of each claimed
//! one, at most one group has all its ranks at any time (ADR 0018 argues it).

use std::collections::BTreeMap;

use crate::rank::Rank;

/// A group to which a rank may belong. Ranks have their numbers of the first group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Its epoch.
    pub epoch: u32,
    /// Whether the rank saw it start, or was only ready for it.
    pub started: bool,
    /// Its ranks, ascending.
    pub members: Vec<Rank>,
}

/// Most claims of one rank, so that they fit a frame: this many attempts in a row may fail at their
/// last step.
pub const MOST_CLAIMS: usize = 7;

/// The ranks of the next group, ascending, chosen from `came`: ranks with their claims. A restarted
/// rank has no claims.
///
/// With `everyone` all of `came` are in it, otherwise only members of the last group. `size` is the
/// number of ranks of the first group: if all of them are in `came`, no rank is in another group,
/// and claims do not count. Fails with a text if the ranks are too few.
pub(crate) fn next_group(
    came: &BTreeMap<Rank, Vec<Claim>>,
    everyone: bool,
    size: u32,
) -> Result<Vec<Rank>, String> {
    if everyone && (0..size).all(|rank| came.contains_key(&Rank(rank))) {
        return Ok(came.keys().copied().collect());
    }
    let Some(last) = last_started(came) else {
        return Err("no rank that is present knows the last group: restart the job".into());
    };
    let knows = |rank: &Rank| came.get(rank).is_some_and(|claims| !claims.is_empty());
    let chosen: Vec<Rank> = came
        .keys()
        .copied()
        .filter(|rank| everyone || (knows(rank) && last.members.contains(rank)))
        .collect();
    for claim in came.values().flatten().filter(|claim| claim.epoch >= last.epoch) {
        let here: Vec<Rank> =
            claim.members.iter().copied().filter(|rank| chosen.contains(rank) && knows(rank)).collect();
        let (half, all) = (2 * here.len(), claim.members.len());
        // One of two equal halves may continue: the half with the lowest rank.
        let enough = half > all || (half == all && here.first() == claim.members.first());
        if !enough {
            let here = match &here[..] {
                [] => "none".to_owned(),
                here => here.iter().map(Rank::to_string).collect::<Vec<_>>().join(", "),
            };
            return Err(format!(
                "of the {all} ranks of the last group (epoch {}) there are too few: {here}; more than half must be there, or \
                 half and the lowest, because the others may be going on without them",
                claim.epoch
            ));
        }
    }
    Ok(chosen)
}

/// The last group that any rank of `came` saw start.
pub(crate) fn last_started(came: &BTreeMap<Rank, Vec<Claim>>) -> Option<&Claim> {
    came.values().flatten().filter(|claim| claim.started).max_by_key(|claim| claim.epoch)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(epoch: u32, started: bool, members: &[u32]) -> Claim {
        Claim { epoch, started, members: members.iter().copied().map(Rank).collect() }
    }

    fn came(of: &[(u32, &[Claim])]) -> BTreeMap<Rank, Vec<Claim>> {
        of.iter().map(|(rank, claims)| (Rank(*rank), claims.to_vec())).collect()
    }

    fn group(came: &BTreeMap<Rank, Vec<Claim>>, everyone: bool) -> Option<Vec<u32>> {
        next_group(came, everyone, 5).ok().map(|ranks| ranks.iter().map(|rank| rank.0).collect())
    }

    #[test]
    fn more_than_half_of_the_last_group_or_half_with_its_lowest_go_on() {
        let first = [claim(0, true, &[0, 1, 2, 3])];
        let of = |ranks: &[u32]| came(&ranks.iter().map(|&rank| (rank, &first[..])).collect::<Vec<_>>());
        assert_eq!(group(&of(&[1, 2, 3]), false), Some(vec![1, 2, 3]));
        assert_eq!(group(&of(&[0, 2]), false), Some(vec![0, 2]));
        assert_eq!(group(&of(&[1, 2]), false), None);
        let text = next_group(&of(&[3]), false, 4).unwrap_err();
        assert!(text.contains("of the 4 ranks") && text.contains("too few: 3;"), "{text}");
    }

    #[test]
    fn who_started_anew_comes_along_but_does_not_count() {
        let first = [claim(4, true, &[0, 1, 2])];
        let both = came(&[(0, &[]), (1, &first), (2, &first)]);
        assert_eq!(group(&both, true), Some(vec![0, 1, 2]));
        assert_eq!(group(&both, false), Some(vec![1, 2]));
        assert_eq!(group(&came(&[(0, &[]), (1, &[]), (2, &first)]), true), None);
        assert_eq!(group(&came(&[(0, &[]), (1, &[])]), true), None);
    }

    #[test]
    fn if_all_ranks_of_the_first_group_are_here_none_can_be_in_another_one() {
        let first = [claim(0, true, &[0, 1])];
        let restarted = came(&[(0, &[]), (1, &first)]);
        assert_eq!(next_group(&restarted, true, 2), Ok(vec![Rank(0), Rank(1)]));
        assert_eq!(next_group(&came(&[(0, &[]), (1, &[])]), true, 2), Ok(vec![Rank(0), Rank(1)]));
        assert!(next_group(&restarted, false, 2).is_err());
        assert!(next_group(&restarted, true, 3).is_err());
    }

    #[test]
    fn a_group_that_may_have_started_counts_too() {
        let first = claim(0, true, &[0, 1, 2, 3, 4]);
        let maybe = claim(1, false, &[0, 1, 2]);
        let (old, new) = ([first.clone()], [first.clone(), maybe]);
        // Three of five ranks, but only one member of the group in which rank 2 may still work.
        assert_eq!(group(&came(&[(2, &new), (3, &old), (4, &old)]), false), None);
        assert_eq!(group(&came(&[(1, &new), (2, &new), (3, &old)]), false), Some(vec![1, 2, 3]));
        // Rank 1 saw this group start, so earlier groups and ranks that were not in it no longer count.
        let started = [claim(1, true, &[0, 1, 2])];
        assert_eq!(group(&came(&[(1, &started), (2, &new), (3, &old)]), false), Some(vec![1, 2]));
    }

    /// Runs attempts in random order. Any ranks take part, and an attempt may stop after any step.
    /// At no time do two groups have all their ranks.
    #[test]
    fn whatever_fails_no_two_groups_have_all_their_ranks() {
        let (mut formed, mut next) = (0, 1_u64);
        let mut random = |below: usize| {
            next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (next >> 33) as usize % below
        };
        for _ in 0..3000 {
            let ranks = 2 + random(5) as u32;
            let first = claim(0, true, &(0..ranks).collect::<Vec<_>>());
            let mut claims: BTreeMap<Rank, Vec<Claim>> =
                (0..ranks).map(|rank| (Rank(rank), vec![first.clone()])).collect();
            // The current group of each rank, if it has one, as its place in the list of the groups that have
            // started.
            let mut is_in: BTreeMap<Rank, usize> = (0..ranks).map(|rank| (Rank(rank), 0)).collect();
            let mut started = vec![first];
            // Ranks wait in parallel attempts.
            for _ in 0..12 {
                let everyone = random(2) == 0;
                let mut attempts: [BTreeMap<Rank, Vec<Claim>>; 2] = Default::default();
                for rank in (0..ranks).map(Rank) {
                    let Some(attempt) = attempts.get_mut(random(3)) else { continue };
                    if random(12) == 0 {
                        claims.insert(rank, Vec::new());
                    }
                    is_in.remove(&rank);
                    attempt.insert(rank, claims[&rank].clone());
                }
                for attempt in attempts {
                    let Ok(members) = next_group(&attempt, everyone, ranks) else { continue };
                    let epoch = 1 + attempt.values().flatten().map(|claim| claim.epoch).max().unwrap_or(0);
                    let new = Claim { epoch, started: false, members };
                    let last_step = random(3);
                    let mut ready = 0;
                    for rank in &new.members {
                        if claims[rank].len() < MOST_CLAIMS && (last_step > 0 || random(2) == 0) {
                            claims.get_mut(rank).unwrap().push(new.clone());
                            ready += 1;
                        }
                    }
                    if ready < new.members.len() || last_step == 0 {
                        continue;
                    }
                    started.push(Claim { started: true, ..new.clone() });
                    formed += 1;
                    for rank in &new.members {
                        // A rank that does not learn of the start is still ready for the group.
                        is_in.insert(*rank, started.len() - 1);
                        if last_step == 2 || random(2) == 0 {
                            claims.insert(*rank, vec![Claim { started: true, ..new.clone() }]);
                        }
                    }
                    let whole = |(place, group): &(usize, &Claim)| {
                        group.members.iter().all(|rank| is_in.get(rank) == Some(place))
                    };
                    let whole: Vec<_> = started.iter().enumerate().filter(whole).collect();
                    assert!(whole.len() <= 1, "{whole:?}");
                }
            }
        }
        assert!(formed > 3000, "{formed}");
    }
}
