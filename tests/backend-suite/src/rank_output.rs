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
    /// Time in nanoseconds and traffic in bytes.
    pub report: RankReport,
    /// The rank's timelines, where they were recorded.
    pub spans: Vec<Span>,
}

impl RankOutput {
    /// Brings an output to the host.
    pub async fn of(Output { o, lse, report, spans }: Output) -> kyklos::Result<Self> {
        Ok(Self { o: o.bytes().await?, lse: lse.bytes().await?, report, spans })
    }
}
