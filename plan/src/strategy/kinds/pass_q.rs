//! Queries travel to the keys: every rank sends its queries directly to each rank whose keys they
//! see, and gets a running state over those keys back. Keys and values are not sent.
//!
//! For few queries over many keys: decoding over a cache that is split over ranks, cross-attention
//! to a long context. q travels in one direction; f32 a, m and l of every query travel back. This
//! is fewer bytes than keys and values if the number of queries is below about Hkv / Hq of the
//! number of keys in f32, Hkv / (1.5 Hq) in f16 or bf16.
//!
//! Where every rank holds all queries ([`same_queries`](crate::AttentionProblem::same_queries)),
//! only running states travel, in one exchange.

use kyklos_rank::Rank;

use super::unified;
use crate::lower;
use crate::plan::{BufferId, Content, PlanSet, Recv, Send};
use crate::strategy::backward::Sums;
use crate::strategy::build::{Inputs, PlanBuilder};
use crate::strategy::facts::{Extent, MeshRule, Moves, StrategyFacts};
use crate::strategy::partials::Partials;
use crate::strategy::price::Traffic;
use crate::strategy::streams::Routes;

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::Any, ring: Extent::AtLeastTwo },
    default_on: None,
    is_distinct: |_, _| true,
    moves: Moves::Queries,
    same_queries: true,
    streams: &[],
    attend_round: attend_everywhere,
    backward_round: Some(backward_round),
    round_bytes,
    posts_all_at_once: true,
    ..unified::FACTS
};

/// Attention of the queries against the keys and values of every shard. Frees all inputs, returns
/// the running state.
fn attend_everywhere(builder: &mut PlanBuilder<'_>, _: &Routes, inputs: Inputs) -> BufferId {
    if builder.set.problem.same_queries {
        return attend_same_queries(builder, inputs);
    }
    let state = builder.state(inputs.q);
    visit_all(builder, inputs, Partials::States(state));
    state
}

/// Gradients over the keys and values of every shard. Frees all inputs.
fn backward_round(builder: &mut PlanBuilder<'_>, _: &Routes, inputs: Inputs) -> Sums {
    let sums = builder.sums(inputs);
    visit_all(builder, inputs, Partials::Gradients(sums));
    sums
}

/// The queries visit every shard whose keys they see, and results come back. Frees all inputs.
fn visit_all(builder: &mut PlanBuilder<'_>, inputs: Inputs, partials: Partials) {
    let mesh = builder.set.mesh;
    let (ring, (r, u)) = (mesh.ring(), mesh.coordinates(builder.rank));
    let at = |distance: u32| (r + distance) % ring;
    let behind = |distance: u32| (r + ring - distance) % ring;

    // Sends the queries to the rank `distance` ahead.
    let mut visitors = Vec::new();
    for distance in 1..ring {
        let send = builder.sees(r, at(distance)).then(|| Send {
            to: mesh.rank(at(distance), u).0,
            parts: inputs.of_queries().map(|part| builder.whole(part)).collect(),
        });
        let guest = builder.sees(behind(distance), r).then(|| builder.visitor(behind(distance), inputs));
        let recv = guest.map(|guest| Recv {
            from: mesh.rank(behind(distance), u).0,
            parts: guest.of_queries().collect(),
        });
        let exchange = builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
        visitors.push((exchange, guest));
    }
    partials.attend_own(builder, inputs);

    // The result of one visiting shard travels back while the queries of the next one are attended.
    let mut returning = Vec::new();
    for (distance, (exchange, guest)) in (1..ring).zip(visitors) {
        builder.wait(exchange);
        let result = guest.map(|guest| {
            let met = builder.set.kv_placement.of_shard(r);
            let result = partials.travelling(builder, guest.q, met);
            partials.attend_visitor(builder, guest, result);
            builder.end_queries(guest);
            result
        });
        let send = result
            .map(|result| Send { to: mesh.rank(behind(distance), u).0, parts: vec![builder.whole(result)] });
        let returned = builder.sees(r, at(distance)).then(|| {
            let their_keys = builder.set.kv_placement.of_shard(at(distance));
            partials.travelling(builder, inputs.q, their_keys)
        });
        let recv =
            returned.map(|returned| Recv { from: mesh.rank(at(distance), u).0, parts: vec![returned] });
        let exchange = builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
        returning.push((exchange, result, returned));
    }
    for (exchange, result, returned) in returning {
        builder.wait(exchange);
        if let Some(result) = result {
            builder.free(result);
        }
        if let Some(returned) = returned {
            partials.add(builder, returned, partials.own());
            builder.free(returned);
        }
    }
    builder.free(inputs.kv);
    builder.end_queries(inputs);
}

/// Attention of queries that every rank holds: each rank attends to its own keys, and sends the
/// running state to all others. Every rank merges the states in rank order, so that ranks with
/// devices of one type get the same bytes. Frees all inputs, returns the running state.
fn attend_same_queries(builder: &mut PlanBuilder<'_>, inputs: Inputs) -> BufferId {
    let PlanSet { mesh, problem, kv_placement, .. } = builder.set;
    let queries = builder.buffer(inputs.q).tokens.clone();
    let sees = |shard: u32| lower::any_visible(problem, &queries, &kv_placement.of_shard(shard));
    let (mine, all) = (builder.rank.0, 0..mesh.ring());
    let seen: Vec<u32> = all.clone().filter(|shard| sees(*shard)).collect();
    let states: Vec<(u32, BufferId)> = seen
        .iter()
        .map(|shard| (*shard, builder.travelling_state(inputs.q, kv_placement.of_shard(*shard))))
        .collect();
    let own = states.iter().find(|(shard, _)| *shard == mine).map(|(_, state)| *state);
    if let Some(own) = own {
        let keys = builder.own_keys(inputs.kv);
        builder.attend_some(inputs, keys, own);
    }
    let sends = own.map_or_else(Vec::new, |own| {
        let others = all.filter(|shard| *shard != mine);
        others.map(|to| Send { to, parts: vec![builder.whole(own)] }).collect()
    });
    let others = states.iter().filter(|(shard, _)| *shard != mine);
    let recvs = others.map(|(from, state)| Recv { from: *from, parts: vec![*state] }).collect();
    let exchange = builder.exchange(sends, recvs);
    // While the states travel: the keys that every rank holds, which a query meets on its own rank
    // only.
    let total = builder.state(inputs.q);
    let replicated = builder.tokens_of(inputs.kv, 0..builder.replicated());
    builder.attend_some(inputs, replicated, total);
    builder.wait(exchange);
    for (_, state) in states {
        builder.merge(state, total);
        builder.free(state);
    }
    builder.free(inputs.kv);
    builder.end_queries(inputs);
    total
}

fn round_bytes(traffic: &Traffic<'_>, _: &Routes) -> u128 {
    let (problem, ring) = (traffic.problem, traffic.q.mesh().ring());
    if problem.same_queries {
        let queries = traffic.q.held_by(Rank(0));
        let senders = (0..ring)
            .filter(|shard| lower::any_visible(problem, &queries, &traffic.kv.of_shard(*shard)))
            .count();
        let state = Content::State.bytes(problem, queries.len(), problem.q_heads);
        return senders as u128 * u128::from(ring - 1) * u128::from(state);
    }
    traffic.visits().map(|(guest, _)| traffic.query_bytes(traffic.q.of_shard(guest).len())).sum()
}
