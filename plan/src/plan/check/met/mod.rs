//! The keys that a running state has met. A proof asks every state of every rank about every key,
//! so a set of keys is kept as few ranges, also where its keys lie in strides.

use std::ops::Range;

use crate::tokens::{Run, TokenRuns};

/// A set of keys. Two of them that are aligned are equal if their ranges and bits are.
#[derive(Clone, Default)]
pub(super) struct MetKeys {
    order: Order,
    /// Places in `order`, ascending; there is a gap between each two.
    ranges: Vec<Range<u32>>,
    /// A bit for each key, if the set has many ranges: such as of stripes of several strides. Then
    /// there are no ranges.
    bits: Vec<u64>,
}

/// An order of the keys `0..len`: first each `stride`-th key from 0 on, then each `stride`-th from
/// 1 on, and so on. A run of this stride is one range of places, and runs that lie side by side are
/// one range if they are whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Order {
    len: u32,
    stride: u32,
}

/// The keys outside a set, as ascending ranges that do not touch each other.
pub(super) struct Gaps(Vec<Range<u32>>);

impl MetKeys {
    /// The empty set, for the keys `0..len`.
    pub(super) fn none(len: u32) -> Self {
        Self { order: Order { len, stride: 1 }, ..Self::default() }
    }

    /// Adds `keys`, which exist; returns a key that was in the set before, or is in `keys` twice,
    /// if any is.
    pub(super) fn meet(&mut self, keys: &TokenRuns) -> Option<u32> {
        let runs = || keys.runs().iter().copied();
        let longest = keys.runs().iter().max_by_key(|run| run.count);
        let strided = Order { stride: longest.map_or(1, |run| run.stride), ..self.order };
        let count = |order: Order| order.count(runs());
        let order = Some(strided).filter(|order| count(*order) < count(self.order.natural()));
        let order = order.unwrap_or(self.order.natural());
        if !self.bits.is_empty() || count(order) > self.order.most() {
            self.write_out();
            return self.put(runs());
        }
        let (more, twice) = Self::new(order, order.ranges(runs()));
        self.merge(more).or(twice)
    }

    /// Adds all keys of `other`; returns one that was there before, if any was.
    pub(super) fn merge(&mut self, mut other: Self) -> Option<u32> {
        if self.ranges.is_empty() && self.bits.is_empty() {
            *self = other;
            return None;
        }
        self.align(&mut other);
        if !self.bits.is_empty() {
            let both: Vec<u64> = self.bits.iter().zip(&other.bits).map(|(a, b)| a & b).collect();
            self.bits.iter_mut().zip(&other.bits).for_each(|(a, b)| *a |= b);
            return first(&both, 0, true);
        }
        let mut ranges = std::mem::take(&mut self.ranges);
        ranges.append(&mut other.ranges);
        let (all, twice) = Self::new(self.order, ranges);
        *self = all;
        if self.ranges.len() as u64 > self.order.most() {
            self.write_out();
        }
        twice
    }

    /// Whether the set is equal to `keys`, and `keys` names each key once.
    pub(super) fn are(&self, keys: &TokenRuns) -> bool {
        let (mut set, mut other) = (self.clone(), Self::none(self.order.len));
        if !self.exist(keys) || other.meet(keys).is_some() {
            return false;
        }
        set.align(&mut other);
        set.ranges == other.ranges && set.bits == other.bits
    }

    /// Whether `keys` are keys that a set like this one can have.
    pub(super) fn exist(&self, keys: &TokenRuns) -> bool {
        keys.runs().iter().all(|run| run.last() < self.order.len)
    }

    /// The keys, ascending.
    pub(super) fn keys(&self) -> TokenRuns {
        let mut keys = TokenRuns::default();
        self.in_order(self.order.natural()).runs().for_each(|run| keys.push(run));
        keys
    }

    /// The keys of the set that are not in `other`.
    pub(super) fn without(&self, other: &Self) -> Self {
        let (mut set, mut other) = (self.clone(), other.clone());
        set.align(&mut other);
        set.bits.iter_mut().zip(&other.bits).for_each(|(a, b)| *a &= !b);
        let mut left = Vec::new();
        for Range { start, end } in std::mem::take(&mut set.ranges) {
            let mut from = start;
            let first = other.ranges.partition_point(|range| range.end <= start);
            for out in other.ranges[first..].iter().take_while(|range| range.start < end) {
                left.extend((from < out.start).then_some(from..out.start));
                from = out.end;
            }
            left.extend((from < end).then_some(from..end));
        }
        Self { ranges: left, ..set }
    }

    /// The keys outside the set.
    pub(super) fn gaps(&self) -> Gaps {
        let all = Self {
            order: self.order,
            ranges: std::iter::once(0..self.order.len).collect(),
            bits: Vec::new(),
        };
        Gaps(all.without(self).in_order(self.order.natural()).ranges)
    }

    /// The set of the places `ranges`, in any order, and a key that is there twice, if any is.
    fn new(order: Order, mut ranges: Vec<Range<u32>>) -> (Self, Option<u32>) {
        // Takes linear time for ranges that ascend, and for two such lists one after the other.
        ranges.sort_by_key(|range| range.start);
        let mut twice = None;
        ranges.dedup_by(|next, last| {
            if next.start > last.end {
                return false;
            }
            if next.start < last.end {
                twice = twice.or(Some(next.start));
            }
            last.end = last.end.max(next.end);
            true
        });
        (Self { order, ranges, bits: Vec::new() }, twice.map(|place| order.run(place..place + 1).start))
    }

    /// The keys as runs of the stride of their order.
    fn runs(&self) -> impl Iterator<Item = Run> {
        let order = self.order;
        let of_ranges = self.ranges.iter().flat_map(move |range| {
            let mut at = range.start;
            std::iter::from_fn(move || {
                let run = (at < range.end).then(|| order.run(at..range.end))?;
                at += run.count;
                Some(run)
            })
        });
        let mut at = 0;
        of_ranges.chain(std::iter::from_fn(move || {
            let start = first(&self.bits, at, true)?;
            at = first(&self.bits, start, false).unwrap_or(order.len);
            Some(Run { start, count: at - start, stride: 1 })
        }))
    }

    fn in_order(&self, order: Order) -> Self {
        match order == self.order && self.bits.is_empty() {
            true => self.clone(),
            false => Self::new(order, order.ranges(self.runs())).0,
        }
    }

    /// Puts two sets in the order of one of them, in which the other one has fewer ranges; or makes
    /// both bits.
    fn align(&mut self, other: &mut Self) {
        if self.bits.is_empty() && other.bits.is_empty() {
            if self.order == other.order {
                return;
            }
            let counts = [self.order.count(other.runs()), other.order.count(self.runs())];
            if counts[0].min(counts[1]) <= self.order.most() {
                match counts[0] <= counts[1] {
                    true => *other = other.in_order(self.order),
                    false => *self = self.in_order(other.order),
                }
                return;
            }
        }
        self.write_out();
        other.write_out();
    }

    /// Makes the set bits.
    fn write_out(&mut self) {
        if self.bits.is_empty() {
            let runs: Vec<Run> = self.runs().collect();
            self.bits = vec![0; self.order.len.div_ceil(64) as usize];
            (self.order, self.ranges) = (self.order.natural(), Vec::new());
            self.put(runs.into_iter());
        }
    }

    /// Adds keys to a set of bits; returns one that was there before, if any was.
    fn put(&mut self, runs: impl Iterator<Item = Run>) -> Option<u32> {
        let mut twice = None;
        for run in runs {
            let (mut key, last) = (run.start, run.last());
            while key <= last {
                // All keys of one word at a time.
                let (at, mut mask) = (key / 64, 0);
                if run.stride == 1 {
                    let count = (last - key + 1).min(64 - key % 64);
                    mask = (!0 >> (64 - count)) << (key % 64);
                    key += count;
                }
                while key <= last && key / 64 == at {
                    mask |= 1 << (key % 64);
                    key = key.saturating_add(run.stride);
                }
                let word = &mut self.bits[at as usize];
                if *word & mask != 0 {
                    twice = twice.or(Some(at * 64 + (*word & mask).trailing_zeros()));
                }
                *word |= mask;
            }
        }
        twice
    }
}

/// The first bit from `from` on that is as asked.
fn first(bits: &[u64], from: u32, set: bool) -> Option<u32> {
    let flip = if set { 0 } else { !0 };
    let mut at = from / 64;
    let mut word = (bits.get(at as usize)? ^ flip) & (!0 << (from % 64));
    while word == 0 {
        at += 1;
        word = bits.get(at as usize)? ^ flip;
    }
    Some(at * 64 + word.trailing_zeros())
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

impl Default for Order {
    fn default() -> Self {
        Self { len: 0, stride: 1 }
    }
}

impl Order {
    fn natural(self) -> Self {
        Self { stride: 1, ..self }
    }

    /// Sets of more ranges are bits: these take less time.
    fn most(self) -> u64 {
        u64::from(self.len / 1024) + 10
    }

    /// The place of the key `first`, which is less than the stride; of the stride itself, the end
    /// of all places.
    fn column(self, first: u32) -> u32 {
        first * (self.len / self.stride) + first.min(self.len % self.stride)
    }

    fn place(self, key: u32) -> u32 {
        self.column(key % self.stride) + key / self.stride
    }

    /// The keys at these places, as far as they are one run.
    fn run(self, places: Range<u32>) -> Run {
        let Self { len, stride } = self;
        // The first columns have one key more.
        let (short, longer) = (len / stride, len % stride);
        let column = match places.start.checked_sub(longer * (short + 1)) {
            None => places.start / (short + 1),
            Some(after) => longer + after / short,
        };
        let start = column + (places.start - self.column(column)) * stride;
        Run { start, count: self.column(column + 1).min(places.end) - places.start, stride }
    }

    /// The places of these keys, of each run in few ranges.
    fn ranges(self, runs: impl Iterator<Item = Run>) -> Vec<Range<u32>> {
        let of = |run: Run| {
            let step = self.step(run);
            (0..step.min(run.count)).map(move |i| {
                let place = self.place(run.start + i * run.stride);
                place..place + (run.count - i).div_ceil(step)
            })
        };
        runs.flat_map(of).collect()
    }

    /// How many ranges [`Self::ranges`] makes.
    fn count(self, runs: impl Iterator<Item = Run>) -> u64 {
        runs.map(|run| u64::from(self.step(run).min(run.count))).sum()
    }

    /// Keys of a run that are this many apart in it lie side by side; the count of the run, if no
    /// keys of it do.
    fn step(self, run: Run) -> u32 {
        if self.stride.is_multiple_of(run.stride) { self.stride / run.stride } else { run.count }
    }
}

#[cfg(test)]
mod tests;
