//! All keys and values at once: every rank sends its own straight to each rank that sees any of them.
//!
//! As many bytes as in a ring, one hop of latency instead of R − 1, and memory for all of them: for keys and values that
//! are small beside the queries. Each message is an exchange of its own, so that what has arrived is attended to while
//! the rest travels.

use super::build::{Inputs, PlanBuilder};
use crate::plan::{BufferId, Recv, Send};

/// Attention of the queries against the keys and values of every shard. Ends all inputs, returns the running state.
pub(super) fn attend_all(builder: &mut PlanBuilder<'_>, inputs: Inputs) -> BufferId {
    let mesh = builder.world.mesh;
    let (ring, (r, u)) = (mesh.ring(), mesh.coordinates(builder.rank));
    let heads = builder.buffer(inputs.kv).heads.clone();
    let state = builder.state(inputs.q);
    let mut arriving = Vec::new();
    let mut made = Vec::new();
    let anybody = (0..ring).any(|other| other != r && builder.sees(other, r));
    let own = builder.own_keys(inputs.kv);
    let own = if anybody { builder.for_the_wire(own, &mut made) } else { own };
    for distance in 1..ring {
        let (to, from) = ((r + distance) % ring, (r + ring - distance) % ring);
        let send = builder.sees(to, r).then(|| Send { to: mesh.rank(to, u).0, parts: vec![own.clone()] });
        let kv = builder.sees(r, from).then(|| {
            let tokens = builder.world.kv_placement.of_shard(from);
            builder.arrival(from, tokens, heads.clone())
        });
        let recv = kv.map(|kv| Recv { from: mesh.rank(from, u).0, parts: vec![kv] });
        let exchange = builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
        arriving.push((exchange, kv));
    }
    builder.attend(inputs, state);
    for (exchange, kv) in arriving {
        builder.wait(exchange);
        if let Some(kv) = kv {
            builder.attend_arrived(inputs, kv, state);
            builder.free(kv);
        }
    }
    made.into_iter().for_each(|buffer| builder.free(buffer));
    builder.free(inputs.kv);
    builder.end_queries(inputs);
    state
}
