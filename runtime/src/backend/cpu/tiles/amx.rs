//! The instructions of AMX, and the permission to use them.
//!
//! Tile registers keep their values from one `asm!` to the next, and cannot be named in it. That is
//! sound as long as the compiler itself uses no tile register, which it does only for the
//! intrinsics and features of AMX; this crate enables neither.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::marker::PhantomData;

use super::{PreparedTiles, SIDE, Tiles, holds_tile};

/// Whether the processor has tiles and their products of bf16, and the system saves tile registers
/// for this process. The kernel wants to be asked once for a process, before a tile is used (Linux,
/// arch/x86/xstate.rst).
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
    // SAFETY: only a unit that `detect` allowed comes here, so the processor has the instruction and
    // the system permits it. It reads 64 bytes. The compiler uses no tile register.
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
