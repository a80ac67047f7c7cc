//! The arguments of a backend as they travel.

use kyklos::backend::{Elements, Extent, Scales, StateShape};

use crate::protocol::{BufferId, State, WireElements, wide};

impl WireElements {
    pub(crate) fn of<Buffer>(elements: Elements<Buffer>, id: impl Fn(Buffer) -> BufferId) -> Self {
        match elements {
            Elements::Stored { buffer, first, dtype } => {
                Self::Stored { id: id(buffer), first: wide(first), dtype: dtype.into() }
            }
            Elements::Coded { codes, scales, of } => {
                Self::Coded { codes: id(codes), scales: id(scales), by_channel: of == Scales::Channels }
            }
        }
    }
}

impl State {
    pub(crate) fn new(a: BufferId, ml: BufferId, shape: StateShape) -> Self {
        let StateShape { batch, rows, heads, dim } = shape;
        Self { a, ml, shape: [batch, rows, heads, dim].map(wide) }
    }
}

/// An extent as it travels.
pub(crate) fn extent_of(Extent { batch, rows, heads, row_bytes }: Extent) -> [u64; 4] {
    [batch, rows, heads, row_bytes].map(wide)
}

/// Runs of consecutive positions.
pub(crate) fn runs_of(positions: &[u32]) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for position in positions {
        match runs.last_mut() {
            Some((first, count)) if first.checked_add(*count) == Some(*position) => *count += 1,
            _ => runs.push((*position, 1)),
        }
    }
    runs
}
