//! One call that helpers share.

use std::sync::Mutex;

use kyklos::{Dtype, Error, Mask, Result, Tensor, WireFormat};
use kyklos_helpers::{Call, Forecast, Inputs, Part, Shape};
use pyo3::prelude::*;

use crate::tensors::arrays::{Elements, Loan};
use crate::tensors::axes::Form;
use crate::tensors::inputs::bias_of;
use crate::tensors::place::Place;

/// The options of a call, as Python passes them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct CallOptions<'py> {
    mask: String,
    scale: f32,
    /// `[batch or 1, heads or 1, queries, keys]`, bools or numbers, in host memory.
    bias: Option<Bound<'py, PyAny>>,
    /// The same of one row for all queries: `[batch or 1, heads or 1, keys]`.
    key_bias: Option<Bound<'py, PyAny>>,
    wire: String,
    gradients: bool,
    /// `[batch, queries, query heads, dim]`.
    q: [u32; 4],
    /// `[batch, keys, key/value heads, dim]`.
    kv: [u32; 4],
    dtype: String,
}

impl CallOptions<'_> {
    /// The shape of the call; without its bias.
    pub(crate) fn shape(&self) -> Result<Shape> {
        let [batch, q_len, q_heads, head_dim] = self.q;
        let [_, kv_len, kv_heads, _] = self.kv;
        let dtype = self.dtype.parse::<Dtype>()?;
        Ok(Shape { batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype })
    }

    /// The call, with its bias.
    pub(crate) fn call(&self) -> Result<Call> {
        let bias = match (&self.bias, &self.key_bias) {
            (Some(array), _) => Some((array, Form::Bias)),
            (None, Some(array)) => Some((array, Form::KeyBias)),
            (None, None) => None,
        };
        let bias = bias.map(|(array, form)| bias_of(array, form)).transpose()?;
        if let Some((tensor, _, [rows, keys])) = &bias {
            let wanted = if tensor.shared_rows { 1 } else { self.q[1] };
            if (*rows, *keys) != (wanted, self.kv[1]) {
                return Err(Error::request(
                    format!("a mask of {rows} rows and {keys} keys, for {wanted} and {}", self.kv[1]),
                    "give it a row for each query, and each key",
                ));
            }
        }
        Ok(Call {
            mask: self.mask.parse::<Mask>()?,
            scale: Some(self.scale),
            bias: bias.map(|(tensor, rows, _)| (tensor, rows)),
            wire: self.wire.parse::<WireFormat>()?,
            gradients: self.gradients,
            ..Call::default()
        })
    }
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
