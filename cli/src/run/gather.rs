//! Gradients of the whole sequence, from those of ranks of this process.

use crate::tensors::results::HostGradients;
use bytes::Bytes;
use kyklos::plan::PlanSet;
use kyklos::{RankReport, TokenRuns};
use kyklos_transport::Rank;

/// The gradients of all tokens and heads, from `parts` by rank; those of the sinks are sums. An
/// element that no part has is not a number.
pub(crate) fn gather(set: &PlanSet, parts: impl IntoIterator<Item = HostGradients>) -> HostGradients {
    let (batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype) = (
        set.problem.batch,
        set.problem.q_len,
        set.problem.kv_len,
        set.problem.q_heads,
        set.problem.kv_heads,
        set.problem.head_dim,
        set.problem.dtype,
    );
    let nothing = |tokens: u32, heads: u32| Whole::new([batch, tokens, heads * head_dim], dtype.bytes());
    let mut dq = nothing(q_len, q_heads);
    let [mut dk, mut dv] = [nothing(kv_len, kv_heads), nothing(kv_len, kv_heads)];
    let mut d_sinks_part = vec![0.0; set.problem.sinks.len()];
    let mut d_bias = set.problem.bias.filter(|_| set.problem.bias_gradient).map(|bias| {
        let mut whole =
            Whole::new([bias.batch, if bias.shared_rows { 1 } else { q_len }, bias.heads * kv_len], 4);
        if bias.shared_rows {
            whole.bytes.fill(0);
        }
        (bias, whole)
    });
    for (rank, part) in (0..).map(Rank).zip(parts) {
        let (queries, keys) = (set.q_placement.held_by(rank), set.kv_placement.held_by(rank));
        dq.put(&queries, &part.dq);
        dk.put(&keys, &part.dk);
        dv.put(&keys, &part.dv);
        if let (Some((bias, whole)), Some(part)) = (&mut d_bias, &part.d_bias) {
            match bias.shared_rows {
                true => whole.add(part),
                false => whole.put(&queries, part),
            }
        }
        d_sinks_part.iter_mut().zip(part.d_sinks_part).for_each(|(sum, part)| *sum += part);
    }
    let [dq, dk, dv] = [dq, dk, dv].map(|whole| Bytes::from(whole.bytes));
    let d_bias = d_bias.map(|(_, whole)| Bytes::from(whole.bytes));
    HostGradients { dq, dk, dv, d_sinks_part, d_bias, report: RankReport::default() }
}

/// A tensor `[batch, tokens, …]` of all tokens.
struct Whole {
    tokens: usize,
    row_bytes: usize,
    bytes: Vec<u8>,
}

impl Whole {
    fn new([batch, tokens, row]: [u32; 3], element_bytes: usize) -> Self {
        let [batch, tokens, row_bytes] = [batch as usize, tokens as usize, row as usize * element_bytes];
        Self { tokens, row_bytes, bytes: vec![NOT_A_NUMBER; batch * tokens * row_bytes] }
    }

    /// Adds a rank's part of f32 numbers.
    fn add(&mut self, part: &Bytes) {
        for (sum, part) in self.bytes.chunks_exact_mut(4).zip(part.chunks_exact(4)) {
            let both: [f32; 2] = [bytemuck::pod_read_unaligned(sum), bytemuck::pod_read_unaligned(part)];
            sum.copy_from_slice(bytemuck::bytes_of(&(both[0] + both[1])));
        }
    }

    /// Takes the rows of `tokens`, of all batch entries.
    fn put(&mut self, tokens: &TokenRuns, part: &Bytes) {
        let batch = self.bytes.len() / (self.tokens * self.row_bytes).max(1);
        let places = (0..batch).flat_map(|entry| tokens.iter().map(move |token| (entry, token as usize)));
        for ((entry, token), row) in places.zip(part.chunks_exact(self.row_bytes.max(1))) {
            let at = (entry * self.tokens + token) * self.row_bytes;
            self.bytes[at..at + self.row_bytes].copy_from_slice(row);
        }
    }
}

/// A number of any type with these bytes only is none.
const NOT_A_NUMBER: u8 = 0xff;
