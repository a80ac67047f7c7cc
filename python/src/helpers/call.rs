//! One call that helpers share.

use std::sync::Mutex;

use bytes::Bytes;
use kyklos::{BiasKind, BiasTensor, Dtype, Error, Mask, Result, Tensor, WireFormat};
use kyklos_helpers::{Call, Forecast, Inputs, Part, Shape};
use pyo3::prelude::*;

use crate::tensors::arrays::{Elements, Loan};
use crate::tensors::axes::Form;
use crate::tensors::inputs::bias_of;
use crate::tensors::place::Place;

/// The options of a call, as Python passes them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct CallOptions {
    mask: String,
    scale: f32,
    /// A bias: whether it is added, its batch entries and heads, and whether all queries share one
    /// row.
    bias: Option<(bool, u32, u32, bool)>,
    /// The helpers that may have a share, by name; all if it is not given.
    names: Option<Vec<String>>,
    wire: String,
    gradients: bool,
    /// `[batch, queries, query heads, dim]`.
    q: [u32; 4],
    /// `[batch, keys, key/value heads, dim]`.
    kv: [u32; 4],
    dtype: String,
}

impl CallOptions {
    /// The shape of the call; without its bias.
    pub(crate) fn shape(&self) -> Result<Shape> {
        let [batch, q_len, q_heads, head_dim] = self.q;
        let [_, kv_len, kv_heads, _] = self.kv;
        let dtype = self.dtype.parse::<Dtype>()?;
        Ok(Shape { batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype })
    }

    pub(crate) fn names(&self) -> Option<&[String]> {
        self.names.as_deref()
    }

    /// The call, without the rows of its bias.
    pub(crate) fn call(&self) -> Result<Call> {
        let bias = self.bias.map(|(is_added, batch, heads, shared_rows)| {
            let kind = if is_added { BiasKind::Additive } else { BiasKind::Mask };
            (BiasTensor { kind, batch, heads, shared_rows }, Bytes::new())
        });
        Ok(Call {
            mask: self.mask.parse::<Mask>()?,
            scale: Some(self.scale),
            bias,
            wire: self.wire.parse::<WireFormat>()?,
            gradients: self.gradients,
            ..Call::default()
        })
    }
}

/// The call with the rows of its bias: `[batch or 1, heads or 1, queries, keys]`, or without the
/// axis of queries if they share one row.
pub(super) fn with_bias(call: &Call, shape: &Shape, array: Option<&Bound<'_, PyAny>>) -> Result<Call> {
    let (Some((tensor, _)), Some(array)) = (&call.bias, array) else { return Ok(call.clone()) };
    let form = if tensor.shared_rows { Form::KeyBias } else { Form::Bias };
    let (given, bytes, [rows, keys]) = bias_of(array, form)?;
    let wanted = if tensor.shared_rows { 1 } else { shape.q_len };
    if given != *tensor || (rows, keys) != (wanted, shape.kv_len) {
        return Err(Error::request(
            format!(
                "a mask {given:?} of {rows} rows and {keys} keys, for {tensor:?} of {wanted} and {}",
                shape.kv_len
            ),
            "give it a row for each query, and each key",
        ));
    }
    Ok(Call { bias: Some((given, bytes)), ..call.clone() })
}

/// Key/value heads and rows of a part, as two half-open ranges.
type Ranges = (u32, u32, u32, u32);

fn ranges(part: &Part) -> Ranges {
    (part.kv_heads.start, part.kv_heads.end, part.rows.start, part.rows.end)
}

/// How a call is shared.
#[pyclass(frozen, module = "kyklos._kyklos")]
pub(crate) struct SharedCall {
    pub(super) call: Call,
    pub(super) shape: Shape,
    pub(super) forecast: Forecast,
}

#[pymethods]
impl SharedCall {
    /// What the owner computes.
    #[getter]
    fn own(&self) -> Vec<Ranges> {
        self.forecast.own.iter().map(ranges).collect()
    }

    /// What helpers compute: for each share its parts, and whether a part needs its keys.
    #[getter]
    fn shares(&self) -> Vec<Vec<(Ranges, bool)>> {
        let of = |parts: &Vec<Part>| {
            let mut before: Option<&Part> = None;
            let mut all = Vec::new();
            for part in parts {
                all.push((ranges(part), before.is_none_or(|before| before.kv_heads != part.kv_heads)));
                before = Some(part);
            }
            all
        };
        self.forecast.shares.iter().map(|share| of(&share.parts)).collect()
    }

    /// Seconds, forecast: with helpers, and alone.
    #[getter]
    fn seconds(&self) -> (f64, f64) {
        (self.forecast.total_s, self.forecast.alone_s)
    }
}

/// The shares of a call, which helpers compute.
#[pyclass(frozen, module = "kyklos._kyklos")]
pub(crate) struct Flight(pub(super) Mutex<Option<kyklos_helpers::Flight>>);

/// q, k, v and the gradient of the output of a part, each `[batch, tokens, heads, dim]`, dense and
/// in host memory.
pub(crate) type PartArrays<'py> =
    (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>);

/// The tensors of a part. Their memory is borrowed until the call has ended.
pub(super) fn inputs(place: &Place, (q, k, v, d_o): &PartArrays<'_>) -> Result<Inputs> {
    let (loan, _) = Loan::new();
    let tensor = |name: &str, array: &Bound<'_, PyAny>| -> Result<Tensor> {
        let elements = Elements::import(name, array, &loan, None)?;
        if elements.shape.len() != 4 {
            return Err(Error::request(
                format!("{name} of {} axes", elements.shape.len()),
                "pass [batch, tokens, heads, dim]",
            ));
        }
        elements.tensor(name, false, place)?.copied()
    };
    let keys = match (k, v) {
        (Some(k), Some(v)) => Some([tensor("k", k)?, tensor("v", v)?]),
        _ => None,
    };
    let d_o = d_o.as_ref().map(|d_o| tensor("d_o", d_o)).transpose()?;
    Ok(Inputs { q: tensor("q", q)?, keys, d_o })
}
