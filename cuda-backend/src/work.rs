//! The work of a block as kernels read it.

use kyklos::{BlockWork, RowSpan};

/// A [`BlockWork`] in flat arrays for the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceWork {
    /// What each row sees, `[classes, rows]`.
    pub spans: Vec<RowSpan>,
    /// Position of each key.
    pub positions: Vec<u32>,
    /// `[classes, q_tiles + 1]`: where the runs of each query tile begin in `runs`.
    pub starts: Vec<u32>,
    /// First KV tile, how many, and whether all rows see all of their keys.
    pub runs: Vec<[u32; 3]>,
    /// Mask classes.
    pub classes: u32,
    /// Query tiles of a class.
    pub q_tiles: u32,
}

impl DeviceWork {
    /// The arrays of `work`.
    pub fn new(work: &BlockWork) -> Self {
        let small = |n: usize| u32::try_from(n).expect("positions are u32, so what is counted over them is");
        let mut flat = Self {
            spans: Vec::new(),
            positions: work.kv_positions.clone(),
            starts: Vec::new(),
            runs: Vec::new(),
            classes: small(work.classes.len()),
            q_tiles: small(work.q_tiles()),
        };
        for class in &work.classes {
            let before = small(flat.runs.len());
            flat.spans.extend_from_slice(&class.rows);
            flat.starts.extend(class.starts.iter().map(|start| before + start));
            flat.runs.extend(class.runs.iter().map(|run| [run.kv_tile, run.count, u32::from(run.full)]));
        }
        flat
    }
}
