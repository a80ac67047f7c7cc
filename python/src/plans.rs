//! Plans without ranks, and their predicted times on a described machine.

use kyklos::plan::{Explained, explain};
use kyklos::simulate::{Candidate, Cluster, EstimatedPlan, Feasibility, PlanQuery, choose};
use kyklos::{AttentionProblem, Dtype, Error, Mask, PlacementKind, Result, Split};
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

/// A call, as Python passes it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Asked {
    batch: u32,
    heads: u32,
    kv_heads: u32,
    dim: u32,
    dtype: String,
    mask: String,
    counts: Vec<u32>,
    wire: Option<String>,
    mesh: Option<String>,
    strategy: Option<String>,
    gradients: bool,
}

/// Strategy and mesh; then nanoseconds, bytes that a rank sends at most, and bytes that it holds at
/// most; or why it is refused.
type Priced = (String, String, Option<(u64, u64, u64)>, Option<String>);

/// The ways to run a call on the machine of this description, the fastest first.
#[pyfunction]
pub(crate) fn choices(py: Python<'_>, machine: &str, asked: Asked) -> PyResult<Vec<Priced>> {
    let priced = py.detach(|| asked.choices(machine));
    priced.map_err(|error| errors::of_call(py, &error))
}

impl Asked {
    fn choices(&self, machine: &str) -> Result<Vec<Priced>> {
        let cluster = Cluster::from_toml(machine)?;
        let Self { batch, heads, kv_heads, dim, counts, gradients, .. } = self;
        let tokens: u64 = counts.iter().copied().map(u64::from).sum();
        let tokens = u32::try_from(tokens)
            .map_err(|_| Error::request(format!("{tokens} tokens"), format!("use at most {}", u32::MAX)))?;
        let shape = [*batch, tokens, *heads, *kv_heads, *dim];
        let mut problem = AttentionProblem::new(shape, dtype_of(&self.dtype)?, self.mask.parse::<Mask>()?)?
            .with_inference(!*gradients);
        if let Some(wire) = &self.wire {
            problem = problem.with_wire(wire.parse()?)?;
        }
        let wanted = PlanQuery {
            ranks: u32::try_from(counts.len()).unwrap_or(u32::MAX),
            mesh: self.mesh.as_deref().map(str::parse).transpose()?,
            strategy: self.strategy.as_deref().map(str::parse).transpose()?,
            placement: Some(PlacementKind::Contiguous),
            split: Split::Tokens(counts.clone()),
            gradients: *gradients,
        };
        Ok(choose(&problem, &wanted, &cluster)?.into_iter().map(priced).collect())
    }
}

fn priced(plan: EstimatedPlan) -> Priced {
    let Candidate { strategy, mesh, .. } = plan.candidate;
    let (numbers, refused) = match plan.verdict {
        Feasibility::Fits(prediction) => {
            let ranks = || prediction.ranks.iter();
            let sent = ranks().map(|rank| rank.bytes_sent).max().unwrap_or(0);
            let held = ranks().map(|rank| rank.peak_bytes).max().unwrap_or(0);
            (Some((prediction.wall_ns, sent, held)), None)
        }
        Feasibility::Refused(error) => (None, Some(error.to_string())),
    };
    (strategy.to_string(), mesh.to_string(), numbers, refused)
}
