//! Which kernel makes 8-bit codes of a tensor, or reads them, and over which grid. Data only.

use kyklos::backend::Scales;
use kyklos::{Dtype, TOKENS_PER_SCALE};

use crate::SMALL_THREADS;

/// Channels of a block, where tokens of a channel share a scale.
const BLOCK_CHANNELS: usize = 128;

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Elements become codes and scales.
    ToCodes,
    /// Codes and scales become elements.
    FromCodes,
}

/// A kernel for a tensor. Its blocks have [`SMALL_THREADS`] threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodesKernel {
    /// Its name in the module.
    pub name: String,
    /// Blocks of the grid, along its first direction.
    pub blocks: usize,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Lanes of a row, where rows share a scale; each has eight elements.
    pub lanes: u32,
}

impl CodesKernel {
    /// The kernel for elements `[batch, tokens, heads, dim]` of a storage type. There is none for heads of more than 256
    /// elements, for a row is the work of one warp, nor where `dim` is no multiple of 8.
    pub fn of(direction: Direction, of: Scales, dtype: Dtype, shape: [usize; 4]) -> Option<Self> {
        let [batch, tokens, heads, dim] = shape;
        let lanes = u32::try_from(dim / 8).ok()?.checked_next_power_of_two()?;
        if !dim.is_multiple_of(8) || lanes > 32 {
            return None;
        }
        let (of, blocks, shared_bytes) = match of {
            Scales::Rows => {
                let threads = batch * tokens * heads * lanes as usize;
                ("rows", threads.div_ceil(SMALL_THREADS as usize), 0)
            }
            Scales::Channels => {
                let groups = batch * tokens.div_ceil(TOKENS_PER_SCALE);
                // What each warp found of each channel.
                let shared_bytes = SMALL_THREADS / 32 * BLOCK_CHANNELS as u32 * 4;
                ("channels", groups * (heads * dim).div_ceil(BLOCK_CHANNELS), shared_bytes)
            }
        };
        let (name, shared_bytes) = match direction {
            Direction::ToCodes => (format!("to_codes_{of}_{dtype}"), shared_bytes),
            Direction::FromCodes => (format!("from_codes_{of}_{dtype}"), 0),
        };
        Some(Self { name, blocks, shared_bytes, lanes })
    }
}
