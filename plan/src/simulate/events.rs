//! The events of a simulated run, for pictures: when each rank works or waits, and when messages
//! move.

use std::ops::Range;

use kyklos_rank::Rank;

use super::cluster::Cluster;
use super::program::Message;
use super::work::WorkCounter;
use crate::plan::PlanSet;

/// When ranks work and wait, and when messages move; in the order in which things end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PredictedEvents {
    /// Work and waits of all ranks.
    pub work: Vec<PredictedWork>,
    /// Messages of all ranks.
    pub messages: Vec<PredictedMessage>,
}

/// An interval in which a rank does one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredictedWork {
    /// The rank that is busy.
    pub rank: usize,
    /// What it does.
    pub activity: Activity,
    /// For a wait: the other rank of the message that ends it.
    pub peer: Option<usize>,
    /// Start, in nanoseconds from the common start.
    pub start_ns: u64,
    /// End, in nanoseconds from the common start.
    pub end_ns: u64,
}

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activity {
    /// Attention, merging and finalising.
    Compute,
    /// Packing, staging, and posting messages.
    Copy,
    /// Waiting for messages.
    Wait,
}

/// A message between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredictedMessage {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
    /// Payload, in bytes.
    pub bytes: u64,
    /// When its first byte leaves, in nanoseconds from the common start.
    pub start_ns: u64,
    /// When it has arrived, in nanoseconds from the common start.
    pub end_ns: u64,
}

impl PredictedEvents {
    /// A copy of `rank`, in these nanoseconds.
    pub(super) fn copy(&mut self, rank: usize, ns: Range<u64>) {
        let activity = Activity::Copy;
        self.work.push(PredictedWork { rank, activity, peer: None, start_ns: ns.start, end_ns: ns.end });
    }

    /// A message that moved in these nanoseconds.
    pub(super) fn message(&mut self, message: &Message, ns: Range<u64>) {
        let Message { from, to, bytes, .. } = *message;
        self.messages.push(PredictedMessage { from, to, bytes, start_ns: ns.start, end_ns: ns.end });
    }
}

/// Visible (query, key) pairs that each rank computes, times heads. Long runs of queries are
/// counted at the ends of some stretches: exact where the mask cuts them evenly, as causal masks
/// do.
pub fn pairs_of_ranks(set: &PlanSet) -> Vec<f64> {
    let mut counter = WorkCounter::default();
    set.plans.iter().map(|plan| counter.count_plan(set, plan).0).collect()
}

/// [`pairs_of_ranks`] of one rank, without the work for the others.
///
/// # Panics
///
/// If the plans have no such rank.
pub fn pairs_of_rank(set: &PlanSet, rank: Rank) -> f64 {
    WorkCounter::default().count_plan(set, set.plan(rank)).0
}

impl Cluster {
    /// The kind of a device, and its bytes for plan buffers where the description has them; devices
    /// are counted over the cluster from 0.
    pub fn kind_and_memory(&self, device: usize) -> Option<(&str, Option<u64>)> {
        (device < self.device_count()).then(|| (self.kind_of(device), self.memory_bytes(device)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::mask::Mask;
    use crate::mesh::Mesh;
    use crate::placement::{PlacementKind, Split};
    use crate::problem::AttentionProblem;
    use crate::simulate::{simulate, simulate_events};
    use crate::strategy::plan as plan_forward;
    use crate::strategy_list::Strategy;

    const TWO_HOSTS: &str = include_str!("../../../clusters/two-hosts-1gbe.toml");

    #[test]
    fn events_add_up_to_the_prediction() {
        let cluster = Cluster::from_toml(TWO_HOSTS).unwrap();
        let problem = AttentionProblem::new([1, 4096, 8, 2, 64], Dtype::F32, Mask::causal()).unwrap();
        let mesh = Mesh::new(1, 2).unwrap();
        // Uneven shares: rank 0 waits for rank 1.
        let split = Split::Weights(vec![1.0, 3.0]);
        let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &split, Strategy::Ring).unwrap();
        let (prediction, events) = simulate_events(&set, &cluster).unwrap();
        assert_eq!(prediction, simulate(&set, &cluster).unwrap());
        for (rank, predicted) in prediction.ranks.iter().enumerate() {
            let spent = |activity| -> u64 {
                let own = events.work.iter().filter(|work| work.rank == rank && work.activity == activity);
                own.map(|work| work.end_ns - work.start_ns).sum()
            };
            let sums = [Activity::Compute, Activity::Copy, Activity::Wait].map(spent);
            assert_eq!(sums, [predicted.compute_ns, predicted.copy_ns, predicted.wait_ns]);
            let last = events.work.iter().filter(|work| work.rank == rank).map(|work| work.end_ns).max();
            assert_eq!(last, Some(predicted.finish_ns));
            let sent: u64 =
                events.messages.iter().filter(|message| message.from == rank).map(|m| m.bytes).sum();
            assert_eq!(sent, predicted.bytes_sent);
            assert!((pairs_of_ranks(&set)[rank] - predicted.pairs).abs() < 1e-6);
            let of_one = pairs_of_rank(&set, Rank(u32::try_from(rank).unwrap()));
            assert!((of_one - predicted.pairs).abs() < 1e-6, "{of_one} {}", predicted.pairs);
        }
        let waits = || events.work.iter().filter(|work| work.activity == Activity::Wait);
        assert!(waits().count() > 0 && waits().all(|wait| wait.peer == Some(1 - wait.rank)));
    }
}
