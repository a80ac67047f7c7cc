//! The predicted times, bytes and memory of a run.

use std::collections::BTreeMap;

use super::cluster::Cluster;
use crate::error::{Error, Result};

/// The predicted times, bytes and memory of a run.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Prediction {
    /// From the common start to the end of the last rank, in nanoseconds.
    pub wall_ns: u64,
    /// The ranks; of an extrapolated number of ranks, the ranks of the larger plan set that was
    /// walked.
    pub ranks: Vec<RankPrediction>,
    /// The directions of links that carry bytes, the busiest first.
    pub links: Vec<LinkPrediction>,
    /// Whether this is extrapolated from two smaller plan sets with shards of the same size.
    pub extrapolated: bool,
}

/// The predicted times, bytes and memory of one rank.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RankPrediction {
    /// Its device, counted over the cluster from 0.
    pub device: usize,
    /// Nanoseconds from the start until its output is complete.
    pub finish_ns: u64,
    /// Nanoseconds of attention, merging and finalising; on a shared device this includes the turns
    /// of the other ranks.
    pub compute_ns: u64,
    /// Nanoseconds of waiting for messages.
    pub wait_ns: u64,
    /// Nanoseconds of packing, staging, and posting messages.
    pub copy_ns: u64,
    /// Payload sent, in bytes.
    pub bytes_sent: u64,
    /// Messages sent.
    pub messages_sent: u64,
    /// Most bytes of plan buffers alive at once.
    pub peak_bytes: u64,
    /// Visible (query, key) pairs that it computes, times heads.
    pub pairs: f64,
}

/// The predicted load of one direction of a link.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct LinkPrediction {
    /// Host, device and kind of the link.
    pub name: String,
    /// Payload, in bytes.
    pub bytes: u64,
    /// Nanoseconds in which at least one message uses it.
    pub busy_ns: u64,
}

impl Prediction {
    /// Seconds from the common start to the last end.
    #[expect(clippy::cast_precision_loss, reason = "a run is far shorter than 2^52 ns")]
    pub fn wall_s(&self) -> f64 {
        self.wall_ns as f64 / 1e9
    }

    /// Share of the wall time in which ranks compute, on average.
    pub fn overlap(&self) -> f64 {
        self.share(|rank| rank.compute_ns)
    }

    /// Share of the wall time in which ranks neither compute nor copy, on average: waiting, and the
    /// time after the end of a rank.
    pub fn idle(&self) -> f64 {
        (1.0 - self.share(|rank| rank.compute_ns + rank.copy_ns)).max(0.0)
    }

    /// Most bytes of plan buffers that any rank holds at once.
    pub fn peak_bytes(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.peak_bytes).max().unwrap_or(0)
    }

    /// Most payload that any rank sends.
    pub fn bytes_sent(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.bytes_sent).max().unwrap_or(0)
    }

    /// This run and then another one of the same ranks, which begins when the last rank has ended
    /// this one.
    pub(super) fn then(&self, next: &Self) -> Self {
        // An extrapolated prediction may have fewer ranks: they repeat.
        let count = self.ranks.len().max(next.ranks.len());
        let (first, second) = (self.ranks.iter().cycle(), next.ranks.iter().cycle());
        let ranks = first.zip(second).take(count).map(|(first, second)| RankPrediction {
            device: first.device,
            finish_ns: self.wall_ns + second.finish_ns,
            compute_ns: first.compute_ns + second.compute_ns,
            wait_ns: first.wait_ns + second.wait_ns,
            copy_ns: first.copy_ns + second.copy_ns,
            bytes_sent: first.bytes_sent + second.bytes_sent,
            messages_sent: first.messages_sent + second.messages_sent,
            peak_bytes: first.peak_bytes.max(second.peak_bytes),
            pairs: first.pairs + second.pairs,
        });
        let mut loads: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for link in self.links.iter().chain(&next.links) {
            let load = loads.entry(&link.name).or_default();
            *load = (load.0 + link.bytes, load.1 + link.busy_ns);
        }
        let link =
            |(name, (bytes, busy_ns)): (&str, _)| LinkPrediction { name: name.to_owned(), bytes, busy_ns };
        let mut links: Vec<_> = loads.into_iter().map(link).collect();
        links.sort_by_key(|link| std::cmp::Reverse(link.busy_ns));
        Self {
            wall_ns: self.wall_ns + next.wall_ns,
            ranks: ranks.collect(),
            links,
            extrapolated: self.extrapolated || next.extrapolated,
        }
    }

    /// Refuses a run if the ranks of a device need more memory than it has.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the bytes asked and allowed.
    pub fn fits(&self, cluster: &Cluster) -> Result<()> {
        let mut asked = BTreeMap::new();
        for rank in &self.ranks {
            *asked.entry(rank.device).or_insert(0_u64) += rank.peak_bytes;
        }
        for (device, asked_bytes) in asked {
            if let Some(allowed_bytes) = cluster.memory_bytes(device).filter(|allowed| asked_bytes > *allowed)
            {
                return Err(Error::OutOfMemory {
                    device: format!("device {device} ({})", cluster.kind_of(device)),
                    what: "buffers that its ranks hold at once".to_owned(),
                    asked_bytes,
                    allowed_bytes,
                });
            }
        }
        Ok(())
    }

    #[expect(clippy::cast_precision_loss, reason = "sums of times are far below 2^52 ns")]
    fn share(&self, of: impl Fn(&RankPrediction) -> u64) -> f64 {
        let whole = self.wall_ns.max(1) as f64 * self.ranks.len().max(1) as f64;
        self.ranks.iter().map(of).sum::<u64>() as f64 / whole
    }
}
