//! The options of a call.

use std::sync::Arc;

use kyklos::{Attention, Error, Execution, Mask, Mesh, Placement, Result, Results, TokenRuns};
use kyklos_transport::Rank;
use pyo3::prelude::*;

use crate::tensors::axes::Form;

/// The options of a call, checked: which attention to compute, and how the ranks share it.
#[pyclass(frozen, module = "kyklos._kyklos")]
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// Without the bias, which is read with the other arrays.
    pub(crate) attention: Attention,
    /// Whether arrays are `[batch, heads, tokens, dim]` instead of `[batch, tokens, heads, dim]`.
    pub(crate) heads_first: bool,
    pub(crate) bias: Option<Bias>,
}

/// The array `bias` or `key_bias`.
#[derive(Clone, Debug)]
pub(crate) struct Bias {
    pub(crate) array: Arc<Py<PyAny>>,
    pub(crate) form: Form,
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
    inference: bool,
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

impl Call {
    /// The options of a call of `size` ranks.
    pub(crate) fn of(options: &Options<'_>, size: u32) -> Result<Self> {
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
            .execution(execution(options, size)?);
        if let Some(scale) = options.scale {
            attention = attention.scale(scale);
        }
        if let Some(softcap) = options.softcap {
            attention = attention.softcap(softcap);
        }
        if options.bias_gradient {
            attention = attention.bias_gradient();
        }
        let bias = |array: &Bound<'_, PyAny>, form| Bias { array: Arc::new(array.clone().unbind()), form };
        let bias = match (&options.bias, &options.key_bias) {
            (None, None) => None,
            (Some(_), Some(_)) => {
                return Err(Error::request(
                    "bias and key_bias in one call",
                    "add key_bias to bias, which has a row for each query",
                ));
            }
            (Some(array), None) => Some(bias(array, Form::Bias)),
            (None, Some(array)) => Some(bias(array, Form::KeyBias)),
        };
        Ok(Self { attention, heads_first, bias })
    }
}

fn execution(options: &Options<'_>, size: u32) -> Result<Execution> {
    let mut execution = Execution::new().fixed_order(options.fixed_order).inference(options.inference);
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
                None => Mesh::new(1, size)?,
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
                Ok(Placement::explicit(mesh, total.saturating_add(everywhere), replicated, runs.collect())?)
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
