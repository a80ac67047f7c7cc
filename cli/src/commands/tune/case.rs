//! The shapes that `kyklos tune` tries.

use kyklos::backend::wgpu::{TuningKey, WgpuBackend};
use kyklos::backend::{Backend, DeviceClass};
use kyklos::{AttentionProblem, Mask};

use super::args::TuneArgs;
use crate::failure::{Failure, Result};
use crate::options::Shape;
use crate::run::resident::state_shape;

/// One shape in one dtype.
pub(super) struct Case {
    pub(super) problem: AttentionProblem,
    pub(super) shape: [u32; 5],
    pub(super) key: TuningKey,
}

/// The shapes in the options, else the default shapes of the device.
pub(super) fn cases(args: &TuneArgs, backend: &WgpuBackend) -> Result<Vec<Case>> {
    let mut shapes: Vec<[u32; 5]> = args.shape.iter().map(|Shape(shape)| *shape).collect();
    if shapes.is_empty() {
        let software = backend.info().class == DeviceClass::SoftwareGpu;
        let tokens = if software { &TOKENS[..1] } else { &TOKENS[..] };
        let dims = if args.head_dim.is_empty() { &HEAD_DIMS[..] } else { &args.head_dim };
        shapes
            .extend(dims.iter().flat_map(|dim| tokens.iter().map(|tokens| [1, *tokens, HEADS, HEADS, *dim])));
    }
    let mut cases: Vec<Case> = Vec::new();
    for shape in shapes {
        for dtype in &args.dtype {
            // It has full and partial tiles, so both loops of a kernel are timed and checked.
            let problem = AttentionProblem::new(shape, *dtype, Mask::causal())?;
            let key = backend.tuning_key(*dtype, state_shape(&problem))?;
            if let Some(same) = cases.iter().find(|case| case.key == key) {
                return Err(Failure::request(
                    format!("shapes {:?} and {shape:?} in {dtype} share one choice", same.shape),
                    "leave one out",
                ));
            }
            cases.push(Case { problem, shape, key });
        }
    }
    Ok(cases)
}

const HEAD_DIMS: [u32; 2] = [64, 128];
/// Few, some and many tokens. The first entry is enough for a software driver; the last would take
/// it minutes.
const TOKENS: [u32; 3] = [1024, 128, 8192];
const HEADS: u32 = 8;
