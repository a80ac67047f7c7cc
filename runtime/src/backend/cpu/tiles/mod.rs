//! Products of bf16 words by the tile registers of AMX, with sums in f32.
//!
//! A tile register holds 16 rows of 64 bytes. One instruction adds to a tile of sums the product of
//! a tile of 16 × 16 words (module `bf16`) and another one: `C[i][j] += Σ_w A[i][w] · B[w][j]`,
//! where a word times a word is the sum of two products (Intel 64 and IA-32 Architectures Software
//! Developer's Manual, volume 2, TDPBF16PS).
//!
//! The rows of a panel are the columns of tiles. So queries, weights, scores and accumulators need
//! no repacking: their layout in memory is that of tiles. Keys and values are packed for it, in
//! blocks of 16 words of all rows: a tile of them is 1024 bytes in a row.

#![cfg_attr(
    not(any(target_arch = "x86_64", test)),
    allow(unused, unreachable_code, reason = "no processor of this target has these products")
)]

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(test)]
mod emulated;

use std::marker::PhantomData;
use std::ops::Range;

/// Rows of a tile, and words of a row.
pub(super) const SIDE: usize = 16;
/// Tiles in the rows of a panel.
pub(super) const OF_PANEL: usize = 3;

/// Rows of scores that a product with `keys` keys writes: rounded up to whole tiles.
pub(super) const fn rows_of(keys: usize) -> usize {
    keys.next_multiple_of(SIDE)
}

/// Where the word `word` of the row `row` is in an operand `a` with `rows` rows in a block.
#[inline(always)]
pub(super) const fn place(rows: usize, row: usize, word: usize) -> usize {
    (word / SIDE * rows + row) * SIDE + word % SIDE
}

/// The elements of each row of `from`, which has those of a panel, beside their words of an operand
/// with `rows` rows in a block. Words without elements become 0.
pub(super) fn blocks_of_rows<'a>(
    from: &'a [f32],
    into: &'a mut [f32],
    rows: usize,
) -> impl Iterator<Item = (&'a [f32], &'a mut [f32])> {
    let blocks = into.chunks_exact_mut(rows * SIDE).enumerate();
    blocks.flat_map(|(block, into)| {
        let rows = from.chunks_exact(OF_PANEL * SIDE).zip(into.chunks_exact_mut(SIDE));
        rows.map(move |(from, into)| {
            let from = &from[2 * SIDE * block..(2 * SIDE * (block + 1)).min(from.len())];
            let (into, rest) = into.split_at_mut(from.len() / 2);
            rest.fill(0.0);
            (from, into)
        })
    })
}

/// `into[i][j] = a[word / 16][first + j][word % 16]` for the word `words.start + i`; `rows` rows in
/// a block of `a`.
pub(super) fn columns<const N: usize>(
    a: &[f32],
    rows: usize,
    first: usize,
    words: &Range<usize>,
    into: &mut [[f32; N]],
) {
    for (word, into) in words.clone().zip(into) {
        for (row, into) in (first..).zip(into) {
            *into = a[place(rows, row, word)];
        }
    }
}

/// Tile instructions.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileProducts(Unit);

#[derive(Clone, Copy, Debug)]
enum Unit {
    /// Only [`TileProducts::detect`] makes it.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx,
    #[cfg(test)]
    Emulated,
}

impl TileProducts {
    /// Those of this machine, if it has any and the system lets the process use them.
    pub(super) fn detect() -> Option<Self> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if amx::detect() {
            return Some(Self(Unit::Amx));
        }
        None
    }

    /// The same products in f32 arithmetic, on any machine.
    #[cfg(test)]
    pub(super) fn emulated() -> Self {
        Self(Unit::Emulated)
    }

    /// Prepares the tile registers of this thread, for panels of `lanes` rows. A thread has one
    /// [`PreparedTiles`] at a time: nothing that lends the thread to other jobs may run before
    /// it is dropped.
    pub(super) fn prepare(self, lanes: usize) -> PreparedTiles {
        assert_eq!(lanes, OF_PANEL * SIDE, "the rows of a panel are columns of tiles");
        match self.0 {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Unit::Amx => amx::configure(),
            #[cfg(test)]
            Unit::Emulated => {}
        }
        PreparedTiles { unit: self.0, of_thread: PhantomData }
    }
}

/// The tile registers of this thread, until it is dropped. The system then has less to save when it
/// switches threads.
pub(super) struct PreparedTiles {
    unit: Unit,
    of_thread: PhantomData<*mut ()>,
}

impl Drop for PreparedTiles {
    fn drop(&mut self) {
        match self.unit {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Unit::Amx => amx::release(),
            #[cfg(test)]
            Unit::Emulated => {}
        }
    }
}

/// `c[row][column] = Σ_word a[word / 16][first + row][word % 16] · b[word][column]`, or `+=`, in
/// whole tiles, of which `N` make a row of `b` and of `c`.
pub(super) struct TileProduct<'a, const N: usize> {
    /// `[word / 16][rows][16]`.
    pub(super) a: &'a [f32],
    /// Rows of a block of `a`.
    pub(super) rows: usize,
    /// The row of `a` for the first row of `c`.
    pub(super) first: usize,
    /// `[word][16 · N]`.
    pub(super) b: &'a [f32],
    /// `[row][16 · N]`.
    pub(super) c: &'a mut [f32],
    /// Whether the product is added to `c`.
    pub(super) add: bool,
}

impl PreparedTiles {
    /// Computes a product.
    #[inline(always)]
    pub(super) fn multiply<const N: usize>(&self, product: TileProduct<'_, N>) {
        match self.unit {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Unit::Amx => multiply(&mut amx::Registers::new(self), product),
            #[cfg(test)]
            Unit::Emulated => multiply(&mut emulated::Registers::default(), product),
        }
    }
}

/// The instructions. A tile in memory has `stride` numbers from row to row.
trait Tiles {
    fn zero<const T: usize>(&mut self);
    fn load<const T: usize>(&mut self, from: &[f32], stride: usize);
    fn store<const T: usize>(&self, into: &mut [f32], stride: usize);
    /// Adds the product of the words of `A` and of `B` to `C`.
    fn add_product<const C: usize, const A: usize, const B: usize>(&mut self);
}

#[inline(never)]
fn multiply<T: Tiles, const N: usize>(tiles: &mut T, product: TileProduct<'_, N>) {
    let TileProduct { a, rows, first, b, c, add } = product;
    let mut first = first;
    let mut pairs = c.chunks_exact_mut(2 * SIDE * SIDE * N);
    for c in &mut pairs {
        multiply_rows::<T, N, true>(tiles, (a, rows, first), b, c, add);
        first += 2 * SIDE;
    }
    let rest = pairs.into_remainder();
    if !rest.is_empty() {
        multiply_rows::<T, N, false>(tiles, (a, rows, first), b, rest, add);
    }
}

/// Two rows of tiles of `c`, or one. Six sums of tiles keep the multiplier busy: a product takes 52
/// cycles, and one begins every 16. The two registers that are left hold a tile of `a` and one of
/// `b`; a tile is loaded in 8 cycles, beside the products.
#[inline(always)]
fn multiply_rows<T: Tiles, const N: usize, const TWO: bool>(
    tiles: &mut T,
    (a, rows, first): (&[f32], usize, usize),
    b: &[f32],
    c: &mut [f32],
    add: bool,
) {
    const { assert!(N >= 1 && N <= 3, "six registers hold sums") };
    let width = N * SIDE;
    let next = SIDE * width;
    if add {
        tiles.load::<0>(c, width);
        if N > 1 {
            tiles.load::<1>(&c[SIDE..], width);
        }
        if N > 2 {
            tiles.load::<2>(&c[2 * SIDE..], width);
        }
        if TWO {
            tiles.load::<3>(&c[next..], width);
        }
        if TWO && N > 1 {
            tiles.load::<4>(&c[next + SIDE..], width);
        }
        if TWO && N > 2 {
            tiles.load::<5>(&c[next + 2 * SIDE..], width);
        }
    } else {
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        tiles.zero::<3>();
        tiles.zero::<4>();
        tiles.zero::<5>();
    }
    for (block, b) in b.chunks_exact(next).enumerate() {
        let a = &a[(block * rows + first) * SIDE..];
        tiles.load::<6>(a, SIDE);
        tiles.load::<7>(b, width);
        tiles.add_product::<0, 6, 7>();
        if N > 1 {
            tiles.load::<7>(&b[SIDE..], width);
            tiles.add_product::<1, 6, 7>();
        }
        if N > 2 {
            tiles.load::<7>(&b[2 * SIDE..], width);
            tiles.add_product::<2, 6, 7>();
        }
        if TWO {
            // The last tile of the row of `b` is still there.
            tiles.load::<6>(&a[SIDE * SIDE..], SIDE);
            if N > 2 {
                tiles.add_product::<5, 6, 7>();
                tiles.load::<7>(&b[SIDE..], width);
            }
            if N > 1 {
                tiles.add_product::<4, 6, 7>();
                tiles.load::<7>(b, width);
            }
            tiles.add_product::<3, 6, 7>();
        }
    }
    tiles.store::<0>(c, width);
    if N > 1 {
        tiles.store::<1>(&mut c[SIDE..], width);
    }
    if N > 2 {
        tiles.store::<2>(&mut c[2 * SIDE..], width);
    }
    if TWO {
        tiles.store::<3>(&mut c[next..], width);
    }
    if TWO && N > 1 {
        tiles.store::<4>(&mut c[next + SIDE..], width);
    }
    if TWO && N > 2 {
        tiles.store::<5>(&mut c[next + 2 * SIDE..], width);
    }
}

/// Whether a tile with this stride lies within `length` numbers.
const fn holds_tile(length: usize, stride: usize) -> bool {
    length >= (SIDE - 1) * stride + SIDE
}
