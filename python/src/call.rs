//! The options of a call.

use std::sync::mpsc::Receiver;

use kyklos::{
    Attention, BiasKind, BiasTensor, Dtype, Error, Execution, Mask, Mesh, Placement, Result, Results, Tensor,
    TokenRuns,
};
use kyklos_transport::Rank;
use pyo3::prelude::*;

use crate::arrays::{Elements, Kind, Loan};
use crate::errors;
use crate::place::Place;

/// The options of a call, checked: which attention to compute, and how the ranks share it.
#[pyclass(frozen, module = "kyklos._kyklos")]
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) attention: Attention,
    /// Whether arrays are `[batch, heads, tokens, dim]` instead of `[batch, tokens, heads, dim]`.
    pub(crate) heads_first: bool,
    /// The type of an additive bias: that of q.
    bias: Option<Dtype>,
}

/// The options as Python passes them. The Python code of the package gives each of them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Options<'py> {
    mask: String,
    scale: Option<f32>,
    softcap: Option<f32>,
    sinks: Option<Vec<f32>>,
    bias: Option<Bound<'py, PyAny>>,
    key_bias: Option<Bound<'py, PyAny>>,
    bias_gradient: bool,
    q_offset: u32,
    layout: String,
    label: String,
    strategy: Option<String>,
    mesh: Option<String>,
    placement: Option<String>,
    q_tokens: Option<TokenLists>,
    kv_tokens: Option<TokenLists>,
    wire: Option<String>,
    fixed_order: bool,
    replicated: Option<(u32, u32)>,
    same_queries: bool,
    results: ResultsOption,
}

/// For each rank, its tokens as half-open ranges.
pub(crate) type TokenLists = Vec<Vec<(u32, u32)>>;

/// `"owner"`, `"all"`, or the rank that gets all rows.
#[derive(FromPyObject)]
enum ResultsOption {
    Rank(u32),
    Name(String),
}

#[pymethods]
impl Call {
    /// Checks the options of a group of `world` ranks.
    #[new]
    fn new(py: Python<'_>, options: Options<'_>, world: u32) -> PyResult<Self> {
        Self::of(&options, world, None).map(|(call, _)| call).map_err(|error| errors::of_call(py, &error))
    }
}

impl Call {
    /// The options of a call of `world` ranks, and what ends when the arrays among them are free: they are copied. With a place, an
    /// additive bias may be on its GPU, and is copied there.
    pub(crate) fn of(
        options: &Options<'_>,
        world: u32,
        place: Option<&Place>,
    ) -> Result<(Self, Receiver<()>)> {
        let heads_first = match options.layout.as_str() {
            "bshd" => false,
            "bhsd" => true,
            other => {
                return Err(Error::request(
                    format!("layout {other:?} is not known"),
                    "use \"bshd\" for [batch, tokens, heads, dim] or \"bhsd\" for [batch, heads, tokens, dim]",
                ));
            }
        };
        let mut attention = Attention::new()
            .mask(options.mask.parse::<Mask>()?)
            .sinks(options.sinks.clone().unwrap_or_default())
            .q_offset(options.q_offset)
            .label(options.label.clone())
            .execution(execution(options, world)?);
        if let Some(scale) = options.scale {
            attention = attention.scale(scale);
        }
        if let Some(softcap) = options.softcap {
            attention = attention.softcap(softcap);
        }
        if options.bias_gradient {
            attention = attention.bias_gradient();
        }
        let (loan, returned) = Loan::new();
        let (tensor, rows, kind) = match (&options.bias, &options.key_bias) {
            (None, None) => return Ok((Self { attention, heads_first, bias: None }, returned)),
            (Some(_), Some(_)) => {
                return Err(Error::request(
                    "bias and key_bias in one call",
                    "add key_bias to bias, which has a row for each query",
                ));
            }
            (Some(bias), None) => {
                let rows = Elements::import("bias", bias, &loan, place)?;
                if let Some(place) = place.filter(|_| rows.is_on_gpu()) {
                    let rows = rows.tensor("bias", heads_first, place)?;
                    // Refused before it is copied.
                    attention.clone().bias_tensor(&rows)?;
                    let attention = attention.bias_tensor(&rows.copied()?)?;
                    return Ok((Self { attention, heads_first, bias: Some(rows.dtype()) }, returned));
                }
                query_rows(&rows, heads_first)?
            }
            (None, Some(bias)) => key_rows(&Elements::import("key_bias", bias, &loan, None)?)?,
        };
        let bias = match kind {
            Kind::Number(dtype) => Some(dtype),
            Kind::Bool => None,
        };
        Ok((Self { attention: attention.bias(tensor, rows.into()), heads_first, bias }, returned))
    }

    /// Refuses an additive bias of another type than q, whose bytes would be read as q's type.
    pub(crate) fn check(&self, q: &Tensor) -> Result<()> {
        match self.bias {
            Some(dtype) if dtype != q.dtype() => Err(Error::request(
                format!("a bias of {dtype} for q of {}", q.dtype()),
                "convert it to the type of q, or give a mask of bool",
            )),
            _ => Ok(()),
        }
    }
}

fn execution(options: &Options<'_>, world: u32) -> Result<Execution> {
    let mut execution = Execution::new().fixed_order(options.fixed_order);
    let mesh = options.mesh.as_deref().map(str::parse::<Mesh>).transpose()?;
    if let Some(strategy) = &options.strategy {
        execution = execution.strategy(strategy.parse()?);
    }
    if let Some(mesh) = mesh {
        execution = execution.mesh(mesh);
    }
    if let Some(placement) = &options.placement {
        execution = execution.placement(placement.parse()?);
    }
    if let Some(wire) = &options.wire {
        execution = execution.wire(wire.parse()?);
    }
    let replicated = options.replicated.map_or(0..0, |(first, end)| first..end);
    match (&options.q_tokens, &options.kv_tokens) {
        (None, None) => {}
        (Some(queries), Some(keys)) => {
            let mesh = match mesh {
                Some(mesh) => mesh,
                None => Mesh::new(1, world)?,
            };
            let owners = |lists: &TokenLists, replicated: std::ops::Range<u32>| -> Result<Placement> {
                let total: u32 = lists.iter().flatten().map(|(first, end)| end.saturating_sub(*first)).sum();
                let runs = lists.iter().map(|list| {
                    let mut runs = TokenRuns::default();
                    for (first, end) in list {
                        runs.extend(&TokenRuns::contiguous(*first..(*end).max(*first)));
                    }
                    runs
                });
                let everywhere = replicated.end.saturating_sub(replicated.start);
                Placement::explicit(mesh, total.saturating_add(everywhere), replicated, runs.collect())
            };
            execution = execution.owners(owners(queries, 0..0)?, owners(keys, replicated.clone())?);
        }
        _ => {
            return Err(Error::request(
                "one of q_tokens and kv_tokens",
                "give both, or none: the tokens of each rank then follow each other in rank order",
            ));
        }
    }
    execution = execution.replicated(replicated);
    if options.same_queries {
        execution = execution.same_queries();
    }
    Ok(execution.results(match &options.results {
        ResultsOption::Rank(rank) => Results::One(Rank(*rank)),
        ResultsOption::Name(name) => match name.as_str() {
            "owner" => Results::Owner,
            "all" => Results::All,
            other => {
                return Err(Error::request(
                    format!("results {other:?} are not known"),
                    "use \"owner\", \"all\" or the number of a rank",
                ));
            }
        },
    }))
}

type Rows = (BiasTensor, Vec<u8>, Kind);

/// A row for each of this rank's queries.
fn query_rows(bias: &Elements, heads_first: bool) -> Result<Rows> {
    let axes = match heads_first {
        true => "[batch or 1, heads or 1, tokens, keys]",
        false => "[batch or 1, tokens, heads or 1, keys]",
    };
    let bias = if heads_first && bias.shape.len() == 4 {
        bias.clone().with_middle_axes_exchanged()
    } else {
        bias.clone()
    };
    let [batch, _, heads, keys] = bias.shape[..] else {
        return Err(wrong_axes("bias", &bias, axes));
    };
    rows(&bias, [batch, heads, keys], false)
}

/// A row that all queries of all ranks share.
fn key_rows(bias: &Elements) -> Result<Rows> {
    match bias.shape[..] {
        [batch, keys] => rows(bias, [batch, 1, keys], true),
        [batch, heads, keys] => rows(bias, [batch, heads, keys], true),
        _ => Err(wrong_axes("key_bias", bias, "[batch or 1, keys] or [batch or 1, heads, keys]")),
    }
}

/// The rows of an array whose last axis are the keys, in the form of the kernels: [`BiasKind`].
fn rows(bias: &Elements, [batch, heads, keys]: [usize; 3], shared_rows: bool) -> Result<Rows> {
    let extent = |value: usize| {
        u32::try_from(value)
            .map_err(|_| Error::request(format!("an extent of {value}"), format!("use at most {}", u32::MAX)))
    };
    let (batch, heads) = (extent(batch)?, extent(heads)?);
    let dense = bias.dense("bias")?;
    let kind = match bias.kind {
        Kind::Bool => BiasKind::Mask,
        Kind::Number(_) => BiasKind::Additive,
    };
    let bytes = match bias.kind {
        Kind::Bool => {
            let rows = dense.chunks(keys.max(1));
            rows.flat_map(|row| BiasTensor::pack(row.iter().map(|byte| *byte != 0)))
                .flat_map(u32::to_ne_bytes)
                .collect()
        }
        Kind::Number(dtype) => {
            let row_bytes = keys * dtype.bytes();
            let padding = row_bytes.next_multiple_of(4) - row_bytes;
            let rows = dense.chunks(row_bytes.max(1));
            rows.flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0, padding))).collect()
        }
    };
    Ok((BiasTensor { kind, batch, heads, shared_rows }, bytes, bias.kind))
}

fn wrong_axes(name: &str, bias: &Elements, axes: &str) -> Error {
    Error::request(format!("{name} has the shape {:?}", bias.shape), format!("give it the axes {axes}"))
}
