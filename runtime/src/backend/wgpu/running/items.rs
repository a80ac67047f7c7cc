//! The workgroups of a dispatch, taken in pieces of a given cost.

use std::ops::Range;

use super::pacing::Size;

/// The items of a region: a tile of a head of a batch entry each.
pub(in crate::backend::wgpu) struct Items {
    /// For each mask class, what each tile loops over, in the order of items.
    met: Vec<Vec<u32>>,
    batch_first: usize,
    heads: usize,
    /// Operations for each row or key that a tile loops over.
    flops: f64,
    next: u64,
    /// Items with work from `next` on.
    left: u64,
    all_flops: f64,
}

impl Items {
    pub(in crate::backend::wgpu) fn new(
        met: Vec<Vec<u32>>,
        batch: &Range<usize>,
        heads: usize,
        flops: f64,
    ) -> Self {
        let with_work = |batch: usize| met[batch.min(met.len() - 1)].iter().filter(|met| **met > 0).count();
        let left = batch.clone().map(|batch| (with_work(batch) * heads) as u64).sum();
        let looped = |batch: usize| met[batch.min(met.len() - 1)].iter().copied().map(f64::from).sum::<f64>();
        #[expect(clippy::cast_precision_loss, reason = "heads are few")]
        let all_flops = batch.clone().map(looped).sum::<f64>() * heads as f64 * flops;
        Self { met, batch_first: batch.start, heads, flops, next: 0, left, all_flops }
    }

    /// The next items, and their floating-point operations. Skips items without work at both ends.
    pub(in crate::backend::wgpu) fn next(&mut self, size: Size) -> Option<(Range<u64>, f64)> {
        let (mut taken, mut flops) = (0, 0.0);
        let mut piece: Option<Range<u64>> = None;
        while self.left > 0 {
            let item = self.flops(self.next);
            if item > 0.0 {
                // What remains fills the device too.
                let enough = taken.min(self.left) >= size.fewest_groups.max(1);
                if enough && flops + item > size.flops {
                    break;
                }
                piece = Some(piece.map_or(self.next, |piece| piece.start)..self.next + 1);
                flops += item;
                taken += 1;
                self.left -= 1;
            }
            self.next += 1;
        }
        piece.map(|piece| (piece, flops))
    }

    /// Operations of all items.
    pub(in crate::backend::wgpu) fn all_flops(&self) -> f64 {
        self.all_flops
    }

    fn flops(&self, item: u64) -> f64 {
        let tiles = self.met[0].len() as u64;
        let index = |n: u64| usize::try_from(n).expect("an index into a Vec, or a batch entry");
        let batch = self.batch_first + index(item / tiles) / self.heads;
        let class = batch.min(self.met.len() - 1);
        f64::from(self.met[class][index(item % tiles)]) * self.flops
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_with_work_is_in_one_piece_and_no_piece_has_too_few() {
        // Two mask classes of five tiles, of two heads in three batch entries; the last two have one class.
        let met = vec![vec![0, 4, 0, 1, 3], vec![2, 0, 0, 0, 0]];
        let with_work = [1, 3, 4, 6, 8, 9, 10, 15, 20, 25];
        for (fewest_groups, flops, count) in [
            (1, 0.0, 10),
            (1, 8.0, 6),
            (2, 0.0, 5),
            (3, 0.0, 3),
            (3, 10.0, 3),
            (4, 0.0, 2),
            (6, 0.0, 1),
            (99, 0.0, 1),
        ] {
            let mut items = Items::new(met.clone(), &(0..3), 2, 2.0);
            let size = Size { flops, fewest_groups };
            let pieces: Vec<_> = std::iter::from_fn(|| items.next(size)).collect();
            assert_eq!(pieces.len(), count, "{size:?}: {pieces:?}");
            let seen: Vec<u64> =
                (0..30).filter(|n| pieces.iter().any(|(piece, _)| piece.contains(n))).collect();
            assert!(with_work.iter().all(|n| seen.contains(n)), "{size:?}: {pieces:?}");
            for ((piece, _), next) in
                pieces.iter().zip(pieces[1..].iter().map(|next| next.0.start).chain([30]))
            {
                assert!(piece.end <= next, "{size:?}: {pieces:?}");
                let inside = with_work.iter().filter(|n| piece.contains(n)).count() as u64;
                assert!(inside >= fewest_groups.min(10), "{size:?}: {pieces:?}");
            }
            assert_eq!(pieces.iter().map(|piece| piece.1).sum::<f64>(), 2.0 * (2.0 * 8.0 + 4.0 * 2.0));
            assert_eq!(items.all_flops(), 2.0 * (2.0 * 8.0 + 4.0 * 2.0));
        }
    }
}
