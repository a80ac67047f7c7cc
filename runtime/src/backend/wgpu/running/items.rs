//! The workgroups of a dispatch, taken in pieces of a given cost.

use std::ops::Range;

/// The items of a region: a tile of a head of a batch entry each.
pub(in crate::backend::wgpu) struct Items {
    /// For each mask class, what each tile loops over, in the order of items.
    met: Vec<Vec<u32>>,
    batch_first: usize,
    heads: usize,
    /// Operations for each row or key that a tile loops over.
    flops: f64,
    next: u64,
    items: u64,
}

impl Items {
    pub(in crate::backend::wgpu) fn new(
        met: Vec<Vec<u32>>,
        batch: &Range<usize>,
        heads: usize,
        flops: f64,
    ) -> Self {
        let items = (batch.len() * heads * met[0].len()) as u64;
        Self { met, batch_first: batch.start, heads, flops, next: 0, items }
    }

    /// The next items, at least one, with about `budget` floating-point operations; and their
    /// number of operations. Skips items without work at both ends.
    pub(in crate::backend::wgpu) fn next(&mut self, budget: f64) -> Option<(Range<u64>, f64)> {
        while self.next < self.items && self.flops(self.next) == 0.0 {
            self.next += 1;
        }
        let first = self.next;
        let (mut end, mut flops) = (first, 0.0);
        while self.next < self.items {
            let item = self.flops(self.next);
            if flops > 0.0 && flops + item > budget {
                break;
            }
            self.next += 1;
            flops += item;
            if item > 0.0 {
                end = self.next;
            }
        }
        (end > first).then_some((first..end, flops))
    }

    /// Operations of all items.
    pub(in crate::backend::wgpu) fn all_flops(&self) -> f64 {
        (0..self.items).map(|item| self.flops(item)).sum()
    }

    fn flops(&self, item: u64) -> f64 {
        let tiles = self.met[0].len() as u64;
        let index = |n: u64| usize::try_from(n).expect("an index into a Vec, or a batch entry");
        let batch = self.batch_first + index(item / tiles) / self.heads;
        let class = batch.min(self.met.len() - 1);
        f64::from(self.met[class][index(item % tiles)]) * self.flops
    }
}
