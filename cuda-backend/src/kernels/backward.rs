//! The kernels of the backward pass, and their work lists.

use kyklos::{BlockWork, Dtype, MaskClass, TileShape};

/// The tiles of work lists of the backward pass, for all kernels. They are square.
pub const BACKWARD_TILE: TileShape = TileShape { q_rows: 64, kv_cols: 64 };

/// Head dims of the tensor-core kernels, with the keys that the kernel of dQ, and the rows that the
/// kernel of dK and dV, multiplies at a time. Another head dim uses the next larger kernel, padded
/// with zeros in shared memory.
const SIZES: [(u32, [u32; 2]); 5] =
    [(64, [32, 64]), (96, [64, 32]), (128, [64, 32]), (192, [32, 32]), (256, [16, 16])];

/// Head dims of the kernels for Hopper. TMA pads with zeros.
const HOPPER_DIMS: [u32; 2] = [64, 128];

/// What a kernel of the backward pass adds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackwardSums {
    /// dQ: a block has query rows.
    Queries,
    /// dK and dV: a block has keys of a KV head.
    Keys,
    /// The gradient of an additive bias: a block has keys, for one query head.
    Bias,
}

/// A kernel of the backward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackwardKernel {
    /// Its name in the module.
    pub name: String,
    /// What it makes.
    pub makes: BackwardSums,
    /// Query rows, or keys, of a block.
    pub fixed: u32,
    /// Rows of the other side that it multiplies at a time.
    pub moving: u32,
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
    /// Whether it is a kernel for Hopper, which takes [`crate::HopperBackwardArguments`]; others
    /// take [`crate::BackwardArguments`].
    pub wgmma: bool,
}

impl BackwardKernel {
    /// The kernels for all devices of dQ, and of dK and dV, for a storage type and a head dim.
    /// `None` above a head dim of 256.
    pub fn both(dtype: Dtype, dim: u32) -> Option<[Self; 2]> {
        Some([Self::of(BackwardSums::Queries, dtype, dim)?, Self::of(BackwardSums::Keys, dtype, dim)?])
    }

    /// The kernel of the gradient of an additive bias. `None` above a head dim of 256.
    pub fn of_bias(dtype: Dtype, dim: u32) -> Option<Self> {
        Self::of(BackwardSums::Bias, dtype, dim)
    }

    /// The kernel for Hopper (sm_90a), which takes [`crate::HopperBackwardArguments`]. `None` for
    /// the gradient of a bias, for f32 and above a head dim of 128.
    pub fn hopper(makes: BackwardSums, dtype: Dtype, dim: u32) -> Option<Self> {
        let size = HOPPER_DIMS.into_iter().find(|size| dim <= *size)?;
        // Bytes for the numbers of the moving rows: five for each, and a word of each of the two warps that
        // write them.
        let (kind, numbers) = match makes {
            BackwardSums::Queries => ("queries", 0),
            BackwardSums::Keys => ("keys", (5 * 64 + 2) * 4),
            BackwardSums::Bias => return None,
        };
        // Two tensors of 128 fixed rows; three stages with two tensors of 64 moving rows and their numbers;
        // mbarriers of 8 bytes: one for the fixed rows and two for each stage.
        let (fixed, moving, stages) = (128, 64, 3);
        let shared_bytes = 2 * (fixed + stages * moving) * size * 2 + stages * numbers + (1 + 2 * stages) * 8;
        let name = format!("hopper_{kind}_{dtype}_{size}");
        let kernel = Self { name, makes, fixed, moving, threads: 384, shared_bytes, wgmma: true };
        (dtype != Dtype::F32).then_some(kernel)
    }

    fn of(makes: BackwardSums, dtype: Dtype, dim: u32) -> Option<Self> {
        let (size, moving) = SIZES.into_iter().find(|(size, _)| dim <= *size)?;
        let kind = match makes {
            BackwardSums::Queries => "backward_queries",
            BackwardSums::Keys => "backward_keys",
            BackwardSums::Bias => "backward_bias",
        };
        if dtype == Dtype::F32 {
            let name = format!("{kind}_f32");
            let shared_bytes = 0;
            return Some(Self {
                name,
                makes,
                fixed: 8,
                moving: 32,
                threads: 256,
                shared_bytes,
                wgmma: false,
            });
        }
        let by_keys = makes != BackwardSums::Queries;
        let moving = moving[usize::from(by_keys)];
        let moving = if makes == BackwardSums::Bias { moving.min(32) } else { moving };
        // Two tensors of each side, those of the moving side in two stages; with keys, five numbers for
        // each moving row.
        let numbers = if by_keys { 2 * 5 * 4 * moving } else { 0 };
        Some(Self {
            name: format!("{kind}_{dtype}_{size}"),
            makes,
            fixed: 64,
            moving,
            threads: if makes == BackwardSums::Keys && size > 128 { 256 } else { 128 },
            shared_bytes: (2 * 64 + 4 * moving) * size * 2 + numbers,
            wgmma: false,
        })
    }

    /// Whether a block has keys.
    pub fn by_keys(&self) -> bool {
        self.makes != BackwardSums::Queries
    }

    /// Blocks for a tile of its list.
    pub fn tile_blocks(&self) -> u32 {
        BACKWARD_TILE.q_rows * self.joined_tiles() / self.fixed
    }

    /// Tiles of a work list that are a tile of its list.
    fn joined_tiles(&self) -> u32 {
        self.fixed.div_ceil(BACKWARD_TILE.q_rows)
    }
}

/// What the tiles of one side meet of the other side, as a kernel reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackwardList {
    /// `[classes, tiles + 1]`: the index in `runs` at which the runs of each tile begin.
    pub starts: Vec<u32>,
    /// First tile, number of tiles, and 1 if all their pairs are visible, else 0. In tiles of
    /// [`BackwardKernel::moving`].
    pub runs: Vec<[u32; 3]>,
    /// Tiles of a class.
    pub tiles: u32,
}

impl BackwardList {
    /// The list of `work`, in [`BACKWARD_TILE`]s, for a kernel. For a kernel that has keys it is
    /// transposed; if blocks have more rows or keys than such a tile, its tiles are joined
    /// ones.
    pub fn new(work: &BlockWork, kernel: &BackwardKernel) -> Self {
        let small = |n: usize| u32::try_from(n).expect("positions are u32, so what is counted over them is");
        let (rows, keys) = (work.classes[0].rows.len(), work.kv_positions.len());
        let tile = BACKWARD_TILE;
        let key_tiles = keys.div_ceil(tile.kv_cols as usize);
        let (tiles, moving, unit) = if kernel.by_keys() {
            (key_tiles, small(rows), tile.q_rows)
        } else {
            (work.q_tiles(), small(keys), tile.kv_cols)
        };
        let joined = kernel.joined_tiles() as usize;
        let mut list = Self { starts: Vec::new(), runs: Vec::new(), tiles: small(tiles.div_ceil(joined)) };
        let (times, end) = (unit / kernel.moving, moving.div_ceil(kernel.moving));
        for class in &work.classes {
            let mut of_tiles = if kernel.by_keys() { transposed(class, key_tiles) } else { by_rows(class) };
            if joined > 1 {
                of_tiles = of_tiles.chunks(joined).map(join).collect();
            }
            for runs in of_tiles {
                list.starts.push(small(list.runs.len()));
                list.runs.extend(runs.into_iter().map(|[first, count, full]| {
                    let from = first * times;
                    [from, (from + count * times).min(end) - from, full]
                }));
            }
            list.starts.push(small(list.runs.len()));
        }
        list
    }

    /// For each class, the tiles of the other side that each tile meets.
    pub fn met(&self) -> Vec<Vec<u32>> {
        let met = |ends: &[u32]| self.runs[ends[0] as usize..ends[1] as usize].iter().map(|run| run[1]).sum();
        self.starts
            .chunks(self.tiles as usize + 1)
            .map(|starts| starts.windows(2).map(met).collect())
            .collect()
    }
}

fn of_tiles(class: &MaskClass) -> impl Iterator<Item = &[kyklos::TileRun]> {
    class.starts.windows(2).map(|ends| &class.runs[ends[0] as usize..ends[1] as usize])
}

fn by_rows(class: &MaskClass) -> Vec<Vec<[u32; 3]>> {
    let flat = |run: &kyklos::TileRun| [run.kv_tile, run.count, u32::from(run.full)];
    of_tiles(class).map(|runs| runs.iter().map(flat).collect()).collect()
}

/// For each tile of keys the runs of query tiles that meet it. Takes a step for each pair of tiles,
/// which costs little beside the work of a pair.
fn transposed(class: &MaskClass, key_tiles: usize) -> Vec<Vec<[u32; 3]>> {
    let mut of_keys: Vec<Vec<[u32; 3]>> = vec![Vec::new(); key_tiles];
    for (q_tile, runs) in (0..).zip(of_tiles(class)) {
        for run in runs {
            for runs in &mut of_keys[run.kv_tile as usize..][..run.count as usize] {
                match runs.last_mut() {
                    Some([first, count, full])
                        if *full == u32::from(run.full) && *first + *count == q_tile =>
                    {
                        *count += 1;
                    }
                    _ => runs.push([q_tile, 1, u32::from(run.full)]),
                }
            }
        }
    }
    of_keys
}

/// What some tiles meet, as runs of one tile: all pairs of a tile are visible if they are for each
/// of them.
fn join(tiles: &[Vec<[u32; 3]>]) -> Vec<[u32; 3]> {
    let end = tiles.iter().flatten().map(|[first, count, _]| first + count).max().unwrap_or(0);
    // For each tile of the other side: 1 for each that meets it, and 1 more if all their pairs are
    // visible.
    let mut met = vec![0; end as usize];
    for [first, count, full] in tiles.iter().flatten() {
        met[*first as usize..][..*count as usize].iter_mut().for_each(|met| *met += 1 + *full as usize);
    }
    let mut runs: Vec<[u32; 3]> = Vec::new();
    for (tile, met) in (0..).zip(met).filter(|(_, met)| *met > 0) {
        let full = u32::from(met == 2 * tiles.len());
        match runs.last_mut() {
            Some([first, count, alike]) if *alike == full && *first + *count == tile => *count += 1,
            _ => runs.push([tile, 1, full]),
        }
    }
    runs
}

/// For each KV head the first query head that reads it, and behind them the number of query heads.
/// `kv_head_of` ascends.
pub fn head_readers(kv_head_of: &[u32]) -> Vec<u32> {
    let kv_heads = kv_head_of.last().map_or(0, |last| last + 1);
    let first = |head| kv_head_of.partition_point(|of_query| *of_query < head);
    (0..=kv_heads).map(|head| u32::try_from(first(head)).expect("heads are counted in u32")).collect()
}

/// The kernel that makes row statistics of outputs in a storage type.
pub fn row_stats_kernel(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "row_stats_f32",
        Dtype::F16 => "row_stats_f16",
        Dtype::Bf16 => "row_stats_bf16",
    }
}

#[cfg(test)]
mod tests {
    use kyklos::{AttentionProblem, TokenRuns};

    use super::*;

    #[test]
    fn both_lists_meet_the_same_pairs_of_tiles() {
        let [by_rows, by_keys] = BackwardKernel::both(Dtype::F32, 64).unwrap();
        for mask in ["full", "causal", "window:90,3", "documents:0,190,230,601", "valid:70,500"] {
            let problem =
                AttentionProblem::new([2, 601, 1, 1, 8], Dtype::F32, mask.parse().unwrap()).unwrap();
            let q = TokenRuns::from_positions((0..200).chain(400..601));
            let kv = TokenRuns::from_positions((1..601).step_by(2));
            let work = &BlockWork::layers(&problem, &q, &kv, BACKWARD_TILE)[0];
            // (class, row, key) in steps of 32, and whether the tiles are full.
            let pairs = |kernel: &BackwardKernel| {
                let list = BackwardList::new(work, kernel);
                let mut pairs = Vec::new();
                for (class, starts) in list.starts.chunks(list.tiles as usize + 1).enumerate() {
                    for (tile, ends) in starts.windows(2).enumerate() {
                        for [first, count, full] in &list.runs[ends[0] as usize..ends[1] as usize] {
                            for moving in *first..first + count {
                                for fixed in [tile * 2, tile * 2 + 1] {
                                    let fixed = u32::try_from(fixed).unwrap();
                                    let pair =
                                        if kernel.by_keys() { [moving, fixed] } else { [fixed, moving] };
                                    pairs.push((class, pair, *full));
                                }
                            }
                        }
                    }
                }
                // Half a tile behind the end is in one of the lists only.
                let inside = |[row, key]: [u32; 2]| row * 32 < 401 && key * 32 < 300;
                pairs.retain(|(_, pair, _)| inside(*pair));
                pairs.sort_unstable();
                pairs
            };
            assert_eq!(pairs(&by_rows), pairs(&by_keys), "{mask}");
            assert!(!pairs(&by_rows).is_empty());
        }
    }

    #[test]
    fn a_joined_tile_meets_what_its_tiles_meet() {
        for mask in ["full", "causal", "window:90,3", "documents:0,190,230,601", "valid:70,500"] {
            let problem =
                AttentionProblem::new([2, 601, 1, 1, 64], Dtype::F16, mask.parse().unwrap()).unwrap();
            let q = TokenRuns::from_positions((0..200).chain(400..601));
            let kv = TokenRuns::from_positions((1..601).step_by(2));
            let work = &BlockWork::layers(&problem, &q, &kv, BACKWARD_TILE)[0];
            for makes in [BackwardSums::Queries, BackwardSums::Keys] {
                let hopper = BackwardKernel::hopper(makes, Dtype::F16, 64).unwrap();
                let single = BackwardKernel { fixed: 64, ..hopper.clone() };
                let [single, joined] = [&single, &hopper].map(|kernel| BackwardList::new(work, kernel));
                // For each tile of the other side, whether all pairs are visible.
                let met = |list: &BackwardList, class: usize, tile: u32| {
                    let at = class * (list.tiles as usize + 1) + tile as usize;
                    let runs = &list.runs[list.starts[at] as usize..list.starts[at + 1] as usize];
                    let tiles = runs.iter().flat_map(|[first, count, full]| {
                        (*first..*first + *count).map(|tile| (tile, *full == 1))
                    });
                    tiles.collect::<std::collections::BTreeMap<_, _>>()
                };
                assert_eq!(joined.tiles, single.tiles.div_ceil(2));
                for class in 0..work.classes.len() {
                    for tile in 0..joined.tiles {
                        let parts: Vec<_> = (2 * tile..(2 * tile + 2).min(single.tiles))
                            .map(|n| met(&single, class, n))
                            .collect();
                        let all = parts.iter().flat_map(|part| part.keys().copied());
                        let expected = all.map(|n| (n, parts.iter().all(|part| part.get(&n) == Some(&true))));
                        assert_eq!(met(&joined, class, tile), expected.collect(), "{mask}, {makes:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_head_dim_has_kernels_that_fit_every_gpu_from_sm_80_on() {
        for dtype in Dtype::ALL {
            for dim in (8..=256).step_by(8) {
                let of_bias = BackwardKernel::of_bias(dtype, dim).unwrap();
                for kernel in BackwardKernel::both(dtype, dim).unwrap().into_iter().chain([of_bias]) {
                    assert!(kernel.shared_bytes <= 99 * 1024, "{kernel:?}");
                }
            }
            assert_eq!(BackwardKernel::both(dtype, 264), None);
        }
        let [queries, keys] = BackwardKernel::both(Dtype::F16, 136).unwrap();
        assert_eq!([&*queries.name, &keys.name], ["backward_queries_f16_192", "backward_keys_f16_192"]);
    }

    #[test]
    fn readers_of_a_kv_head_are_consecutive() {
        assert_eq!(head_readers(&[0, 0, 2, 2]), [0, 2, 2, 4]);
        assert_eq!(head_readers(&[1]), [0, 0, 1]);
    }
}
