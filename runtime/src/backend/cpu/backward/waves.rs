//! Which jobs run at the same time: no two of them add to the same sum.

use std::mem::take;
use std::ops::Range;

use super::TILE;
use super::job::{Job, SumRows};
use crate::backend::Layout;

/// The sums of a call, cut into stretches of rows, and the jobs that add to them.
pub(super) struct Waves<'a> {
    /// Batch entries.
    batch: usize,
    q_heads: usize,
    /// For each KV head, the query heads that read it.
    readers: Vec<Range<usize>>,
    /// Tiles of query rows and of keys.
    tiles: [usize; 2],
    /// Tiles of a stretch.
    stretch: usize,
    /// `[batch][query head][stretch]`
    dq: Vec<SumRows<'a>>,
    /// `[batch][KV head][stretch]`
    dk: Vec<SumRows<'a>>,
    /// As `dk`.
    dv: Vec<SumRows<'a>>,
}

/// The elements of a sum, and where its rows and heads are.
pub(super) struct Sum<'a> {
    pub(super) elements: &'a mut [f32],
    pub(super) layout: Layout,
    pub(super) batch: usize,
    pub(super) rows: usize,
    pub(super) heads: usize,
    pub(super) dim: usize,
}

impl<'a> Waves<'a> {
    /// For the sums of query rows and of keys. `kv_head_of` names for each query head the KV head
    /// that it reads; the readers of a KV head are adjacent.
    pub(super) fn new(dq: Sum<'a>, dk: Sum<'a>, dv: Sum<'a>, kv_head_of: &[u32]) -> Self {
        let readers_of = |kv_head: usize| {
            let reads = |head: &u32| *head as usize == kv_head;
            let first = kv_head_of.iter().position(reads).unwrap_or(0);
            first..first + kv_head_of.iter().filter(|head| reads(head)).count()
        };
        let (batch, q_heads, kv_heads) = (dq.batch, dq.heads, dk.heads);
        let tiles = [dq.rows.div_ceil(TILE.q_rows as usize), dk.rows.div_ceil(TILE.kv_cols as usize)];
        let readers: Vec<_> = (0..kv_heads).map(readers_of).collect();
        let most_readers = readers.iter().map(Range::len).max().unwrap_or(1);
        let stretch = stretch(tiles, dq.dim, batch * kv_heads, most_readers);
        Self {
            batch,
            q_heads,
            readers,
            tiles,
            stretch,
            dq: dq.cut(stretch * TILE.q_rows as usize),
            dk: dk.cut(stretch * TILE.kv_cols as usize),
            dv: dv.cut(stretch * TILE.kv_cols as usize),
        }
    }

    /// How many waves there are.
    pub(super) fn count(&self) -> usize {
        self.q_stretches().max(self.kv_stretches())
    }

    /// The jobs of a wave. They take their sums out of `self`: [`Self::take_back`] comes before the
    /// next wave.
    pub(super) fn jobs(&mut self, wave: usize) -> Vec<Job<'a>> {
        let waves = self.count();
        let (q_stretches, kv_stretches) = (self.q_stretches(), self.kv_stretches());
        let mut jobs = Vec::new();
        for batch in 0..self.batch {
            for (kv_head, readers) in
                self.readers.iter().enumerate().filter(|(_, readers)| !readers.is_empty())
            {
                for kv_stretch in 0..kv_stretches {
                    let q_stretch = (kv_stretch + wave) % waves;
                    if q_stretch >= q_stretches {
                        continue;
                    }
                    let kv_slot = (batch * self.readers.len() + kv_head) * kv_stretches + kv_stretch;
                    let q_slot = |q_head: usize| (batch * self.q_heads + q_head) * q_stretches + q_stretch;
                    let tiles = |stretch: usize, tiles: usize| {
                        stretch * self.stretch..tiles.min((stretch + 1) * self.stretch)
                    };
                    jobs.push(Job {
                        batch,
                        q_heads: readers.clone(),
                        kv_head,
                        q_tiles: tiles(q_stretch, self.tiles[0]),
                        kv_tiles: tiles(kv_stretch, self.tiles[1]),
                        kv_slot,
                        dq: readers
                            .clone()
                            .map(q_slot)
                            .map(|slot| (slot, take(&mut self.dq[slot])))
                            .collect(),
                        dk: take(&mut self.dk[kv_slot]),
                        dv: take(&mut self.dv[kv_slot]),
                        bias: Vec::new(),
                    });
                }
            }
        }
        jobs
    }

    /// The sums of the jobs of a wave.
    pub(super) fn take_back(&mut self, jobs: Vec<Job<'a>>) {
        for Job { kv_slot, dq, dk, dv, .. } in jobs {
            for (slot, dq) in dq {
                self.dq[slot] = dq;
            }
            self.dk[kv_slot] = dk;
            self.dv[kv_slot] = dv;
        }
    }

    fn q_stretches(&self) -> usize {
        self.tiles[0].div_ceil(self.stretch)
    }

    fn kv_stretches(&self) -> usize {
        self.tiles[1].div_ceil(self.stretch)
    }
}

impl<'a> Sum<'a> {
    /// Its rows by `[batch][head][stretch]`.
    fn cut(self, rows_of_stretch: usize) -> Vec<SumRows<'a>> {
        let Self { elements, layout, batch, rows, heads, dim } = self;
        let stretches = rows.div_ceil(rows_of_stretch);
        let mut cut: Vec<SumRows<'a>> = Vec::new();
        cut.resize_with(batch * heads * stretches, || Vec::with_capacity(rows_of_stretch.min(rows)));
        let row_stride = layout.row_stride.max(1);
        let (all_heads, all_rows) = (row_stride / dim, layout.batch_stride / row_stride);
        let (first_row, first_head) = (layout.offset / row_stride, layout.offset % row_stride / dim);
        for (index, sum) in elements.chunks_exact_mut(dim).enumerate() {
            let (head, row, entry) =
                (index % all_heads, index / all_heads % all_rows, index / all_heads / all_rows);
            let (Some(head), Some(row)) = (head.checked_sub(first_head), row.checked_sub(first_row)) else {
                continue;
            };
            if head < heads && row < rows && entry < batch {
                cut[(entry * heads + head) * stretches + row / rows_of_stretch].push(sum);
            }
        }
        cut
    }
}

/// Tiles of a stretch: as many as a job may cost, but few enough that a wave has jobs for all
/// cores. Depends on the shape alone, so sums do not depend on the machine.
fn stretch(tiles: [usize; 2], dim: usize, heads: usize, readers: usize) -> usize {
    let of_pair = TILE.q_rows as usize * TILE.kv_cols as usize * dim * PRODUCTS * readers;
    let fits = |stretch: &usize| stretch * stretch * of_pair <= JOB_COST;
    let most = (1..=MOST_TILES).rev().find(fits).unwrap_or(1);
    let jobs =
        |stretch: usize| heads * tiles.map(|tiles| tiles.div_ceil(stretch)).into_iter().min().unwrap_or(0);
    (1..=most).rev().find(|stretch| jobs(*stretch) >= JOBS_OF_WAVE).unwrap_or(1)
}

/// Most multiply-adds of a job: some milliseconds of one core.
const JOB_COST: usize = 300_000_000;
/// Products for each pair.
pub(super) const PRODUCTS: usize = 5;
/// Tiles of a stretch, at most: the work space of a job stays within some megabytes.
const MOST_TILES: usize = 8;
/// Jobs of a wave, where the heads and the lengths allow: more than most machines have cores.
const JOBS_OF_WAVE: usize = 12;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Sums of `rows` rows of dim 8.
    fn sum(elements: &mut [f32], batch: usize, rows: usize, heads: usize) -> Sum<'_> {
        let row = heads * 8;
        let layout = Layout { offset: 0, batch_stride: rows * row, row_stride: row, head_stride: 8 };
        Sum { elements, layout, batch, rows, heads, dim: 8 }
    }

    #[test]
    fn waves_meet_every_pair_once_and_no_sum_twice_at_the_same_time() {
        for (rows, keys) in [(1, 1), (2000, 2000), (100, 3000), (3000, 100), (2000, 1100)] {
            let (batch, q_heads, kv_heads) = (2, 5, 2);
            let mut dq = vec![0.0; batch * rows * q_heads * 8];
            let [mut dk, mut dv] = [(); 2].map(|()| vec![0.0; batch * keys * kv_heads * 8]);
            let of_keys = |elements| sum(elements, batch, keys, kv_heads);
            let dq = sum(&mut dq, batch, rows, q_heads);
            let mut waves = Waves::new(dq, of_keys(&mut dk), of_keys(&mut dv), &[0, 0, 0, 1, 1]);
            let mut met = BTreeSet::new();
            for wave in 0..waves.count() {
                let jobs = waves.jobs(wave);
                let of_keys: BTreeSet<_> = jobs.iter().map(|job| job.kv_slot).collect();
                let of_rows: Vec<_> = jobs.iter().flat_map(|job| &job.dq).map(|(slot, _)| *slot).collect();
                assert_eq!(of_keys.len(), jobs.len());
                assert_eq!(of_rows.iter().collect::<BTreeSet<_>>().len(), of_rows.len());
                for job in &jobs {
                    assert_eq!(job.rows(), rows.min(job.q_tiles.end * 96) - job.q_tiles.start * 96);
                    assert_eq!(job.dk.len(), keys.min(job.kv_tiles.end * 96) - job.kv_tiles.start * 96);
                    assert_eq!(job.q_heads, if job.kv_head == 0 { 0..3 } else { 3..5 });
                    assert!(job.dq.len() == job.q_heads.len());
                    for q_tile in job.q_tiles.clone() {
                        for kv_tile in job.kv_tiles.clone() {
                            for q_head in job.q_heads.clone() {
                                assert!(met.insert((job.batch, q_head, q_tile, kv_tile)));
                            }
                        }
                    }
                }
                waves.take_back(jobs);
            }
            assert_eq!(met.len(), batch * q_heads * rows.div_ceil(96) * keys.div_ceil(96));
        }
    }
}
