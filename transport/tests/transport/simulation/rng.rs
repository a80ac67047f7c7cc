//! Random numbers of the simulation (`SplitMix64`): a seed gives the same numbers on every machine.

use std::time::Duration;

#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// Independent streams of numbers from one seed, for different purposes.
    pub(crate) fn new(seed: u64, purpose: u64) -> Self {
        let mut rng = Self(seed ^ purpose.wrapping_mul(0xd134_2543_de82_ef95));
        rng.next();
        rng
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// One number of `range`, which is not empty.
    pub(crate) fn within(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    /// True in `chance` of 1000 cases, on average.
    pub(crate) fn per_mille(&mut self, chance: u64) -> bool {
        self.within(0..1000) < chance
    }

    pub(crate) fn micros(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_micros(self.within(range))
    }

    pub(crate) fn millis(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }
}
