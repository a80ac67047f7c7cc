//! Products of bf16 words by the tile registers of AMX, with sums in f32.
//!
//! A tile register holds 16 rows of 64 bytes. One instruction adds to a tile of sums the product of a tile of 16 × 16 words (module
//! `bf16`) and another one: `C[i][j] += Σ_w A[i][w] · B[w][j]`, where a word times a word is the sum of two products (Intel 64 and IA-32
//! Architectures Software Developer's Manual, volume 2, TDPBF16PS).
//!
//! Rows of a panel are columns here. So the words of queries and of weights are operands as they lie, and scores and accumulators are
//! sums as they lie. Keys and values are packed for it, in blocks of 16 words of all rows: a tile of them is 1024 bytes in a row.

use std::marker::PhantomData;
use std::ops::Range;

/// Rows of a tile, and words of a row.
pub(super) const SIDE: usize = 16;
/// Rows of a panel.
pub(super) const LANES: usize = 3 * SIDE;

/// Room for the products of `keys` keys, which may begin at any group of them: whole tiles.
pub(super) const fn rows_of(keys: usize) -> usize {
    keys.next_multiple_of(SIDE)
}

/// `into[i][j] = a[word / 16][first + j][word % 16]` for the word `words.start + i`; `rows` rows in a block of `a`.
pub(super) fn columns<const N: usize>(
    a: &[f32],
    rows: usize,
    first: usize,
    words: &Range<usize>,
    into: &mut [[f32; N]],
) {
    for (word, into) in words.clone().zip(into) {
        let block = &a[(word / SIDE * rows + first) * SIDE..];
        for (into, row) in into.iter_mut().zip(block.chunks_exact(SIDE)) {
            *into = row[word % SIDE];
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

    /// Prepares the tile registers of this thread.
    pub(super) fn prepare(self) -> PreparedTiles {
        match self.0 {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Unit::Amx => amx::configure(),
            #[cfg(test)]
            Unit::Emulated => {}
        }
        PreparedTiles { unit: self.0, of_thread: PhantomData }
    }
}

/// The tile registers of this thread, until it is dropped. The system then has less to save when it switches threads.
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

/// `c[row][lane] = Σ_word a[word / 16][first + row][word % 16] · b[word][lane]`, or `+=`, in whole tiles.
pub(super) struct TileProduct<'a> {
    /// `[word / 16][rows][16]`.
    pub(super) a: &'a [f32],
    /// Rows of a block of `a`.
    pub(super) rows: usize,
    /// The row of `a` for the first row of `c`.
    pub(super) first: usize,
    /// `[word][LANES]`.
    pub(super) b: &'a [f32],
    /// `[row][LANES]`.
    pub(super) c: &'a mut [f32],
    /// Whether the product is added to `c`.
    pub(super) add: bool,
}

impl PreparedTiles {
    /// Computes a product.
    pub(super) fn multiply(&self, product: TileProduct<'_>) {
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
fn multiply<T: Tiles>(tiles: &mut T, product: TileProduct<'_>) {
    let TileProduct { a, rows, first, b, c, add } = product;
    let (pairs, rest) = c.as_chunks_mut::<{ 2 * SIDE * LANES }>();
    for (i, c) in pairs.iter_mut().enumerate() {
        multiply_rows::<T, true>(tiles, (a, rows, first + 2 * i * SIDE), b, c, add);
    }
    if !rest.is_empty() {
        multiply_rows::<T, false>(tiles, (a, rows, first + 2 * pairs.len() * SIDE), b, rest, add);
    }
}

/// Two rows of tiles of `c`, or one. Six sums of tiles keep the multiplier busy: a product takes 52 cycles, and one begins every 16.
/// The two registers that are left hold a tile of `a` and one of `b`; a tile is loaded in 8 cycles, beside the products.
#[inline(always)]
fn multiply_rows<T: Tiles, const TWO: bool>(
    tiles: &mut T,
    (a, rows, first): (&[f32], usize, usize),
    b: &[f32],
    c: &mut [f32],
    add: bool,
) {
    const NEXT: usize = SIDE * LANES;
    if add {
        tiles.load::<0>(c, LANES);
        tiles.load::<1>(&c[SIDE..], LANES);
        tiles.load::<2>(&c[2 * SIDE..], LANES);
        if TWO {
            tiles.load::<3>(&c[NEXT..], LANES);
            tiles.load::<4>(&c[NEXT + SIDE..], LANES);
            tiles.load::<5>(&c[NEXT + 2 * SIDE..], LANES);
        }
    } else {
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        if TWO {
            tiles.zero::<3>();
            tiles.zero::<4>();
            tiles.zero::<5>();
        }
    }
    for (block, b) in b.as_chunks::<{ SIDE * LANES }>().0.iter().enumerate() {
        let a = &a[(block * rows + first) * SIDE..];
        tiles.load::<6>(a, SIDE);
        tiles.load::<7>(b, LANES);
        tiles.add_product::<0, 6, 7>();
        tiles.load::<7>(&b[SIDE..], LANES);
        tiles.add_product::<1, 6, 7>();
        tiles.load::<7>(&b[2 * SIDE..], LANES);
        tiles.add_product::<2, 6, 7>();
        if TWO {
            tiles.load::<6>(&a[SIDE * SIDE..], SIDE);
            tiles.add_product::<5, 6, 7>();
            tiles.load::<7>(&b[SIDE..], LANES);
            tiles.add_product::<4, 6, 7>();
            tiles.load::<7>(b, LANES);
            tiles.add_product::<3, 6, 7>();
        }
    }
    tiles.store::<0>(c, LANES);
    tiles.store::<1>(&mut c[SIDE..], LANES);
    tiles.store::<2>(&mut c[2 * SIDE..], LANES);
    if TWO {
        tiles.store::<3>(&mut c[NEXT..], LANES);
        tiles.store::<4>(&mut c[NEXT + SIDE..], LANES);
        tiles.store::<5>(&mut c[NEXT + 2 * SIDE..], LANES);
    }
}

/// Whether a tile with this stride lies within `length` numbers.
const fn holds_tile(length: usize, stride: usize) -> bool {
    length >= (SIDE - 1) * stride + SIDE
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::marker::PhantomData;

    use super::{PreparedTiles, SIDE, Tiles, holds_tile};

    /// Whether the processor has tiles and their products of bf16, and the system saves tile registers for this process. The kernel wants
    /// to be asked once for a process, before a tile is used (Linux, arch/x86/xstate.rst).
    pub(super) fn detect() -> bool {
        const BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
        const TILE_DATA: i64 = 18;
        if __cpuid(0).eax < 7 || __cpuid_count(7, 0).edx & BF16_AND_TILE != BF16_AND_TILE {
            return false;
        }
        let result: i64;
        // SAFETY: the call writes no memory of the process; `syscall` changes the registers that are named.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") ARCH_PRCTL => result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") TILE_DATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result == 0
    }

    /// The operand of LDTILECFG: the rows of each register, and their bytes.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    /// Eight registers of 16 rows of 64 bytes.
    static WHOLE_TILES: Configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    pub(super) fn configure() {
        // SAFETY: only a unit that `detect` allowed comes here, so the processor has the instruction and the system permits it. It reads
        // 64 bytes. The compiler uses no tile register.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const WHOLE_TILES, options(nostack, readonly, preserves_flags));
        }
    }

    pub(super) fn release() {
        // SAFETY: as in `configure`; it touches tile registers only.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
    }

    /// The tile registers of this thread. They are configured as long as the [`PreparedTiles`] live.
    pub(super) struct Registers<'a>(PhantomData<&'a PreparedTiles>);

    impl<'a> Registers<'a> {
        pub(super) fn new(_: &'a PreparedTiles) -> Self {
            Self(PhantomData)
        }
    }

    impl Tiles for Registers<'_> {
        #[inline(always)]
        fn zero<const T: usize>(&mut self) {
            // SAFETY: a configured tile register.
            unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, nomem, preserves_flags)) }
        }

        #[inline(always)]
        fn load<const T: usize>(&mut self, from: &[f32], stride: usize) {
            assert!(holds_tile(from.len(), stride), "a tile lies within its tensor");
            // SAFETY: a configured tile register; 16 rows of 64 bytes lie within `from`.
            unsafe {
                asm!(
                    "tileloadd tmm{t}, [{from} + {stride} * 1]",
                    t = const T,
                    from = in(reg) from.as_ptr(),
                    stride = in(reg) stride * size_of::<f32>(),
                    options(nostack, readonly, preserves_flags),
                );
            }
        }

        #[inline(always)]
        fn store<const T: usize>(&self, into: &mut [f32], stride: usize) {
            assert!(holds_tile(into.len(), stride), "a tile lies within its tensor");
            // SAFETY: as in `load`, and it is written.
            unsafe {
                asm!(
                    "tilestored [{into} + {stride} * 1], tmm{t}",
                    t = const T,
                    into = in(reg) into.as_mut_ptr(),
                    stride = in(reg) stride * size_of::<f32>(),
                    options(nostack, preserves_flags),
                );
            }
        }

        #[inline(always)]
        fn add_product<const C: usize, const A: usize, const B: usize>(&mut self) {
            // SAFETY: configured tile registers of 16 × 16 words.
            unsafe {
                asm!(
                    "tdpbf16ps tmm{c}, tmm{a}, tmm{b}",
                    c = const C,
                    a = const A,
                    b = const B,
                    options(nostack, nomem, preserves_flags),
                );
            }
        }
    }

    const _: () = assert!(SIDE == 16, "the configuration is that of whole tiles");
}

/// The instructions in f32 arithmetic.
#[cfg(test)]
mod emulated {
    use half::bf16;

    use super::{SIDE, Tiles, holds_tile};

    #[derive(Default)]
    pub(super) struct Registers([[[f32; SIDE]; SIDE]; 8]);

    impl Tiles for Registers {
        fn zero<const T: usize>(&mut self) {
            self.0[T] = Default::default();
        }

        fn load<const T: usize>(&mut self, from: &[f32], stride: usize) {
            assert!(holds_tile(from.len(), stride));
            for (row, from) in self.0[T].iter_mut().zip(from.chunks(stride)) {
                row.copy_from_slice(&from[..SIDE]);
            }
        }

        fn store<const T: usize>(&self, into: &mut [f32], stride: usize) {
            assert!(holds_tile(into.len(), stride));
            for (row, into) in self.0[T].iter().zip(into.chunks_mut(stride)) {
                into[..SIDE].copy_from_slice(row);
            }
        }

        fn add_product<const C: usize, const A: usize, const B: usize>(&mut self) {
            let elements = |word: f32| {
                let [low, high]: [u16; 2] = bytemuck::cast(word);
                [low, high].map(|bits| bf16::from_bits(bits).to_f32())
            };
            for row in 0..SIDE {
                for word in 0..SIDE {
                    let a = elements(self.0[A][row][word]);
                    for column in 0..SIDE {
                        let b = elements(self.0[B][word][column]);
                        let sum = &mut self.0[C][row][column];
                        *sum = a[1].mul_add(b[1], a[0].mul_add(b[0], *sum));
                    }
                }
            }
        }
    }
}
