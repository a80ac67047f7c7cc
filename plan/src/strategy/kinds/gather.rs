//! All keys and values at once: every rank sends its own keys and values directly to each rank that
//! sees any of them.
//!
//! It sends as many bytes as a ring, has one hop of latency instead of R − 1, and needs memory for
//! all blocks. It suits keys and values that are small compared with the queries. Each message is
//! an exchange of its own, so that a rank attends to blocks that have arrived while the others
//! travel.

use super::unified;
use crate::plan::{BufferId, Recv, Send};
use crate::strategy::backward::{Gradients, Sums};
use crate::strategy::build::{Inputs, PlanBuilder};
use crate::strategy::facts::{Extent, MeshRule, StrategyFacts};
use crate::strategy::price::Traffic;
use crate::strategy::streams::{Attending, Part, Routes, Visitor};

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::Any, ring: Extent::AtLeastTwo },
    default_on: None,
    // Between two shards it is a ring.
    is_distinct: |_, mesh| mesh.ring() > 2,
    streams: &[],
    attend_round: attend_all,
    backward_round: Some(backward_round),
    round_bytes,
    posts_all_at_once: true,
    ..unified::FACTS
};

/// Attention of the queries against the keys and values of every shard. Frees all inputs, returns
/// the running state.
fn attend_all(builder: &mut PlanBuilder<'_>, _: &Routes, inputs: Inputs) -> BufferId {
    let state = builder.state(inputs.q);
    visit(builder, inputs.kv, &mut Attending { inputs, state });
    builder.end_queries(inputs);
    state
}

/// Keys and values go to every shard that sees them, and `visitor` uses them there; `kv` holds
/// those of this rank, and is freed.
pub(in crate::strategy) fn visit(builder: &mut PlanBuilder<'_>, kv: BufferId, visitor: &mut impl Visitor) {
    let mesh = builder.set.mesh;
    let (ring, (r, u)) = (mesh.ring(), mesh.coordinates(builder.rank));
    let heads = builder.buffer(kv).heads.clone();
    let mut arriving = Vec::new();
    let mut made = Vec::new();
    let any_reader = (0..ring).any(|other| other != r && builder.sees(other, r));
    let own = builder.own_keys(kv);
    let own = if any_reader { builder.for_the_wire(own, &mut made) } else { own };
    for distance in 1..ring {
        let (to, from) = ((r + distance) % ring, (r + ring - distance) % ring);
        let send = builder.sees(to, r).then(|| Send { to: mesh.rank(to, u).0, parts: vec![own.clone()] });
        let arrival = builder.sees(r, from).then(|| {
            let tokens = builder.set.kv_placement.of_shard(from);
            builder.arrival(from, tokens, heads.clone())
        });
        let recv = arrival.map(|kv| Recv { from: mesh.rank(from, u).0, parts: vec![kv] });
        let exchange = builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
        arriving.push((distance, exchange, arrival));
    }
    visitor.own(builder);
    for (distance, exchange, arrival) in arriving {
        builder.wait(exchange);
        if let Some(kv) = arrival {
            visitor.arrived(builder, 0, distance, kv);
            builder.free(kv);
        }
        visitor.used(builder, distance);
    }
    made.into_iter().for_each(|buffer| builder.free(buffer));
    builder.free(kv);
}

/// Gradients over the keys and values of every shard. Frees all inputs.
fn backward_round(builder: &mut PlanBuilder<'_>, _: &Routes, inputs: Inputs) -> Sums {
    let gradients = Gradients::new(builder, inputs);
    let mut visitor = Straight { gradients };
    visit(builder, inputs.kv, &mut visitor);
    visitor.gradients.end(builder)
}

/// The visitor of a backward pass.
struct Straight {
    gradients: Gradients,
}

impl Visitor for Straight {
    fn own(&mut self, builder: &mut PlanBuilder<'_>) {
        self.gradients.own(builder);
    }

    fn arrived(&mut self, builder: &mut PlanBuilder<'_>, _: usize, distance: u32, kv: BufferId) {
        let ring = builder.set.mesh.ring();
        let owner = (self.gradients.shard() + ring - distance) % ring;
        self.gradients.arrived(builder, owner, kv);
    }

    fn used(&mut self, builder: &mut PlanBuilder<'_>, distance: u32) {
        if distance > 0 {
            let reader = (self.gradients.shard() + distance) % builder.set.mesh.ring();
            self.gradients.post(builder, &[(reader, Part::WHOLE)]);
        }
    }
}

fn round_bytes(traffic: &Traffic<'_>, _: &Routes) -> u128 {
    traffic.visits().map(|(_, owner)| traffic.key_bytes(traffic.kv.of_shard(owner).len())).sum()
}
