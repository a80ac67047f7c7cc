//! The work of an attend step: visible pairs, counted over runs of queries instead of single rows
//! if the mask allows it.

use std::collections::HashMap;

use crate::plan::{Plan, PlanSet, Step};
use crate::problem::AttentionProblem;
use crate::tokens::{FEW_RUNS, Run, TokenRuns, below};

/// The visible part of a block of queries × keys, for one head and all batch entries.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// Visible (query, key) pairs.
    pub(super) pairs: f64,
    /// Ends of intervals that lie inside the block: each cuts a tile of a kernel.
    pub(super) edges: f64,
    /// All pairs of the block.
    pub(super) area: f64,
}

/// Counts work and keeps the counts: ranks of one Ulysses group attend to the same tokens, with
/// other heads.
#[derive(Debug, Default)]
pub(super) struct WorkCounter {
    known: HashMap<[Vec<Run>; 2], Work>,
}

impl WorkCounter {
    /// Of a rank: visible pairs times heads, and attend steps.
    pub(super) fn count_plan(&mut self, set: &PlanSet, plan: &Plan) -> (f64, u64) {
        let (mut pairs, mut steps) = (0.0, 0);
        for step in &plan.steps {
            let (q, kv) = match step {
                Step::Attend { q, kv, .. } => (q, kv),
                Step::AttendBackward(step) => (&step.q, &step.kv),
                _ => continue,
            };
            let work = self.count(&set.problem, &plan.slice_tokens(q), &plan.slice_tokens(kv));
            pairs += work.pairs * f64::from(q.heads.end - q.heads.start);
            steps += 1;
        }
        (pairs, steps)
    }

    pub(super) fn count(&mut self, problem: &AttentionProblem, q: &TokenRuns, kv: &TokenRuns) -> Work {
        let key = [q.runs().to_vec(), kv.runs().to_vec()];
        *self.known.entry(key).or_insert_with(|| {
            let classes = problem.mask.batch_classes();
            let each = f64::from(problem.batch) / count(classes);
            let mut work =
                Work { area: count(q.len()) * count(kv.len()) * f64::from(problem.batch), ..Work::default() };
            let keys = Keys::new(kv);
            for batch in 0..classes {
                let block = Block { problem, batch, keys: &keys };
                for run in q.runs() {
                    let (pairs, edges) = block.run(*run);
                    work.pairs += pairs * each;
                    work.edges += edges * each;
                }
            }
            work
        })
    }
}

struct Block<'a> {
    problem: &'a AttentionProblem,
    batch: usize,
    keys: &'a Keys<'a>,
}

/// The keys of a block.
enum Keys<'a> {
    /// A few runs.
    Runs(&'a [Run]),
    /// Many: sorted, and of each [`STRETCH`] keys of the list the first and the last one.
    Scattered { sorted: Vec<u32>, hulls: Vec<(u32, u32)> },
}

impl<'a> Keys<'a> {
    fn new(kv: &'a TokenRuns) -> Self {
        if kv.runs().len() <= FEW_RUNS {
            return Self::Runs(kv.runs());
        }
        let mut sorted: Vec<u32> = kv.iter().collect();
        let hull =
            |keys: &[u32]| keys.iter().fold((u32::MAX, 0), |(lo, hi), key| (lo.min(*key), hi.max(*key)));
        let hulls = sorted.chunks(STRETCH).map(hull).collect();
        sorted.sort_unstable();
        Self::Scattered { sorted, hulls }
    }
}

/// The visible part of a block for one row.
#[derive(Clone, Copy, PartialEq)]
struct Row {
    keys: f64,
    edges: f64,
    /// The begins and ends of its intervals among the keys, as one number.
    ends: u64,
}

impl Row {
    fn ends_at(&mut self, ends: [u64; 2]) {
        for end in ends {
            self.ends = self.ends.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(end);
        }
    }
}

impl Block<'_> {
    /// Pairs and edges of the queries of one run.
    fn run(&self, run: Run) -> (f64, f64) {
        // If the ends of intervals only grow along the rows, and two rows have the same ends, all rows
        // between them have these ends too.
        let monotone = self.problem.mask.grows_along_queries(self.batch);
        let leaf = (run.count / EXACT_ROWS).max(1);
        let (mut pairs, mut edges) = (0.0, 0.0);
        let mut open = vec![(0, run.count)];
        while let Some((from, to)) = open.pop() {
            let row = |index: u32| self.row(run.start + index * run.stride);
            let (first, last) = (row(from), row(to - 1));
            let settled = monotone && first == last;
            if to - from <= leaf || settled {
                let rows = f64::from(to - from);
                pairs += rows * f64::midpoint(first.keys, last.keys);
                edges += rows * f64::midpoint(first.edges, last.edges);
            } else {
                let middle = from + (to - from) / 2;
                open.extend([(from, middle), (middle, to)]);
            }
        }
        (pairs, edges)
    }

    fn row(&self, token: u32) -> Row {
        let problem = self.problem;
        let spans = problem.mask.visible(self.batch, problem.q_position(token), problem.kv_len);
        let mut row = Row { keys: 0.0, edges: 0.0, ends: 0 };
        for span in spans.iter() {
            match self.keys {
                Keys::Runs(runs) => {
                    for run in *runs {
                        let below = |position: u32| {
                            position.saturating_sub(run.start).div_ceil(run.stride).min(run.count)
                        };
                        let (from, to) = (below(span.lo), below(span.hi));
                        row.ends_at([from, to].map(u64::from));
                        if from < to {
                            row.keys += f64::from(to - from);
                            row.edges += f64::from(u8::from(from > 0) + u8::from(to < run.count));
                        }
                    }
                }
                Keys::Scattered { sorted, hulls } => {
                    let (from, to) = (below(sorted, span.lo), below(sorted, span.hi));
                    row.ends_at([from as u64, to as u64]);
                    if from < to {
                        row.keys += count(to - from);
                        let is_cut = |(first, last): &&(u32, u32)| {
                            let inside = |key: u32| (span.lo..span.hi).contains(&key);
                            *first < span.hi && *last >= span.lo && !(inside(*first) && inside(*last))
                        };
                        row.edges += count(hulls.iter().filter(is_cut).count());
                    }
                }
            }
        }
        row
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of tokens are far below 2^52")]
fn count(n: usize) -> f64 {
    n as f64
}

/// Runs of up to twice this many queries are counted row by row where a mask cuts them. Longer runs
/// are cut into this many stretches and counted at the ends of each: exact where the intervals grow
/// evenly along a stretch, as under causal masks.
const EXACT_ROWS: u32 = 128;
/// Keys of a tile, about: in a list without order an interval cuts most tiles, not only two.
const STRETCH: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::mask::Mask;

    fn by_rows(problem: &AttentionProblem, q: &TokenRuns, kv: &TokenRuns) -> f64 {
        let pairs = (0..problem.batch as usize).map(|batch| {
            let seen = |token| problem.mask.visible(batch, problem.q_position(token), problem.kv_len);
            q.iter()
                .map(|token| {
                    let spans = seen(token);
                    kv.iter().filter(|key| spans.iter().any(|span| span.sees(*key))).count()
                })
                .sum::<usize>()
        });
        pairs.sum::<usize>() as f64
    }

    #[test]
    fn pairs_of_short_runs_are_counted_exactly_under_every_mask() {
        let masks = [
            "full",
            "causal",
            "window:5,3",
            "documents:0,9,30,61",
            "valid:17,40",
            "causal+valid:0",
            "slices:0..40x0..10,10..61x28..50/causal",
            "window:7,-1+documents:0,33,61",
            "causal//documents:0,9,30,61",
            "slices:0..40x0..10,10..61x28..50/causal//valid:17",
        ];
        for mask in masks {
            let mask: Mask = mask.parse().unwrap();
            let problem = AttentionProblem::new([2, 61, 1, 1, 8], Dtype::F32, mask).unwrap();
            let problem = problem.with_queries(61, 4).unwrap();
            let lists = [
                TokenRuns::contiguous(0..61),
                TokenRuns::from_positions((0..20).chain(45..61)),
                TokenRuns::from_positions((1..61).step_by(3)),
                TokenRuns::from_positions((0..61).rev()),
            ];
            for q in &lists {
                for kv in &lists {
                    let work = WorkCounter::default().count(&problem, q, kv);
                    assert_eq!(work.pairs, by_rows(&problem, q, kv), "{} {q} {kv}", problem.mask);
                }
            }
        }
    }

    #[test]
    fn keys_without_order_are_counted_and_cut_most_tiles() {
        let problem = AttentionProblem::new([1, 4096, 1, 1, 8], Dtype::F32, Mask::causal()).unwrap();
        let queries = TokenRuns::contiguous(0..4096);
        let scattered = TokenRuns::from_positions((0..4096).map(|i| i * 1021 % 4096));
        assert!(scattered.runs().len() > FEW_RUNS);
        let [ordered, without] =
            [&queries, &scattered].map(|kv| WorkCounter::default().count(&problem, &queries, kv));
        assert_eq!(ordered.pairs, without.pairs);
        // Of 64 tiles of keys most are cut for most rows, not one.
        assert!(
            ordered.edges <= 4096.0 && without.edges > 40.0 * 4096.0,
            "{} {}",
            ordered.edges,
            without.edges
        );
    }

    #[test]
    fn pairs_of_a_million_causal_tokens_are_the_triangle() {
        let n = 1 << 20;
        let problem = AttentionProblem::new([1, n, 1, 1, 8], Dtype::F32, Mask::causal()).unwrap();
        let mut counter = WorkCounter::default();
        let blocks = 64;
        let block = |i: u32| TokenRuns::contiguous(i * (n / blocks)..(i + 1) * (n / blocks));
        let pairs: f64 = (0..blocks)
            .flat_map(|q| (0..blocks).map(move |kv| (q, kv)))
            .map(|(q, kv)| counter.count(&problem, &block(q), &block(kv)).pairs)
            .sum();
        assert_eq!(pairs, f64::from(n) * (f64::from(n) + 1.0) / 2.0);
    }
}
