//! The keys that a running state has met. A proof asks every state of every rank about every key, so adjacent keys are
//! handled as ranges.

use std::ops::Range;

use crate::{Run, TokenRuns};

/// A set of keys.
#[derive(Clone, Default)]
pub(super) struct MetKeys {
    kv_len: u32,
    /// The keys, while they are one ascending list: all keys of a state that travels.
    list: TokenRuns,
    /// For each key 0 or 1; empty while `list` holds all keys.
    met: Vec<u8>,
}

/// The keys outside the set, as ascending ranges that do not touch each other.
pub(super) struct Gaps(Vec<Range<u32>>);

impl MetKeys {
    /// The empty set, for the keys `0..kv_len`.
    pub(super) fn none(kv_len: u32) -> Self {
        Self { kv_len, ..Self::default() }
    }

    /// Adds `keys`; returns a key that was in the set before, if any was.
    pub(super) fn meet(&mut self, keys: &TokenRuns) -> Option<u32> {
        let ascends = || keys.runs().windows(2).all(|pair| pair[0].last() < pair[1].start);
        if self.met.is_empty() && self.list.is_empty() && ascends() {
            self.list = keys.clone();
            return None;
        }
        self.write_out();
        for run in keys.runs() {
            let again = match run {
                Run { start, count, stride: 1 } => self.meet_range(*start..*start + *count),
                run => (0..run.count)
                    .map(|i| run.start + i * run.stride)
                    .find(|key| std::mem::replace(&mut self.met[*key as usize], 1) == 1),
            };
            if again.is_some() {
                return again;
            }
        }
        None
    }

    /// Converts the list to one byte for each key.
    fn write_out(&mut self) {
        if self.met.is_empty() {
            self.met = vec![0; self.kv_len as usize];
            for key in std::mem::take(&mut self.list).iter() {
                self.met[key as usize] = 1;
            }
        }
    }

    fn meet_range(&mut self, keys: Range<u32>) -> Option<u32> {
        let met = &mut self.met[keys.start as usize..keys.end as usize];
        if any(met) {
            return keys.zip(met).find(|(_, met)| **met == 1).map(|(key, _)| key);
        }
        met.fill(1);
        None
    }

    /// Whether the set is equal to `keys`, and `keys` names each key once.
    pub(super) fn are(&self, keys: &TokenRuns) -> bool {
        if self.met.is_empty() {
            return self.list == *keys;
        }
        let count: usize = self.met.iter().map(|met| usize::from(*met)).sum();
        count == keys.len() && keys.iter().all(|key| self.met.get(key as usize) == Some(&1))
    }

    /// The keys, ascending.
    pub(super) fn keys(&self) -> TokenRuns {
        if self.met.is_empty() {
            return self.list.clone();
        }
        TokenRuns::from_positions((0..).zip(&self.met).filter(|(_, met)| **met == 1).map(|(key, _)| key))
    }

    /// Adds all keys of `other`; returns one that was there before, if any was.
    pub(super) fn merge(&mut self, other: Self) -> Option<u32> {
        if other.met.is_empty() {
            return self.meet(&other.list);
        }
        self.write_out();
        let mut again = None;
        for (key, (met, more)) in (0..).zip(self.met.iter_mut().zip(&other.met)) {
            if *met & *more == 1 {
                again = again.or(Some(key));
            }
            *met |= more;
        }
        again
    }

    /// The keys outside the set.
    pub(super) fn gaps(&mut self) -> Gaps {
        if self.met.is_empty() && self.list.runs().iter().all(|run| run.stride == 1) {
            return self.gaps_of_list();
        }
        self.write_out();
        let mut gaps: Vec<Range<u32>> = Vec::new();
        let mut add = |keys: Range<u32>| match gaps.last_mut() {
            Some(last) if last.end == keys.start => last.end = keys.end,
            _ => gaps.push(keys),
        };
        let mut start = 0;
        for piece in self.met.chunks(PIECE) {
            let end = start + u32::try_from(piece.len()).expect("keys are counted in u32");
            if !any(piece) {
                add(start..end);
            } else if !all(piece) {
                (start..end).zip(piece).filter(|(_, met)| **met == 0).for_each(|(key, _)| add(key..key + 1));
            }
            start = end;
        }
        Gaps(gaps)
    }

    /// The same while the list holds all keys, in runs of adjacent ones.
    fn gaps_of_list(&self) -> Gaps {
        let mut gaps = Vec::new();
        let mut from = 0;
        for run in self.list.runs() {
            gaps.extend((from < run.start).then_some(from..run.start));
            from = run.last() + 1;
        }
        gaps.extend((from < self.kv_len).then_some(from..self.kv_len));
        Gaps(gaps)
    }
}

impl Gaps {
    /// Whether all keys are in the set.
    pub(super) fn are_none(&self) -> bool {
        self.0.is_empty()
    }

    /// The first of `keys` that was not met.
    pub(super) fn first_in(&self, keys: Range<u32>) -> Option<u32> {
        let gap = self.0.get(self.0.partition_point(|gap| gap.end <= keys.start))?;
        Some(gap.start.max(keys.start)).filter(|key| *key < keys.end)
    }
}

/// Has no early return, so that it is compiled to wide instructions; the same holds for [`all`].
fn any(met: &[u8]) -> bool {
    met.iter().fold(0, |any, met| any | met) == 1
}

fn all(met: &[u8]) -> bool {
    met.iter().fold(1, |all, met| all & met) == 1
}

/// Keys that are tested together in the search for gaps.
const PIECE: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_what_was_not_met() {
        // Pieces that are full, empty and mixed; ranges across their edges, and keys in strides.
        let mut runs = TokenRuns::contiguous(0..2 * PIECE as u32 + 3);
        runs.push(Run { start: 1000, count: 40, stride: 3 });
        runs.extend(&TokenRuns::contiguous(2000..2001));
        runs.extend(&TokenRuns::contiguous(1500..1700));
        let mut met = MetKeys::none(2100);
        assert_eq!(met.meet(&runs), None);
        let there: Vec<u32> = runs.iter().collect();
        let gaps = met.gaps();
        for lo in (0..2100).step_by(7) {
            for hi in (lo..2100).step_by(31) {
                let expected = (lo..hi).find(|key| !there.contains(key));
                assert_eq!(gaps.first_in(lo..hi), expected, "{lo}..{hi}");
            }
        }
    }

    #[test]
    fn a_list_has_the_gaps_of_its_keys() {
        let some = |runs: &[Range<u32>]| {
            let mut list = TokenRuns::default();
            runs.iter().for_each(|run| list.extend(&TokenRuns::contiguous(run.clone())));
            let mut met = MetKeys::none(50);
            assert_eq!(met.meet(&list), None);
            met
        };
        let cut = |bounds: &[u32]| -> Vec<Range<u32>> {
            bounds.as_chunks::<2>().0.iter().map(|[start, end]| *start..*end).collect()
        };
        for bounds in [&[0, 50][..], &[0, 20], &[7, 50], &[3, 9, 12, 13, 40, 50], &[]] {
            let runs = cut(bounds);
            let gaps = some(&runs).gaps();
            assert_eq!(gaps.are_none(), bounds == [0, 50]);
            let mut bytes = some(&runs);
            bytes.write_out();
            assert_eq!(gaps.0, bytes.gaps().0, "{runs:?}");
        }
    }

    #[test]
    fn a_key_that_is_met_twice_is_found() {
        let some = TokenRuns::contiguous(10..20);
        for (again, expected) in [
            (TokenRuns::contiguous(0..10), None),
            (TokenRuns::contiguous(20..30), None),
            (TokenRuns::contiguous(5..11), Some(10)),
            (TokenRuns::contiguous(19..25), Some(19)),
            (TokenRuns::from_positions([1, 4, 7, 10, 13]), Some(10)),
            (TokenRuns::from_positions([3, 3]), Some(3)),
        ] {
            let mut met = MetKeys::none(30);
            assert_eq!(met.meet(&some), None);
            assert_eq!(met.meet(&again), expected, "{again}");
        }
        let of = |lists: &[&TokenRuns]| {
            let mut met = MetKeys::none(30);
            assert!(lists.iter().all(|list| met.meet(list).is_none()));
            met
        };
        let (more, even) = (TokenRuns::contiguous(20..25), TokenRuns::contiguous(25..30));
        for other in [&[&more][..], &[&more, &even]] {
            let mut a = of(&[&some]);
            assert_eq!((a.merge(of(other)), a.merge(of(other))), (None, Some(20)));
            assert_eq!(a.gaps().first_in(10..25), None);
        }
        assert!(of(&[&some]).are(&some) && !of(&[&some]).are(&more) && !of(&[&some, &more]).are(&some));
        assert!(of(&[&some, &more]).are(&TokenRuns::contiguous(10..25)));
        assert_eq!(of(&[&some, &even]).keys(), TokenRuns::from_positions((10..20).chain(25..30)));
        assert_eq!(of(&[&some]).keys(), some);
    }
}
