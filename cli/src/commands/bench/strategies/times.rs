//! What a rank tells rank 0 of a cell.

use std::collections::BTreeMap;

use bytes::Bytes;
use kyklos::RankReport;

use super::record::{Link, Measured, RankMeasured};
use crate::median::median;
use crate::messages::numbers;
use crate::observe::page::units::seconds;

/// The phases of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RankTimes {
    pub(super) plan_ns: u64,
    pub(super) load_ns: u64,
    pub(super) collect_ns: u64,
    /// 0: not known.
    pub(super) process_peak_bytes: u64,
    /// Of one timed run on average, and whether packets are counted.
    pub(super) wire_bytes: Option<u64>,
    /// Bytes of messages to each rank, of one timed run on average.
    pub(super) sent_bytes: Vec<u64>,
    /// The first one, which compiles kernels, and the timed ones.
    pub(super) runs: Vec<RunTimes>,
}

/// One run of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RunTimes {
    /// From the first step of the rank to the end of its output.
    pub(super) wall_ns: u64,
    pub(super) report: RankReport,
}

impl RankTimes {
    /// Bytes of the message of one of `ranks` ranks with `runs` runs.
    pub(super) fn message_bytes(ranks: usize, runs: usize) -> usize {
        8 * (OF_RANK + ranks + OF_RUN * runs)
    }

    pub(super) fn encode(&self, ranks: usize) -> Bytes {
        let Self { plan_ns, load_ns, collect_ns, process_peak_bytes, wire_bytes, sent_bytes, runs } = self;
        let (counts, wire) = (u64::from(wire_bytes.is_some()), wire_bytes.unwrap_or(0));
        let of_rank: [u64; OF_RANK] = [*plan_ns, *load_ns, *collect_ns, *process_peak_bytes, counts, wire];
        let of_links = (0..ranks).map(|to| sent_bytes.get(to).copied().unwrap_or(0));
        let of_runs = runs.iter().flat_map(|RunTimes { wall_ns, report }| -> [u64; OF_RUN] {
            let RankReport {
                tokens,
                compute_ns,
                wait_ns,
                copy_ns,
                bytes_sent,
                messages_sent,
                peak_bytes,
                ..
            } = report;
            [*wall_ns, *tokens, *compute_ns, *wait_ns, *copy_ns, *bytes_sent, *messages_sent, *peak_bytes]
        });
        of_rank
            .into_iter()
            .chain(of_links)
            .chain(of_runs)
            .flat_map(u64::to_le_bytes)
            .collect::<Vec<u8>>()
            .into()
    }

    /// Reads [`Self::encode`] of one of `ranks` ranks with `runs` runs.
    ///
    /// # Panics
    /// If `bytes` are not [`Self::message_bytes`].
    pub(super) fn decode(bytes: &[u8], ranks: usize, runs: usize) -> Self {
        let (of_rank, rest) = bytes.split_at(8 * OF_RANK);
        let (of_links, of_runs) = rest.split_at(8 * ranks);
        let [plan_ns, load_ns, collect_ns, process_peak_bytes, counts, wire] = numbers::<OF_RANK>(of_rank);
        let sent_bytes = of_links.chunks_exact(8).map(|bytes| numbers::<1>(bytes)[0]).collect();
        let runs = of_runs.chunks_exact(8 * OF_RUN).take(runs).map(|run| {
            let [wall_ns, tokens, compute_ns, wait_ns, copy_ns, bytes_sent, messages_sent, peak_bytes] =
                numbers::<OF_RUN>(run);
            let report = RankReport {
                tokens,
                compute_ns,
                wait_ns,
                copy_ns,
                bytes_sent,
                messages_sent,
                peak_bytes,
                ..RankReport::default()
            };
            RunTimes { wall_ns, report }
        });
        let wire_bytes = (counts == 1).then_some(wire);
        let runs = runs.collect();
        Self { plan_ns, load_ns, collect_ns, process_peak_bytes, wire_bytes, sent_bytes, runs }
    }
}

/// The bytes and messages of plans from one rank to another.
pub(super) type Sent = BTreeMap<(u32, u32), (u64, u64)>;

/// The times of a cell, from those of its ranks with their devices. `held` is the largest error and
/// its tolerance.
pub(super) fn measured(ranks: &[(String, RankTimes)], planned: &Sent, held: [f64; 2]) -> Measured {
    let runs = ranks.iter().map(|(_, times)| times.runs.len()).min().unwrap_or(0);
    let wall_ns = |run: usize| {
        ranks.iter().filter_map(|(_, times)| times.runs.get(run)).map(|run| run.wall_ns).max().unwrap_or(0)
    };
    // The first run is none of them.
    let mut timed: Vec<usize> = (1..runs).collect();
    timed.sort_by_key(|run| wall_ns(*run));
    let walls_s = || timed.iter().map(|run| seconds(wall_ns(*run)));
    let middle = timed.get(timed.len() / 2).copied().unwrap_or(0);
    let per_rank = (0..).zip(ranks).map(|(rank, (device, times))| RankMeasured {
        links: links(rank, &times.sent_bytes, planned),
        ..of_rank(rank, device, times, middle)
    });
    let [max_abs_error, tolerance] = held;
    Measured {
        median_s: median(walls_s()),
        min_s: walls_s().fold(f64::INFINITY, f64::min),
        max_s: walls_s().fold(0.0, f64::max),
        runs: u32::try_from(timed.len()).unwrap_or(u32::MAX),
        max_abs_error,
        tolerance,
        per_rank: per_rank.collect(),
    }
}

/// What a rank has sent to each other one, beside what its plan sends.
fn links(rank: u32, sent_bytes: &[u64], planned: &Sent) -> Vec<Link> {
    let link = |(to, bytes): (u32, &u64)| {
        let plan_bytes = planned.get(&(rank, to)).map_or(0, |(bytes, _)| *bytes);
        Link { to, bytes: *bytes, plan_bytes }
    };
    let links = (0..).zip(sent_bytes).map(link);
    links.filter(|link| link.bytes > 0 || link.plan_bytes > 0).collect()
}

fn of_rank(rank: u32, device: &str, times: &RankTimes, middle: usize) -> RankMeasured {
    let run = |index: usize| times.runs.get(index).cloned().unwrap_or_default();
    let (first, RunTimes { wall_ns, report }) = (run(0), run(middle));
    let median_ns = median(times.runs.iter().skip(1).map(|run| seconds(run.wall_ns)));
    RankMeasured {
        rank,
        device: device.to_owned(),
        tokens: report.tokens,
        plan_s: seconds(times.plan_ns),
        load_s: seconds(times.load_ns),
        compile_s: (seconds(first.wall_ns) - median_ns).max(0.0),
        wall_s: seconds(wall_ns),
        compute_s: seconds(report.compute_ns),
        wait_s: seconds(report.wait_ns),
        copy_s: seconds(report.copy_ns),
        collect_s: seconds(times.collect_ns),
        bytes_sent: report.bytes_sent,
        messages_sent: report.messages_sent,
        wire_bytes: times.wire_bytes,
        links: Vec::new(),
        peak_bytes: report.peak_bytes,
        process_peak_bytes: Some(times.process_peak_bytes).filter(|bytes| *bytes > 0),
    }
}

const OF_RANK: usize = 6;
const OF_RUN: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(walls_ms: [u64; 4], compute_ms: [u64; 4]) -> RankTimes {
        let runs = walls_ms.into_iter().zip(compute_ms).map(|(wall, compute)| RunTimes {
            wall_ns: wall * 1_000_000,
            report: RankReport {
                tokens: 5,
                compute_ns: compute * 1_000_000,
                bytes_sent: 7,
                ..RankReport::default()
            },
        });
        RankTimes { plan_ns: 1, load_ns: 2, collect_ns: 3, runs: runs.collect(), ..RankTimes::default() }
    }

    #[test]
    fn a_rank_reads_what_another_has_written() {
        for (peak, wire, sent) in
            [(0, None, vec![0; 3]), (9, Some(0), vec![0, 6, 0]), (9, Some(8), vec![5, 0, 7])]
        {
            let times = RankTimes {
                process_peak_bytes: peak,
                wire_bytes: wire,
                sent_bytes: sent,
                ..rank([9, 1, 2, 3], [4; 4])
            };
            let bytes = times.encode(3);
            assert_eq!(bytes.len(), RankTimes::message_bytes(3, 4));
            assert_eq!(RankTimes::decode(&bytes, 3, 4), times);
        }
    }

    #[test]
    fn the_run_of_a_cell_is_the_median_of_the_slowest_ranks_without_the_first_run() {
        // The slowest rank of each timed run: 30, 20, 40 ms.
        let ranks = [
            ("a".to_owned(), RankTimes { sent_bytes: vec![0, 6], ..rank([90, 30, 10, 12], [1, 2, 3, 4]) }),
            ("b".to_owned(), rank([50, 15, 20, 40], [5, 6, 7, 8])),
        ];
        let planned = Sent::from([((0, 1), (8, 1)), ((1, 0), (8, 1))]);
        let all = measured(&ranks, &planned, [0.0, 1.0]);
        // The slowest rank's; the second rank has counted nothing.
        assert_eq!(all.compute_s().to_bits(), 0.002_f64.to_bits());
        assert_eq!(all.links(), Some((6, [0.75, 0.75])));
        assert_eq!(all.per_rank[0].links, [Link { to: 1, bytes: 6, plan_bytes: 8 }]);
        let Measured { median_s, min_s, max_s, runs, per_rank, .. } = all;
        assert_eq!([median_s, min_s, max_s], [0.030, 0.020, 0.040]);
        assert_eq!(runs, 3);
        // All figures are of the run of 30 ms.
        let of = |rank: usize| (per_rank[rank].wall_s, per_rank[rank].compute_s);
        assert_eq!([of(0), of(1)], [(0.030, 0.002), (0.015, 0.006)]);
        assert!((per_rank[0].compile_s - 0.078).abs() < 1e-9 && (per_rank[1].compile_s - 0.030).abs() < 1e-9);
    }
}
