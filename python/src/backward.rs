//! The backward pass of a call.

use kyklos::{Gradients, Result, Session, Tensor};

use crate::call::Call;
use crate::tensors::inputs::BackwardInputs;
use crate::tensors::outputs::{Array, Fetched};

/// Gradients of q, k and v, this rank's part of those of the sinks, and that of the bias.
pub(crate) type GradientArrays = (Array, Array, Array, Vec<f64>, Option<Array>);

/// The gradients of a pass, before Python gets them.
pub(crate) struct FetchedGradients {
    of_states: [Fetched; 3],
    d_sinks_part: Vec<f64>,
    d_bias: Option<Fetched>,
    pub(crate) report: String,
}

/// Runs the backward pass of a call on its session. Gradients are where q is.
pub(crate) fn run(session: &mut Session, inputs: &BackwardInputs) -> Result<FetchedGradients> {
    let BackwardInputs { attention, saved, d_o, d_lse } = inputs;
    let in_place = saved.q.device().is_some();
    let gradients = session.backward(attention, saved, d_o, d_lse.as_ref())?;
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
