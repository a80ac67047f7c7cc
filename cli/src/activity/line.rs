//! What the line says, from what has happened, at a given time.

use std::collections::BTreeMap;
use std::time::Duration;

/// What has happened so far. Times are since the start of the process.
#[derive(Debug, Default)]
pub(super) struct Happened {
    /// What this process does, and since when.
    doing: Option<(String, Duration)>,
    work: Option<Work>,
    /// Of `kyklos launch`: the lines of its processes, by rank.
    of_processes: BTreeMap<u32, String>,
}

/// The computation of the ranks of this process.
#[derive(Debug)]
struct Work {
    began: Duration,
    /// When any of it was done last.
    latest: Duration,
    ranks: BTreeMap<u32, OfRank>,
}

/// The computation of one rank.
#[derive(Debug, Default)]
struct OfRank {
    /// Floating-point operations of each pass, and how often the rank computes all passes.
    flops: Vec<f64>,
    repeat: u64,
    /// Passes done, and the share of the next one.
    passes: u64,
    share: f64,
    /// Its step, in words.
    step: String,
}

impl Happened {
    /// From now on this process does this, or still.
    pub(super) fn doing(&mut self, what: &str, now: Duration) {
        if self.doing.as_ref().is_none_or(|(before, _)| before != what) {
            self.doing = Some((what.to_owned(), now));
        }
    }

    /// From now on this process does nothing that takes time.
    pub(super) fn ends(&mut self) {
        *self = Self::default();
    }

    /// `rank` will compute passes of `flops` floating-point operations each, `repeat` times all of
    /// them.
    pub(super) fn joins(&mut self, rank: u32, flops: Vec<f64>, repeat: u64, now: Duration) {
        let work = self.work.get_or_insert_with(|| Work { began: now, latest: now, ranks: BTreeMap::new() });
        work.ranks.insert(rank, OfRank { flops, repeat, ..OfRank::default() });
    }

    /// `rank` begins a step of a pass; the first one of all ranks ends what was done before.
    pub(super) fn step(&mut self, rank: u32, step: String, now: Duration) {
        let Some(work) = &mut self.work else { return };
        if self.doing.take().is_some() && work.ranks.values().all(|rank| rank.done() == 0.0) {
            (work.began, work.latest) = (now, now);
        }
        if let Some(of_rank) = work.ranks.get_mut(&rank) {
            of_rank.step = step;
        }
    }

    /// `rank` has done this share of its pass.
    pub(super) fn worked(&mut self, rank: u32, share: f64, now: Duration) {
        let Some(work) = &mut self.work else { return };
        if let Some(of_rank) = work.ranks.get_mut(&rank) {
            of_rank.share = share;
            work.latest = now;
            // What another rank does, which has nothing to compute any more, is less of interest.
            self.doing = None;
        }
    }

    /// `rank` has done its pass.
    pub(super) fn passed(&mut self, rank: u32, now: Duration) {
        let Some(work) = &mut self.work else { return };
        if let Some(of_rank) = work.ranks.get_mut(&rank) {
            (of_rank.passes, of_rank.share) = (of_rank.passes + 1, 0.0);
            work.latest = now;
        }
    }

    /// The process of `rank` says this; nothing if its line is empty.
    pub(super) fn process_says(&mut self, rank: u32, line: &str) {
        self.doing = None;
        match line {
            "" => self.of_processes.remove(&rank),
            line => self.of_processes.insert(rank, line.to_owned()),
        };
    }

    /// The line; none if nothing takes time.
    pub(super) fn line(&self, now: Duration) -> Option<String> {
        if let Some((rank, line)) = self.of_processes.first_key_value() {
            return Some(joined(*rank, line, self.of_processes.iter().skip(1)));
        }
        match (&self.doing, &self.work) {
            (Some((what, since)), _) => Some(format!("{what}, {}", time(now.saturating_sub(*since)))),
            (None, Some(work)) => Some(work.line(now)),
            (None, None) => None,
        }
    }
}

impl Work {
    fn line(&self, now: Duration) -> String {
        let sum = |of: fn(&OfRank) -> f64| self.ranks.values().map(of).sum::<f64>();
        let (done, all) = (sum(OfRank::done), sum(OfRank::all));
        let share = share(done, all);
        let mut words = vec![format!("{} {}", bar(share), percent(share))];
        words.push(time(now.saturating_sub(self.began)));
        let took_s = self.latest.saturating_sub(self.began).as_secs_f64();
        if done > 0.0 && took_s > 0.0 {
            let flops_per_s = done / took_s;
            let left_s = (all - done) / flops_per_s - now.saturating_sub(self.latest).as_secs_f64();
            words.push(format!("{} left", time(Duration::from_secs_f64(left_s.clamp(0.0, MOST_S)))));
            words.push(speed(flops_per_s));
        } else if all > 0.0 {
            // A device compiles a kernel when it needs it first.
            words.push("kernels and the first piece of work".to_owned());
        }
        words.extend(self.of_ranks());
        words.join(", ")
    }

    /// The share of each rank, of many the least ones; and what the last of them does.
    fn of_ranks(&self) -> Option<String> {
        let mut ranks: Vec<_> = self.ranks.iter().collect();
        let share = |of_rank: &OfRank| share(of_rank.done(), of_rank.all());
        let (_, last) = ranks.iter().copied().min_by(|(_, a), (_, b)| share(a).total_cmp(&share(b)))?;
        if let [_] = ranks[..] {
            return Some(last.step.clone()).filter(|step| !step.is_empty());
        }
        ranks.sort_by(|(_, a), (_, b)| share(a).total_cmp(&share(b)));
        ranks.truncate(MOST_RANKS);
        ranks.sort_by_key(|(rank, _)| **rank);
        let shares: Vec<String> =
            ranks.iter().map(|(rank, of_rank)| format!("{rank}: {}", percent(share(of_rank)))).collect();
        let behind = if self.ranks.len() > MOST_RANKS { "last ranks" } else { "ranks" };
        Some(format!("{behind} {}; {}", shares.join(", "), last.step))
    }
}

impl OfRank {
    fn all(&self) -> f64 {
        count(self.repeat) * self.flops.iter().sum::<f64>()
    }

    fn done(&self) -> f64 {
        let passes = self.flops.len().max(1) as u64;
        let runs = count(self.passes / passes) * self.flops.iter().sum::<f64>();
        let index = usize::try_from(self.passes % passes).unwrap_or(0);
        let (before, after) = self.flops.split_at(index.min(self.flops.len()));
        runs + before.iter().sum::<f64>() + self.share * after.first().copied().unwrap_or(0.0)
    }
}

/// The line of one process, and how far the others are.
fn joined<'a>(rank: u32, line: &str, others: impl ExactSizeIterator<Item = (&'a u32, &'a String)>) -> String {
    if others.len() == 0 {
        return format!("[{rank}] {line}");
    }
    let more = others.len().saturating_sub(MOST_RANKS);
    let mut words = vec![format!("[{rank}] {}", line.chars().take(MOST_CHARS).collect::<String>())];
    for (rank, line) in others.take(MOST_RANKS) {
        // The share behind a bar, or what the process does, without its time.
        let said = match line.split_once("] ") {
            Some((bar, rest)) if bar.starts_with('[') => rest.split(", ").next().unwrap_or_default(),
            _ => line.rsplit_once(", ").map_or(&line[..], |(what, _)| what),
        };
        words.push(format!("[{rank}] {said}"));
    }
    if more > 0 {
        words.push(format!("{more} more"));
    }
    words.join("; ")
}

/// What `done` is of `all`. Nothing is all of nothing.
fn share(done: f64, all: f64) -> f64 {
    if all > 0.0 { (done / all).clamp(0.0, 1.0) } else { 1.0 }
}

#[expect(clippy::cast_precision_loss, reason = "numbers of runs")]
fn count(n: u64) -> f64 {
    n as f64
}

fn bar(share: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most the cells")]
    let full = (share * count(CELLS as u64)) as usize;
    format!("[{}{}]", "#".repeat(full.min(CELLS)), "-".repeat(CELLS - full.min(CELLS)))
}

/// Rounded down: 100 % is all.
fn percent(share: f64) -> String {
    format!("{} %", (share * 100.0).floor())
}

/// In whole seconds.
fn time(time: Duration) -> String {
    let s = time.as_secs();
    match (s / 3600, s / 60 % 60, s % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, minutes, s) => format!("{minutes} min {s} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

fn speed(flops_per_s: f64) -> String {
    let (unit, of) = if flops_per_s < 1e12 { ("GFLOP/s", 1e9) } else { ("TFLOP/s", 1e12) };
    format!("{:.1} {unit}", flops_per_s / of)
}

/// Characters of the bar.
const CELLS: usize = 20;
/// Ranks whose shares a line has room for.
const MOST_RANKS: usize = 4;
/// Of the line of a process beside which others are shown.
const MOST_CHARS: usize = 64;
/// A longer time is not known better.
const MOST_S: f64 = 1e7;

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    #[test]
    fn what_takes_time_is_said_with_its_time() {
        let mut happened = Happened::default();
        assert_eq!(happened.line(s(3)), None);
        happened.doing("making random tensors", s(1));
        assert_eq!(happened.line(s(1)).unwrap(), "making random tensors, 0 s");
        happened.doing("making random tensors", s(40));
        assert_eq!(happened.line(s(76)).unwrap(), "making random tensors, 1 min 15 s");
        happened.ends();
        assert_eq!(happened.line(s(77)), None);
    }

    #[test]
    fn work_is_counted_in_operations_and_the_time_left_follows_from_the_speed() {
        let mut happened = Happened::default();
        happened.doing("making random tensors", s(1));
        happened.joins(0, vec![100e9], 1, s(2));
        assert_eq!(happened.line(s(4)).unwrap(), "making random tensors, 3 s");
        happened.step(0, "attend".to_owned(), s(10));
        // Nothing is done, but the line does not stand still.
        let line = "[--------------------] 0 %, 2 s, kernels and the first piece of work, attend";
        assert_eq!(happened.line(s(12)).unwrap(), line);
        happened.worked(0, 0.25, s(15));
        let line = "[#####---------------] 25 %, 5 s, 15 s left, 5.0 GFLOP/s, attend";
        assert_eq!(happened.line(s(15)).unwrap(), line);
        // The time that is left falls also between two pieces, but not below zero.
        assert!(happened.line(s(20)).unwrap().contains(" 10 s, 10 s left, 5.0 GFLOP/s"));
        assert!(happened.line(s(90)).unwrap().contains(" 1 min 20 s, 0 s left"));
        happened.passed(0, s(30));
        assert!(happened.line(s(30)).unwrap().contains("[####################] 100 %, 20 s, 0 s left"));
        happened.doing("writing the output", s(31));
        assert_eq!(happened.line(s(33)).unwrap(), "writing the output, 2 s");
    }

    #[test]
    fn each_rank_has_a_share_and_all_have_one_bar() {
        let mut happened = Happened::default();
        for rank in 0..2 {
            happened.joins(rank, vec![4e12, 6e12], 2, s(0));
            happened.step(rank, format!("step of {rank}"), s(0));
        }
        // Rank 0: a run, and half of the first pass of the second one. Rank 1: half of a pass.
        happened.passed(0, s(1));
        happened.passed(0, s(2));
        happened.worked(0, 0.5, s(3));
        happened.worked(1, 0.5, s(4));
        let line =
            "[#######-------------] 35 %, 4 s, 7 s left, 3.5 TFLOP/s, ranks 0: 60 %, 1: 10 %; step of 1";
        assert_eq!(happened.line(s(4)).unwrap(), line);
        // A rank that is not one of this process changes nothing.
        happened.worked(7, 1.0, s(4));
        assert_eq!(happened.line(s(4)).unwrap(), line);
        for rank in 2..9 {
            happened.joins(rank, vec![1e12], 1, s(4));
        }
        let line = happened.line(s(4)).unwrap();
        assert!(line.contains("last ranks 2: 0 %, 3: 0 %, 4: 0 %, 5: 0 %; "), "{line}");
    }

    #[test]
    fn a_launcher_shows_the_line_of_its_first_process_and_how_far_the_others_are() {
        let mut happened = Happened::default();
        let line = "[#####---------------] 25 %, 5 s, 15 s left, 5.0 GFLOP/s, attend";
        happened.process_says(0, line);
        assert_eq!(happened.line(s(1)).unwrap(), format!("[0] {line}"));
        happened.process_says(1, "[########------------] 41 %, 5 s");
        happened.process_says(2, "waiting for ranks 0, 3 to join the group, 3 s");
        let whole = format!("[0] {line}; [1] 41 %; [2] waiting for ranks 0, 3 to join the group");
        assert_eq!(happened.line(s(1)).unwrap(), whole);
        for rank in 3..9 {
            happened.process_says(rank, "[] 1 %, 5 s");
        }
        assert!(happened.line(s(1)).unwrap().ends_with("[3] 1 %; [4] 1 %; 4 more"));
        for rank in 0..9 {
            happened.process_says(rank, "");
        }
        assert_eq!(happened.line(s(1)), None);
    }

    #[test]
    fn a_rank_without_work_is_done() {
        let mut happened = Happened::default();
        happened.joins(0, vec![0.0], 1, s(0));
        happened.step(0, String::new(), s(0));
        assert_eq!(happened.line(s(1)).unwrap(), "[####################] 100 %, 1 s");
    }
}
