//! The backward pass of a call.

use std::sync::mpsc::Receiver;

use bytes::Bytes;
use kyklos::{Dtype, Gradients, Result, Saved, Session, Tensor};
use pyo3::prelude::*;

use crate::arrays::{Array, Elements, Loan};
use crate::call::Call;
use crate::errors;
use crate::group::Group;

/// Gradients of q, k and v, and this rank's part of those of the sinks.
pub(crate) type Returned = (Array, Array, Array, Vec<f64>);

/// A tensor in host memory.
type Fetched = (Bytes, [usize; 4], Dtype);

/// What a backward pass reads.
struct Inputs {
    saved: Saved,
    d_o: Tensor,
    d_lse: Option<Tensor>,
}

/// Runs the backward pass of `call` on the thread of the session. `arrays`: q, k, v, o, lse, d_o and d_lse; lse and d_lse have a
/// fourth axis of extent 1.
pub(crate) fn backward(
    group: &Group,
    py: Python<'_>,
    call: &Call,
    arrays: [&Bound<'_, PyAny>; 6],
    d_lse: Option<&Bound<'_, PyAny>>,
) -> PyResult<Returned> {
    let (inputs, returned) = import(call, arrays, d_lse).map_err(|error| group.refuse(py, error))?;
    let of_call = call.clone();
    let run = move |session: &mut Session| {
        let Inputs { saved, d_o, d_lse } = &inputs;
        fetch(session.backward(&of_call.attention, saved, d_o, d_lse.as_ref())?)
    };
    let ([dq, dk, dv], d_sinks_part, report) =
        group.worker().run(py, run)?.map_err(|error| errors::of_call(py, &error))?;
    group.worker().wait_for_loan(py, returned)?;
    group.keep_report(report);
    let array = |(bytes, shape, dtype): Fetched| Array::new(bytes, &shape, dtype, call.heads_first);
    Ok((array(dq), array(dk), array(dv), d_sinks_part))
}

fn import(
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

/// Brings gradients to host memory.
fn fetch(gradients: Gradients) -> Result<([Fetched; 3], Vec<f64>, String)> {
    let fetched = |tensor: &Tensor| -> Result<Fetched> {
        Ok((pollster::block_on(tensor.bytes())?, tensor.shape(), tensor.dtype()))
    };
    let Gradients { dq, dk, dv, d_sinks_part, report, .. } = gradients;
    let report = serde_json::to_string(&report).unwrap_or_default();
    Ok(([fetched(&dq)?, fetched(&dk)?, fetched(&dv)?], d_sinks_part, report))
}
