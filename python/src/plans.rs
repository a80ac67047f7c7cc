//! Plans without ranks.

use kyklos::plan::{Explained, explain};
use kyklos::{Dtype, Error, Result};
use kyklos_transport::Rank;
use pyo3::prelude::*;

use crate::call::{Call, Options};
use crate::errors;
use crate::tensors::inputs::for_plan;

/// What a plan is for.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Extents {
    batch: u32,
    heads: u32,
    kv_heads: u32,
    dim: u32,
    dtype: String,
    q_counts: Vec<u32>,
    kv_counts: Vec<u32>,
    rank: Option<u32>,
}

/// The plans of all ranks for a call: as text for people, and as JSON.
#[pyfunction]
pub(crate) fn plan(py: Python<'_>, options: Options<'_>, extents: Extents) -> PyResult<(String, String)> {
    made(py, &options, &extents).map_err(|error| errors::of_call(py, &error))
}

fn made(py: Python<'_>, options: &Options<'_>, extents: &Extents) -> Result<(String, String)> {
    let Extents { batch, heads, kv_heads, dim, dtype, q_counts, kv_counts, rank } = extents;
    let size = u32::try_from(q_counts.len()).unwrap_or(u32::MAX);
    if let Some(rank) = rank.filter(|rank| *rank >= size) {
        return Err(Error::request(format!("rank {rank} of {size} ranks"), "name a rank of the group"));
    }
    let attention = for_plan(py, &Call::of(options, size)?)?;
    let plans = attention.plans([*batch, *heads, *kv_heads, *dim], dtype_of(dtype)?, q_counts, kv_counts)?;
    let json = serde_json::to_string(&Explained::new(plans.set(), plans.checks(), None));
    let json = json.map_err(|error| Error::request(error.to_string(), "report this"))?;
    Ok((explain(plans.set(), plans.checks(), rank.map(Rank)), json))
}

/// A type by its name in Python, or by that of the library.
pub(crate) fn dtype_of(name: &str) -> Result<Dtype> {
    match name {
        "float32" => Ok(Dtype::F32),
        "float16" => Ok(Dtype::F16),
        "bfloat16" => Ok(Dtype::Bf16),
        other => other.parse().map_err(|_| {
            Error::request(
                format!("dtype {other:?} is not known"),
                "use \"float32\", \"float16\" or \"bfloat16\"",
            )
        }),
    }
}
