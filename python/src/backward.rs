//! The backward pass of a call.

use std::sync::mpsc::Receiver;

use kyklos::{Gradients, Result, Saved, Session, Tensor};
use pyo3::prelude::*;

use crate::arrays::{Elements, Loan};
use crate::call::Call;
use crate::outputs::{Array, Fetched};
use crate::place::Place;

/// Gradients of q, k and v, this rank's part of those of the sinks, and that of the bias.
pub(crate) type GradientArrays = (Array, Array, Array, Vec<f64>, Option<Array>);

/// The gradients of a pass, before Python gets them.
pub(crate) struct FetchedGradients {
    of_states: [Fetched; 3],
    d_sinks_part: Vec<f64>,
    d_bias: Option<Fetched>,
    pub(crate) report: String,
}

/// What a backward pass reads.
pub(crate) struct Inputs {
    saved: Saved,
    d_o: Tensor,
    d_lse: Option<Tensor>,
}

/// Runs the backward pass of `call` on its session. Gradients are where q is.
pub(crate) fn run(session: &mut Session, call: &Call, inputs: &Inputs) -> Result<FetchedGradients> {
    let Inputs { saved, d_o, d_lse } = inputs;
    let in_place = saved.q.device().is_some();
    let gradients = session.backward(&call.attention, saved, d_o, d_lse.as_ref())?;
    let Gradients { dq, dk, dv, d_sinks_part, d_bias, report, .. } = gradients;
    let fetched = |tensor: &Tensor| Fetched::new(tensor, in_place);
    Ok(FetchedGradients {
        of_states: [fetched(&dq)?, fetched(&dk)?, fetched(&dv)?],
        d_sinks_part,
        d_bias: d_bias.as_ref().map(fetched).transpose()?,
        report: serde_json::to_string(&report).unwrap_or_default(),
    })
}

impl FetchedGradients {
    /// The arrays that Python gets.
    pub(crate) fn arrays(self, call: &Call) -> GradientArrays {
        let array = |fetched: Fetched| fetched.array(call.heads_first);
        let [dq, dk, dv] = self.of_states.map(&array);
        (dq, dk, dv, self.d_sinks_part, self.d_bias.map(array))
    }
}

/// Imports q, k, v, o, lse, d_o and d_lse; and what ends when nothing of them is in use.
pub(crate) fn import(
    call: &Call,
    place: &Place,
    arrays: [&Bound<'_, PyAny>; 6],
    d_lse: Option<&Bound<'_, PyAny>>,
) -> Result<(Inputs, Receiver<()>)> {
    let (loan, returned) = Loan::new();
    let elements = |name: &str, array| Elements::import(name, array, &loan, Some(place));
    let import = |name: &str, array| elements(name, array)?.tensor(name, call.heads_first, place);
    let numbers = |name: &str, array| elements(name, array)?.numbers(name, call.heads_first, place);
    let [q, k, v, o, lse, d_o] = arrays;
    let saved = Saved {
        q: import("q", q)?,
        k: import("k", k)?,
        v: import("v", v)?,
        o: import("o", o)?,
        lse: numbers("lse", lse)?,
    };
    call.check(&saved.q)?;
    let d_o = import("d_o", d_o)?;
    let d_lse = d_lse.map(|d_lse| numbers("d_lse", d_lse)).transpose()?;
    Ok((Inputs { saved, d_o, d_lse }, returned))
}
