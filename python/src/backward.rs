//! The backward pass of a call.

use std::sync::mpsc::Receiver;

use bytes::Bytes;
use kyklos::{Dtype, Gradients, Result, Saved, Session, Tensor};
use pyo3::prelude::*;

use crate::arrays::{Array, Elements, Loan};
use crate::call::Call;

/// Gradients of q, k and v, this rank's part of those of the sinks, and that of the bias.
pub(crate) type Returned = (Array, Array, Array, Vec<f64>, Option<Array>);

/// A tensor in host memory.
type HostTensor = (Bytes, [usize; 4], Dtype);

/// Gradients in host memory.
pub(crate) struct Fetched {
    tensors: [HostTensor; 3],
    d_sinks_part: Vec<f64>,
    d_bias: Option<HostTensor>,
    pub(crate) report: String,
}

/// What a backward pass reads.
pub(crate) struct Inputs {
    saved: Saved,
    d_o: Tensor,
    d_lse: Option<Tensor>,
}

/// Runs the backward pass of `call` on its session, and brings the gradients to host memory.
pub(crate) fn run(session: &mut Session, call: &Call, inputs: &Inputs) -> Result<Fetched> {
    let Inputs { saved, d_o, d_lse } = inputs;
    let gradients = session.backward(&call.attention, saved, d_o, d_lse.as_ref())?;
    let fetched = |tensor: &Tensor| -> Result<HostTensor> {
        Ok((pollster::block_on(tensor.bytes())?, tensor.shape(), tensor.dtype()))
    };
    let Gradients { dq, dk, dv, d_sinks_part, d_bias, report, .. } = gradients;
    Ok(Fetched {
        tensors: [fetched(&dq)?, fetched(&dk)?, fetched(&dv)?],
        d_sinks_part,
        d_bias: d_bias.as_ref().map(fetched).transpose()?,
        report: serde_json::to_string(&report).unwrap_or_default(),
    })
}

impl Fetched {
    /// The arrays that Python gets.
    pub(crate) fn returned(self, call: &Call) -> Returned {
        let array = |(bytes, shape, dtype): HostTensor| Array::new(bytes, &shape, dtype, call.heads_first);
        let [dq, dk, dv] = self.tensors.map(&array);
        (dq, dk, dv, self.d_sinks_part, self.d_bias.map(array))
    }
}

/// Imports q, k, v, o, lse, d_o and d_lse, where lse and d_lse have a fourth axis of extent 1; and what ends when nothing of
/// them is in use.
pub(crate) fn import(
    call: &Call,
    arrays: [&Bound<'_, PyAny>; 6],
    d_lse: Option<&Bound<'_, PyAny>>,
) -> Result<(Inputs, Receiver<()>)> {
    let (loan, returned) = Loan::new();
    let import = |name: &str, array: &Bound<'_, PyAny>| -> Result<Tensor> {
        Elements::import(name, array, &loan)?.tensor(name, call.heads_first)
    };
    let [q, k, v, o, lse, d_o] = arrays;
    let saved = Saved {
        q: import("q", q)?,
        k: import("k", k)?,
        v: import("v", v)?,
        o: import("o", o)?,
        lse: import("lse", lse)?,
    };
    call.check(&saved.q)?;
    let d_o = import("d_o", d_o)?;
    let d_lse = d_lse.map(|d_lse| import("d_lse", d_lse)).transpose()?;
    Ok((Inputs { saved, d_o, d_lse }, returned))
}
