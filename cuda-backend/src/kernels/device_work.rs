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
    /// First KV tile, number of KV tiles, and 1 if every row of the query tile sees every key of them, else 0.
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

    /// (query tile, batch entry) of all query tiles that have keys, over `batch` entries, those with the most keys first. Blocks
    /// that compute several items each then end at about the same time.
    pub fn longest_first(&self, batch: u32) -> Vec<[u32; 2]> {
        let tiles = |at: &[u32; 2]| -> u64 {
            let class = if self.classes > 1 { at[1] } else { 0 };
            let starts = &self.starts[(class * (self.q_tiles + 1) + at[0]) as usize..];
            let runs = &self.runs[starts[0] as usize..starts[1] as usize];
            runs.iter().map(|run| u64::from(run[1])).sum()
        };
        let mut order: Vec<[u32; 2]> =
            (0..batch).flat_map(|batch| (0..self.q_tiles).map(move |tile| [tile, batch])).collect();
        order.retain(|at| tiles(at) > 0);
        order.sort_by_key(|at| std::cmp::Reverse(tiles(at)));
        order
    }
}

#[cfg(test)]
mod tests {
    use kyklos::{AttentionProblem, Dtype, TileShape, TokenRuns};

    use super::*;

    #[test]
    fn the_longest_tiles_come_first_and_empty_ones_not_at_all() {
        let tile = TileShape { q_rows: 2, kv_cols: 1 };
        let order = |mask: &str, keys| {
            let problem = AttentionProblem::new([2, 6, 1, 1, 8], Dtype::F16, mask.parse().unwrap()).unwrap();
            let (q, k) = (TokenRuns::contiguous(0..6), TokenRuns::contiguous(keys));
            DeviceWork::new(&BlockWork::layers(&problem, &q, &k, tile)[0]).longest_first(2)
        };
        assert_eq!(order("causal", 0..6), [[2, 0], [2, 1], [1, 0], [1, 1], [0, 0], [0, 1]]);
        assert_eq!(order("causal", 3..6), [[2, 0], [2, 1], [1, 0], [1, 1]]);
        // A mask for each batch entry.
        assert_eq!(order("causal+valid:6,3", 2..6), [[2, 0], [1, 0], [1, 1], [2, 1]]);
    }
}
