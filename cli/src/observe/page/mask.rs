//! A mask as a picture of few cells, with the ranks that hold its queries and keys.

use kyklos::plan::PlanSet;
use kyklos::{Placement, Run};

/// What queries see of keys, in blocks of consecutive queries × consecutive keys.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MaskPicture {
    /// Batch entries with this picture.
    pub(crate) entries: Vec<u32>,
    pub(crate) q_len: u32,
    pub(crate) kv_len: u32,
    /// By block of queries, from the first query on.
    pub(crate) q_holders: Vec<Holder>,
    /// By block of keys.
    pub(crate) kv_holders: Vec<Holder>,
    /// By block of queries, then of keys: the visible part, from 0 to 1.
    pub(crate) cells: Vec<Vec<f32>>,
    /// Visible pairs of the batch entry, if every query was looked at.
    pub(crate) pairs: Option<u64>,
}

/// Who holds a block of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Most tokens of the block are of this rank, by its index.
    Rank(u32),
    /// No rank has most of the tokens.
    Several,
    /// Every rank has them.
    Every,
}

/// The different pictures of the first batch entries.
pub(crate) fn pictures(set: &PlanSet) -> Vec<MaskPicture> {
    let mut pictures: Vec<MaskPicture> = Vec::new();
    for entry in 0..set.problem.batch.min(MOST_ENTRIES) {
        let picture = of_entry(set, entry);
        let same = |other: &MaskPicture| other.cells == picture.cells && other.pairs == picture.pairs;
        match pictures.iter().position(same) {
            Some(same) => pictures[same].entries.push(entry),
            None if pictures.len() < MOST_PICTURES => pictures.push(picture),
            None => {}
        }
    }
    pictures
}

fn of_entry(set: &PlanSet, entry: u32) -> MaskPicture {
    let problem = &set.problem;
    let (rows, columns) = (blocks(problem.q_len), blocks(problem.kv_len));
    let every_query = u64::from(problem.q_len) <= MOST_QUERIES;
    let mut pairs = 0;
    let mut cells = Vec::new();
    for row in 0..rows.len() - 1 {
        let (begin, end) = (rows[row], rows[row + 1]);
        let step = if every_query { 1 } else { ((end - begin) / SAMPLES).max(1) };
        let mut seen = vec![0_u64; columns.len() - 1];
        let mut queries = 0;
        for query in (begin..end).step_by(step as usize) {
            queries += 1;
            let visible = problem.mask.visible(entry as usize, problem.q_position(query), problem.kv_len);
            for span in visible.iter() {
                pairs += u64::from(span.hi - span.lo);
                overlaps(&columns, span.lo..span.hi, |column, keys| seen[column] += u64::from(keys));
            }
        }
        let part = |(column, seen): (usize, &u64)| {
            let area = u64::from(columns[column + 1] - columns[column]) * queries;
            #[expect(clippy::cast_possible_truncation, reason = "a share")]
            let part = super::units::ratio(*seen, area) as f32;
            part
        };
        cells.push(seen.iter().enumerate().map(part).collect());
    }
    MaskPicture {
        entries: vec![entry],
        q_len: problem.q_len,
        kv_len: problem.kv_len,
        q_holders: holders(&set.q_placement, &rows),
        kv_holders: holders(&set.kv_placement, &columns),
        cells,
        pairs: every_query.then_some(pairs),
    }
}

/// The ends of at most [`MOST_BLOCKS`] blocks of about the same length, from 0 to `tokens`.
fn blocks(tokens: u32) -> Vec<u32> {
    let count = tokens.clamp(1, MOST_BLOCKS);
    #[expect(clippy::cast_possible_truncation, reason = "at most `tokens`")]
    let end = |block: u32| (u64::from(tokens) * u64::from(block) / u64::from(count)) as u32;
    (0..=count).map(end).collect()
}

/// Calls `met` with each block that `range` meets, and the tokens in both.
fn overlaps(ends: &[u32], range: std::ops::Range<u32>, mut met: impl FnMut(usize, u32)) {
    let first = ends.partition_point(|end| *end <= range.start).saturating_sub(1);
    for (block, pair) in ends.windows(2).enumerate().skip(first) {
        if pair[0] >= range.end {
            break;
        }
        let tokens = pair[1].min(range.end).saturating_sub(pair[0].max(range.start));
        if tokens > 0 {
            met(block, tokens);
        }
    }
}

fn holders(placement: &Placement, ends: &[u32]) -> Vec<Holder> {
    let blocks = ends.len() - 1;
    // Of each block: the rank with most of its tokens so far, and all tokens that have an owner.
    let mut most = vec![(0_u32, 0_u32); blocks];
    let mut owned = vec![0_u32; blocks];
    for (rank, tokens) in (0..).zip(placement.ranks()) {
        let mut own = vec![0_u32; blocks];
        tokens.runs().iter().for_each(|run| add(run, ends, &mut own));
        for (block, count) in own.into_iter().enumerate() {
            owned[block] += count;
            if count > most[block].1 {
                most[block] = (rank, count);
            }
        }
    }
    let mut shared = vec![0_u32; blocks];
    placement.replicated().runs().iter().for_each(|run| add(run, ends, &mut shared));
    let holder = |block: usize| {
        let tokens = ends[block + 1] - ends[block];
        let (rank, count) = most[block];
        match tokens {
            _ if shared[block] * 2 > tokens => Holder::Every,
            _ if count * 2 > tokens => Holder::Rank(rank),
            _ => Holder::Several,
        }
    };
    (0..blocks).map(holder).collect()
}

/// Adds the tokens of a run to the counts of their blocks.
fn add(run: &Run, ends: &[u32], counts: &mut [u32]) {
    let (start, stride) = (run.start, run.stride.max(1));
    // Tokens of the run below a position.
    let below = |position: u32| position.saturating_sub(start).div_ceil(stride).min(run.count);
    let last = start + (run.count.max(1) - 1) * stride;
    overlaps(ends, start..last + 1, |block, _| counts[block] += below(ends[block + 1]) - below(ends[block]));
}

/// Blocks of a side of the picture.
const MOST_BLOCKS: u32 = 96;
/// Up to this many queries, each is looked at; of more, [`SAMPLES`] of each block.
const MOST_QUERIES: u64 = 1 << 18;
const SAMPLES: u32 = 32;
const MOST_ENTRIES: u32 = 16;
const MOST_PICTURES: usize = 4;

#[cfg(test)]
mod tests {
    use kyklos::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_forward};

    use super::*;

    fn set(tokens: u32, mask: &str, placement: PlacementKind) -> PlanSet {
        let mask: Mask = mask.parse().unwrap();
        let problem = AttentionProblem::new([2, tokens, 2, 1, 8], Dtype::F32, mask).unwrap();
        plan_forward(&problem, Mesh::new(1, 3).unwrap(), placement, &Split::Even, Strategy::Ring).unwrap()
    }

    #[test]
    fn cells_add_up_to_the_visible_pairs_and_each_token_is_where_its_rank_is() {
        let pictures = pictures(&set(600, "causal//window:40,0", PlacementKind::Contiguous));
        assert_eq!(pictures.iter().map(|picture| picture.entries.clone()).collect::<Vec<_>>(), [[0], [1]]);
        let causal = &pictures[0];
        assert_eq!(causal.pairs, Some(600 * 601 / 2));
        let ends = blocks(600);
        let area: f64 = causal
            .cells
            .iter()
            .enumerate()
            .flat_map(|(row, cells)| {
                let ends = &ends;
                cells.iter().enumerate().map(move |(column, part)| {
                    f64::from(*part)
                        * f64::from((ends[row + 1] - ends[row]) * (ends[column + 1] - ends[column]))
                })
            })
            .sum();
        assert!((area - 180_300.0).abs() < 1.0, "{area}");
        // The first cell of the last row is seen, the last cell of the first row is not.
        assert_eq!((causal.cells[95][0], causal.cells[0][95]), (1.0, 0.0));
        let of = |rank| causal.q_holders.iter().filter(|holder| **holder == Holder::Rank(rank)).count();
        assert_eq!([of(0), of(1), of(2)], [32, 32, 32]);
    }

    #[test]
    fn equal_entries_are_one_picture_and_dealt_tokens_are_of_several_ranks() {
        let pictures = pictures(&set(600, "causal", PlacementKind::Striped));
        assert_eq!(pictures.len(), 1);
        assert_eq!(pictures[0].entries, [0, 1]);
        assert!(pictures[0].kv_holders.iter().all(|holder| *holder == Holder::Several));
    }

    #[test]
    fn a_picture_of_few_tokens_has_a_cell_for_each_pair() {
        let pictures = pictures(&set(5, "causal", PlacementKind::Contiguous));
        assert_eq!(pictures[0].cells[2], [1.0, 1.0, 1.0, 0.0, 0.0]);
    }
}
