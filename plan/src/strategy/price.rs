//! The bytes that a mesh sends, from counts of tokens and heads alone: a mesh is chosen before any
//! plan is made.

use crate::lower;
use crate::mesh::kv_heads_for;
use crate::placement::Placement;
use crate::plan::Content;
use crate::problem::AttentionProblem;

/// A problem and the owners of its tokens: they determine the bytes of messages.
pub(crate) struct Traffic<'a> {
    pub(super) problem: &'a AttentionProblem,
    pub(super) q: &'a Placement,
    pub(super) kv: &'a Placement,
}

impl Traffic<'_> {
    /// Payload that all ranks together send in both all-to-alls: the tokens of each piece, for the
    /// heads of all other pieces.
    pub(super) fn all_to_all_bytes(&self) -> u128 {
        let Self { problem, q, kv } = *self;
        let mesh = q.mesh();
        let all_kv_heads = self.all_kv_heads();
        let (row, lse) = (self.row_bytes(), u128::from(problem.batch) * 8);
        let mut bytes = 0;
        for (u, heads) in (0..).zip(mesh.q_heads(problem)) {
            let of_piece = |placement: &Placement| -> u128 {
                (0..mesh.ring()).map(|r| placement.of_rank(mesh.rank(r, u)).len() as u128).sum()
            };
            let foreign = u128::from(problem.q_heads) - heads.len() as u128;
            let foreign_kv = all_kv_heads - kv_heads_for(problem, &heads).len() as u128;
            bytes += of_piece(q) * foreign * (row + row + lse);
            bytes += of_piece(kv) * foreign_kv * 2 * row;
            if let Some(bias) = problem.query_bias() {
                let row = u128::from(bias.batch) * bias.row_bytes(problem.dtype, problem.kv_len) as u128;
                let copies = if bias.heads > 1 { foreign } else { u128::from(mesh.ulysses()) - 1 };
                bytes += of_piece(q) * copies * row;
            }
        }
        bytes
    }

    /// Bytes of the keys and values of this number of tokens on the wire, for all KV heads that the
    /// pieces of a shard need.
    pub(super) fn key_bytes(&self, tokens: usize) -> u128 {
        self.key_bytes_of(tokens, 1) * self.all_kv_heads()
    }

    /// The same for `kv_heads` heads.
    pub(super) fn key_bytes_of(&self, tokens: usize, kv_heads: usize) -> u128 {
        let heads = u32::try_from(kv_heads).expect("heads are counted in u32");
        u128::from(Content::WireKeyValue.bytes(self.problem, tokens, heads))
    }

    /// Bytes of this number of queries, their rows of an attention bias tensor, and their running
    /// states back, for all heads.
    pub(super) fn query_bytes(&self, tokens: usize) -> u128 {
        let problem = self.problem;
        let state = u128::from(problem.batch) * (u128::from(problem.head_dim) * 4 + 8);
        let bias_rows = problem.query_bias().map_or(0, |bias| {
            let heads = if bias.heads > 1 { problem.q_heads } else { self.q.mesh().ulysses() };
            u128::from(heads * bias.batch) * bias.row_bytes(problem.dtype, problem.kv_len) as u128
        });
        tokens as u128 * (u128::from(problem.q_heads) * (self.row_bytes() + state) + bias_rows)
    }

    /// Pairs of shards in which the first sees keys of the second.
    pub(super) fn visits(&self) -> impl Iterator<Item = (u32, u32)> {
        let ring = self.q.mesh().ring();
        let pairs = (0..ring).flat_map(move |guest| (0..ring).map(move |owner| (guest, owner)));
        pairs.filter(|(guest, owner)| guest != owner && self.sees(*guest, *owner))
    }

    /// Whether any query of the shard `q_shard` sees any key of the shard `kv_shard`.
    pub(super) fn sees(&self, q_shard: u32, kv_shard: u32) -> bool {
        lower::any_visible(self.problem, &self.q.of_shard(q_shard), &self.kv.of_shard(kv_shard))
    }

    /// KV heads that each piece of a shard needs, added up.
    fn all_kv_heads(&self) -> u128 {
        let heads = self.q.mesh().q_heads(self.problem);
        heads.iter().map(|heads| kv_heads_for(self.problem, heads).len() as u128).sum()
    }

    /// Bytes of one token of one head, over the batch.
    fn row_bytes(&self) -> u128 {
        let problem = self.problem;
        u128::from(problem.batch) * u128::from(problem.head_dim) * problem.dtype.bytes() as u128
    }
}
