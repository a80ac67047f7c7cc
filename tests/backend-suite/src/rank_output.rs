//! What a rank computed.

use bytes::Bytes;
use kyklos::{Output, RankReport, Span};

/// What a rank computed, in host memory.
#[derive(Clone, Debug)]
pub struct RankOutput {
    /// `[batch, tokens, heads, dim]` of the rank's own tokens, in the problem's dtype.
    pub o: Bytes,
    /// f32 `[batch, tokens, heads]` of the same tokens.
    pub lse: Bytes,
    /// What the rounding of `lse` has left out.
    pub rest: Bytes,
    /// Time in nanoseconds and traffic in bytes.
    pub report: RankReport,
    /// The rank's timelines, where they were recorded.
    pub spans: Vec<Span>,
}

impl RankOutput {
    /// Brings an output to the host.
    pub async fn of(Output { o, lse_pair, report, spans, .. }: Output) -> kyklos::Result<Self> {
        Ok(Self::new(o.bytes().await?, &lse_pair.bytes().await?, report, spans))
    }

    /// Of o and the pairs of log-sum-exps.
    pub(crate) fn new(o: Bytes, pairs: &[u8], report: RankReport, spans: Vec<Span>) -> Self {
        let numbers: Vec<f32> = bytemuck::pod_collect_to_vec(pairs);
        let half = |first: usize| -> Vec<f32> { numbers.iter().skip(first).step_by(2).copied().collect() };
        let [lse, rest] = [0, 1].map(|first| Bytes::copy_from_slice(bytemuck::cast_slice(&half(first))));
        Self { o, lse, rest, report, spans }
    }
}
