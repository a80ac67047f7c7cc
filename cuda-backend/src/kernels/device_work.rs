//! Work lists as kernels read them.

use kyklos::{BlockWork, RowSpan};

/// A [`BlockWork`] as flat arrays for the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceWork {
    /// `[classes, rows]`: the key positions that each row sees.
    pub spans: Vec<RowSpan>,
    /// `[keys]`: the position of each key.
    pub positions: Vec<u32>,
    /// `[classes, q_tiles + 1]`: the index in `runs` at which the runs of each query tile begin.
    pub starts: Vec<u32>,
    /// First KV tile, number of KV tiles, and 1 if every row of the query tile sees every key of
    /// them, else 0.
    pub runs: Vec<[u32; 3]>,
    /// Mask classes.
    pub classes: u32,
    /// Query tiles of a class.
    pub q_tiles: u32,
}

impl DeviceWork {
    /// The arrays of `work`.
    pub fn new(work: &BlockWork) -> Self {
        let small = |n: usize| u32::try_from(n).expect("positions are u32, so what is counted over them is");
        let mut flat = Self {
            spans: Vec::new(),
            positions: work.kv_positions.clone(),
            starts: Vec::new(),
            runs: Vec::new(),
            classes: small(work.classes.len()),
            q_tiles: small(work.q_tiles()),
        };
        for class in &work.classes {
            let before = small(flat.runs.len());
            flat.spans.extend_from_slice(&class.rows);
            flat.starts.extend(class.starts.iter().map(|start| before + start));
            flat.runs.extend(class.runs.iter().map(|run| [run.kv_tile, run.count, u32::from(run.full)]));
        }
        flat
    }

    /// (query tile, batch entry) of all query tiles that have keys, over `batch` entries, those
    /// with the most keys first. Blocks that compute several items each then end at about the
    /// same time. `all`: those without keys too, for a fresh state.
    pub fn longest_first(&self, batch: u32, all: bool) -> Vec<[u32; 2]> {
        let tiles = |at: &[u32; 2]| -> u64 {
            let class = if self.classes > 1 { at[1] } else { 0 };
            let starts = &self.starts[(class * (self.q_tiles + 1) + at[0]) as usize..];
            let runs = &self.runs[starts[0] as usize..starts[1] as usize];
            runs.iter().map(|run| u64::from(run[1])).sum()
        };
        let mut order: Vec<[u32; 2]> =
            (0..batch).flat_map(|batch| (0..self.q_tiles).map(move |tile| [tile, batch])).collect();
        order.retain(|at| all || tiles(at) > 0);
        order.sort_by_key(|at| std::cmp::Reverse(tiles(at)));
        order
    }
}

#[cfg(test)]
mod tests {
    use kyklos::{AttentionProblem, Dtype, TileShape, TokenRuns};

    use super::*;
    use crate::{AttendKernel, item_of_round};

    /// The tiles of keys of the busiest of `blocks` blocks, divided by the mean, where
    /// `item_of(round, block, blocks)` are the items of a block.
    fn imbalance(tokens: u32, heads: u32, blocks: u32, item_of: impl Fn(u32, u32, u32) -> u32) -> f64 {
        let problem =
            AttentionProblem::new([1, tokens, heads, heads, 128], Dtype::Bf16, "causal".parse().unwrap())
                .unwrap();
        let all = TokenRuns::contiguous(0..tokens);
        let tile = AttendKernel::hopper(Dtype::Bf16, 128).unwrap().tile;
        let work = DeviceWork::new(&BlockWork::layers(&problem, &all, &all, tile)[0]);
        let order = work.longest_first(1, false);
        let tiles_of = |item: u32| {
            let [tile, _] = order[(item / heads) as usize];
            let ends = [work.starts[tile as usize], work.starts[tile as usize + 1]].map(|at| at as usize);
            work.runs[ends[0]..ends[1]].iter().map(|run| f64::from(run[1])).sum::<f64>()
        };
        let items = u32::try_from(order.len()).unwrap() * heads;
        let mut seen = vec![false; items as usize];
        let mut loads = Vec::new();
        for block in 0..blocks {
            let of_block = (0..).map(|round| item_of(round, block, blocks)).take_while(|item| *item < items);
            let of_block = of_block.inspect(|item| seen[*item as usize] = true);
            loads.push(of_block.map(tiles_of).sum::<f64>());
        }
        assert!(seen.iter().all(|seen| *seen), "an item has no block");
        loads.iter().copied().fold(0.0, f64::max) * f64::from(blocks) / loads.iter().sum::<f64>()
    }

    #[test]
    fn blocks_of_a_causal_call_have_about_the_same_work() {
        for (tokens, heads, blocks, most) in
            [(16_384, 16, 132, 1.005), (16_384, 32, 132, 1.005), (65_536, 8, 78, 1.005)]
        {
            let found = imbalance(tokens, heads, blocks, item_of_round);
            assert!(found <= most, "{tokens} tokens, {heads} heads, {blocks} blocks: {found}");
        }
        // Each round from the first block on: that block gets the longest item of each.
        let one_way = imbalance(16_384, 16, 132, |round, block, blocks| round * blocks + block);
        assert!(one_way > 1.06, "{one_way}");
    }

    #[test]
    fn the_longest_tiles_come_first_and_empty_ones_not_at_all() {
        let tile = TileShape { q_rows: 2, kv_cols: 1 };
        let order = |mask: &str, keys| {
            let problem = AttentionProblem::new([2, 6, 1, 1, 8], Dtype::F16, mask.parse().unwrap()).unwrap();
            let (q, k) = (TokenRuns::contiguous(0..6), TokenRuns::contiguous(keys));
            let work = DeviceWork::new(&BlockWork::layers(&problem, &q, &k, tile)[0]);
            let (all, order) = (work.longest_first(2, true), work.longest_first(2, false));
            // With those without keys, which come last.
            assert_eq!((all.len(), &all[..order.len()]), (6, &order[..]));
            order
        };
        assert_eq!(order("causal", 0..6), [[2, 0], [2, 1], [1, 0], [1, 1], [0, 0], [0, 1]]);
        assert_eq!(order("causal", 3..6), [[2, 0], [2, 1], [1, 0], [1, 1]]);
        // A mask for each batch entry.
        assert_eq!(order("causal+valid:6,3", 2..6), [[2, 0], [1, 0], [1, 1], [2, 1]]);
    }
}
