//! What a mesh sends, from counts of tokens and heads alone: a mesh is chosen before any plan is made.

use crate::mesh::kv_heads_for;
use crate::{AttentionProblem, Placement};

/// Plan payload that all ranks send together, in bytes: what the plans over these placements add up to.
pub(super) fn bytes_sent(problem: &AttentionProblem, q: &Placement, kv: &Placement) -> u64 {
    let mesh = q.mesh();
    let heads = mesh.q_heads(problem);
    let kv_heads: Vec<u128> = heads.iter().map(|heads| kv_heads_for(problem, heads).len() as u128).collect();
    let all_kv_heads: u128 = kv_heads.iter().sum();
    let batch = u128::from(problem.batch);
    let row = batch * u128::from(problem.head_dim) * problem.dtype.bytes() as u128;
    let lse = batch * 4;

    // The trades: the tokens of each piece, for the heads of all other pieces, there and back.
    let mut bytes = 0;
    for (u, (heads, kv_heads)) in (0..).zip(heads.iter().zip(&kv_heads)) {
        let of_piece = |placement: &Placement| -> u128 {
            (0..mesh.ring()).map(|r| placement.of_rank(mesh.rank(r, u)).len() as u128).sum()
        };
        let foreign = u128::from(problem.q_heads) - heads.len() as u128;
        bytes += of_piece(q) * foreign * (row + row + lse);
        bytes += of_piece(kv) * (all_kv_heads - kv_heads) * 2 * row;
        if let Some(pairs) = problem.pairs {
            let row = u128::from(pairs.batch) * pairs.row_bytes(problem.dtype, problem.kv_len) as u128;
            let copies = if pairs.heads > 1 { foreign } else { u128::from(mesh.ulysses()) - 1 };
            bytes += of_piece(q) * copies * row;
        }
    }
    // The ring: every shard moves once for each hop.
    bytes += u128::from(mesh.ring() - 1) * u128::from(problem.kv_len) * all_kv_heads * 2 * row;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
