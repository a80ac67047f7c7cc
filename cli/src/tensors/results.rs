//! What a rank has computed, in host memory.

use bytes::Bytes;
use kyklos::{Gradients, Output, RankReport};

/// The output of a rank in host memory.
#[derive(Clone, Debug)]
pub(crate) struct HostOutput {
    /// `[batch, tokens, heads, dim]`, in the problem's dtype.
    pub(crate) o: Bytes,
    /// f32 `[batch, tokens, heads]`.
    pub(crate) lse: Bytes,
    pub(crate) report: RankReport,
}

impl HostOutput {
    pub(crate) async fn of(Output { o, lse, report, .. }: Output) -> kyklos::Result<Self> {
        Ok(Self { o: o.bytes().await?, lse: lse.bytes().await?, report })
    }
}

/// The gradients of a rank in host memory: see [`Gradients`].
#[derive(Clone, Debug)]
pub(crate) struct HostGradients {
    pub(crate) dq: Bytes,
    pub(crate) dk: Bytes,
    pub(crate) dv: Bytes,
    pub(crate) d_sinks_part: Vec<f64>,
    pub(crate) d_bias: Option<Bytes>,
    pub(crate) report: RankReport,
}

impl HostGradients {
    pub(crate) async fn of(gradients: Gradients) -> kyklos::Result<Self> {
        let Gradients { dq, dk, dv, d_sinks_part, d_bias, report, .. } = gradients;
        let d_bias = match d_bias {
            Some(d_bias) => Some(d_bias.bytes().await?),
            None => None,
        };
        let [dq, dk, dv] = [dq.bytes().await?, dk.bytes().await?, dv.bytes().await?];
        Ok(Self { dq, dk, dv, d_sinks_part, d_bias, report })
    }
}
