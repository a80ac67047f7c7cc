//! What a session knows about the speed of its device.

use serde::{Deserialize, Serialize};

use super::probe::CallClass;
use kyklos_plan::Mesh;
use kyklos_plan::simulate::Capacity;

/// The speed of one device for one class of calls. Devices may share the cores of a machine, so a
/// speed is valid only for one active set: the ranks that compute at the same time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Pairs in a second, for each of the [`active_sets`] of the mesh that was measured; the first
    /// is all ranks. 0 where the rank is not in it.
    pub(super) pairs_per_s: Vec<u64>,
    /// As [`Capacity::step_ns`].
    pub(super) step_ns: u64,
    /// As [`Capacity::memory_bytes`].
    pub(super) memory_bytes: Option<u64>,
}

impl Measured {
    /// What the device can do while active set number `active_set` computes.
    pub(super) fn in_active_set(&self, active_set: usize) -> Capacity {
        let Self { step_ns, memory_bytes, .. } = *self;
        Capacity { pairs_per_s: self.pairs_per_s[active_set], step_ns, memory_bytes }
    }
}

/// How many of the fastest shards are measured at the same time: all, then few, so that a device
/// that takes more from the others than it adds is found. Twice as many each time: a measurement
/// takes a tenth of a second.
pub(super) fn active_sets(shards: usize) -> impl Iterator<Item = usize> {
    let fewer = (0..usize::BITS).map(|power| 1 << power).take_while(move |size| *size < shards);
    std::iter::once(shards).chain(fewer)
}

/// Whether each rank is in the active set of the `size` fastest shards of `mesh`; of equals the
/// lower one is.
pub(super) fn members(mesh: Mesh, pairs_per_s: &[u64], size: usize) -> Vec<bool> {
    let of_shard = mesh.ulysses() as usize;
    let speeds: Vec<u64> =
        pairs_per_s.chunks(of_shard).map(|ranks| ranks.iter().copied().min().unwrap_or(0)).collect();
    let mut order: Vec<usize> = (0..speeds.len()).collect();
    order.sort_by_key(|shard| std::cmp::Reverse(speeds[*shard]));
    let members = &order[..size.min(order.len())];
    (0..pairs_per_s.len()).map(|rank| members.contains(&(rank / of_shard))).collect()
}

/// Whether these speeds differ by no more than measurements vary.
pub(super) fn is_noise(speeds: &[u64]) -> bool {
    let (least, most) = (speeds.iter().min().unwrap_or(&0), speeds.iter().max().unwrap_or(&0));
    most - least <= least / 10
}

/// Of each class of calls, the newest class first.
#[derive(Debug, Default)]
pub(super) struct Speeds(Vec<Known>);

#[derive(Debug)]
struct Known {
    class: CallClass,
    measured: Measured,
    /// The active set that the calls of the session run in.
    active_set: usize,
}

impl Speeds {
    pub(super) fn of(&self, class: CallClass) -> Option<&Measured> {
        self.0.iter().find(|known| known.class == class).map(|known| &known.measured)
    }

    /// Replaces what is known of a class.
    pub(super) fn set(&mut self, class: CallClass, measured: Measured) {
        self.0.retain(|known| known.class != class);
        self.0.truncate(MOST_CLASSES - 1);
        self.0.insert(0, Known { class, measured, active_set: 0 });
    }

    /// From now on calls run in active set number `active_set`.
    pub(super) fn run_in(&mut self, class: CallClass, active_set: usize) {
        if let Some(known) = self.0.iter_mut().find(|known| known.class == class) {
            known.active_set = active_set;
        }
    }

    /// What is known of a class for the calls that run now.
    pub(super) fn now(&self, class: CallClass) -> Option<Capacity> {
        let known = self.0.iter().find(|known| known.class == class)?;
        Some(known.measured.in_active_set(known.active_set))
    }

    /// Takes a call of the session into account, if the class is known.
    pub(super) fn learn(&mut self, class: CallClass, seen: u64) {
        let Some(Known { measured, active_set, .. }) = self.0.iter_mut().find(|known| known.class == class)
        else {
            return;
        };
        // Half of the way, in factors: one slow call does not count for much, and the speed of a device
        // that becomes 50 times slower is known within a third after 4 calls. Half of the
        // difference would take 8.
        let old = measured.pairs_per_s[*active_set].max(1);
        let new = geometric_mean(old, seen);
        for speed in &mut measured.pairs_per_s {
            let scaled = u128::from(*speed) * u128::from(new) / u128::from(old);
            *speed = u64::try_from(scaled).unwrap_or(u64::MAX);
        }
    }
}

fn geometric_mean(a: u64, b: u64) -> u64 {
    // The root of a product of two u64 fits u64.
    u64::try_from((u128::from(a) * u128::from(b)).isqrt()).unwrap_or(u64::MAX)
}

/// Classes of calls whose speed a session keeps.
const MOST_CLASSES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use kyklos_plan::{AttentionProblem, Dtype, Mask};

    #[test]
    fn crowds_are_all_shards_and_then_powers_of_two() {
        let of = |shards| active_sets(shards).collect::<Vec<_>>();
        assert_eq!([of(1), of(2), of(3)], [vec![1], vec![2, 1], vec![3, 1, 2]]);
        assert_eq!(of(8), [8, 1, 2, 4]);
    }

    #[test]
    fn the_slowest_rank_of_a_shard_decides_whether_it_is_in_a_crowd() {
        let ring = Mesh::new(1, 4).unwrap();
        assert_eq!(members(ring, &[3, 9, 9, 1], 2), [false, true, true, false]);
        assert_eq!(members(ring, &[9, 9, 9, 1], 2), [true, true, false, false]);
        assert_eq!(members(Mesh::new(2, 2).unwrap(), &[9, 1, 3, 3], 1), [false, false, true, true]);
    }

    #[test]
    fn a_call_changes_the_speeds_of_all_crowds_by_one_factor() {
        let problem = AttentionProblem::new([1, 100, 4, 4, 16], Dtype::F32, Mask::full()).unwrap();
        let class = CallClass::of(&problem);
        let mut speeds = Speeds::default();
        let measured = Measured { pairs_per_s: vec![100, 400, 0], step_ns: 5, memory_bytes: None };
        speeds.set(class, measured);
        speeds.run_in(class, 1);
        speeds.learn(class, 100);
        assert_eq!(speeds.of(class).unwrap().pairs_per_s, [50, 200, 0]);
        speeds.run_in(class, 0);
        speeds.learn(class, 200);
        assert_eq!(speeds.of(class).unwrap().pairs_per_s, [100, 400, 0]);
    }
}
