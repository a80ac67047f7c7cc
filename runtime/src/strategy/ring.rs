//! The ring: keys and values go round the shards, queries stay (Liu et al. 2023, arXiv 2310.01889).
//!
//! R − 1 hops for R shards. A hop is posted before the block that is here is computed, so that the next block
//! travels under the computation: at any time one KV buffer is read and sent on while the next one arrives.

use kyklos_transport::Rank;

use super::build::{Inputs, PlanBuilder};
use crate::TokenRuns;
use crate::plan::{BufferId, Content, Recv, Send};

/// Attention of the queries against the keys and values of every shard, of which `kv` is this rank's. Ends all inputs,
/// returns the running state.
pub(super) fn attend_round(builder: &mut PlanBuilder<'_>, inputs: Inputs) -> BufferId {
    let Inputs { q, kv, pairs } = inputs;
    let mesh = builder.world.mesh;
    let (r, u) = mesh.coordinates(builder.rank);
    let (ring, next, previous) = (mesh.ring(), mesh.rank((r + 1) % mesh.ring(), u), before(builder, r, u, 1));
    let (tokens, heads) = (builder.buffer(q).tokens.clone(), builder.q_heads(u));
    let kv_heads = builder.buffer(kv).heads.clone();
    let state = builder.declare("state".to_owned(), Content::State, tokens, heads);

    // What this rank holds now: nothing where the shard whose turn it is has no tokens.
    let mut held = Some(kv).filter(|kv| !builder.buffer(*kv).tokens.is_empty());
    for hop in 1..=ring {
        let mut arriving = None;
        let mut exchange = None;
        if hop < ring {
            let sends = held.map(|kv| Send {
                to: next.0,
                parts: vec![builder.tokens_of(kv, 0..builder.buffer(kv).tokens.len())],
            });
            let (owner, _) = mesh.coordinates(before(builder, r, u, hop));
            let tokens: TokenRuns = builder.world.kv_placement.of_shard(owner);
            if !tokens.is_empty() {
                arriving = Some(builder.declare(
                    format!("kv of shard {owner}"),
                    Content::KeyValue,
                    tokens,
                    kv_heads.clone(),
                ));
            }
            let recvs = arriving.map(|kv| Recv { from: previous.0, parts: vec![kv] });
            exchange = builder.exchange(sends.into_iter().collect(), recvs.into_iter().collect());
        }
        if let Some(kv) = held {
            builder.attend(Inputs { kv, ..inputs }, state);
        }
        builder.wait(exchange);
        if let Some(kv) = held {
            builder.free(kv);
        }
        held = arriving;
    }
    builder.free(q);
    if let Some(pairs) = pairs {
        builder.free(pairs);
    }
    state
}

/// The rank `hop` shards before shard `r` in the ring: whose shard arrives with that hop.
fn before(builder: &PlanBuilder<'_>, r: u32, u: u32, hop: u32) -> Rank {
    let mesh = builder.world.mesh;
    mesh.rank((r + mesh.ring() - hop) % mesh.ring(), u)
}
