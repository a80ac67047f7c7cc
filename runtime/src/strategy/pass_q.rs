//! Queries travel to the keys: every rank sends its queries directly to each rank whose keys they see, and gets a
//! running state over those keys back. Keys and values are not sent.
//!
//! For few queries over many keys: decoding over a cache that is split over ranks, cross-attention to a long context. q
//! travels in one direction; f32 a, m and l of every query travel back. This is fewer bytes than keys and values if the
//! number of queries is below about Hkv / Hq of the number of keys in f32, Hkv / (1.5 Hq) in f16 or bf16.

use super::build::{Inputs, PlanBuilder};
use super::facts::{Extent, MeshRule, Moves, StrategyFacts};
use super::price::Traffic;
use super::streams::Routes;
use super::unified;
use crate::plan::{BufferId, Recv, Send};

pub(super) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::Any, ring: Extent::AtLeastTwo },
    default_on: None,
    is_distinct: |_, _| true,
    moves: Moves::Queries,
    streams: &[],
    attend_round: attend_everywhere,
    round_bytes,
    posts_all_at_once: true,
    ..unified::FACTS
};

/// Attention of the queries against the keys and values of every shard. Frees all inputs, returns the running state.
fn attend_everywhere(builder: &mut PlanBuilder<'_>, _: &Routes, inputs: Inputs) -> BufferId {
    let mesh = builder.world.mesh;
    let (ring, (r, u)) = (mesh.ring(), mesh.coordinates(builder.rank));
    let at = |distance: u32| (r + distance) % ring;
    let behind = |distance: u32| (r + ring - distance) % ring;

    // Sends the queries to the rank `distance` ahead.
    let mut visitors = Vec::new();
    for distance in 1..ring {
        let parts = [Some(inputs.q), inputs.pairs].into_iter().flatten();
        let send = builder.sees(r, at(distance)).then(|| Send {
            to: mesh.rank(at(distance), u).0,
            parts: parts.map(|part| builder.whole(part)).collect(),
        });
        let guest = builder.sees(behind(distance), r).then(|| builder.visitor(behind(distance), inputs));
        let recv = guest.map(|guest| Recv {
            from: mesh.rank(behind(distance), u).0,
            parts: [Some(guest.q), guest.pairs].into_iter().flatten().collect(),
        });
        let exchange = builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
        visitors.push((exchange, guest));
    }
    let state = builder.state(inputs.q);
    builder.attend(inputs, state);

    // The state of one visiting shard travels back while the queries of the next one are attended.
    let mut returning = Vec::new();
    for (distance, (exchange, guest)) in (1..ring).zip(visitors) {
        builder.wait(exchange);
        let own_keys = builder.own_keys(inputs.kv);
        let state_back = guest.map(|guest| {
            // A query meets the keys that every rank holds only on its own rank.
            let met = builder.world.kv_placement.of_shard(r);
            let state_back = builder.travelling_state(guest.q, met);
            builder.attend_some(guest, own_keys, state_back);
            builder.end_queries(guest);
            state_back
        });
        let send = state_back.map(|state_back| Send {
            to: mesh.rank(behind(distance), u).0,
            parts: vec![builder.whole(state_back)],
        });
        let returned = builder.sees(r, at(distance)).then(|| {
            let their_keys = builder.world.kv_placement.of_shard(at(distance));
            builder.travelling_state(inputs.q, their_keys)
        });
        let recv =
            returned.map(|returned| Recv { from: mesh.rank(at(distance), u).0, parts: vec![returned] });
        let exchange = builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
        returning.push((exchange, state_back, returned));
    }
    for (exchange, state_back, returned) in returning {
        builder.wait(exchange);
        if let Some(state_back) = state_back {
            builder.free(state_back);
        }
        if let Some(returned) = returned {
            builder.merge(returned, state);
            builder.free(returned);
        }
    }
    builder.free(inputs.kv);
    builder.end_queries(inputs);
    state
}

fn round_bytes(traffic: &Traffic<'_>, _: &Routes) -> u128 {
    traffic.visits().map(|(guest, _)| traffic.query_bytes(traffic.q.of_shard(guest).len())).sum()
}
