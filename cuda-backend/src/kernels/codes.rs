//! The kernels that quantise a tensor to 8-bit codes or restore it, and their grids.

use kyklos::backend::Scales;
use kyklos::{Dtype, TOKENS_PER_SCALE};

use crate::SMALL_THREADS;

/// Channels per block, in the kernels with one scale per channel.
const BLOCK_CHANNELS: usize = 128;

/// Whether a kernel quantises or restores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From elements to codes and scales.
    ToCodes,
    /// From codes and scales to elements.
    FromCodes,
}

/// A kernel and its launch configuration for one tensor. Its blocks have [`SMALL_THREADS`] threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodesKernel {
    /// Its name in the module.
    pub name: String,
    /// Blocks of the grid, in its first dimension.
    pub blocks: usize,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
    /// Lanes per row, in the kernels with one scale per row. A lane has eight elements.
    pub lanes: u32,
}

impl CodesKernel {
    /// The kernel for elements `[batch, tokens, heads, dim]` of a storage type. `None` if `dim` is
    /// above 256, because one warp computes a row, or no multiple of 8.
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
                // The largest magnitude of each channel, from each warp.
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
