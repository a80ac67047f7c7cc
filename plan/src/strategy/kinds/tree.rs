//! Queries travel to the keys along a tree. Running states travel back along it, and are merged on
//! the way.
//!
//! As [`pass_q`](super::pass_q), but the shards on the way forward the queries of a shard to
//! further shards, and merge partial results on the way back. The owner of the queries sends and
//! receives log₂ R messages instead of R − 1, after log₂ R latencies instead of one. All ranks
//! together send the same bytes. For queries of one rank, such as a token that is decoded, over the
//! keys of many ranks (Shyam et al. 2024, arXiv 2408.04093).
//!
//! Each shard is the root of one tree, at position 0; the shard `p` shards ahead of it is at
//! position p. The parent of a position is the position without its lowest set bit, so the subtree
//! of p is p and the positions that follow it. An exchange is numbered by the position of the child
//! in it: every rank is that child in one tree, and the parent of that child in another.

use super::pass_q;
use crate::plan::{BufferId, Recv, Send};
use crate::strategy::backward::Sums;
use crate::strategy::build::{Inputs, PlanBuilder};
use crate::strategy::facts::StrategyFacts;
use crate::strategy::partials::Partials;
use crate::strategy::price::Traffic;
use crate::strategy::streams::Routes;
use crate::tokens::TokenRuns;

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    example_mesh: (1, 4),
    // A tree of three ranks has no branches.
    is_distinct: |_, mesh| mesh.ring() > 3,
    same_queries: false,
    attend_round: attend_everywhere,
    backward_round: Some(backward_round),
    round_bytes,
    ..pass_q::FACTS
};

/// The trees of a plan set, for one rank.
struct Trees<'a, 'b> {
    builder: &'a mut PlanBuilder<'b>,
    inputs: Inputs,
    partials: Partials,
    ring: u32,
    /// The shard of this rank, and its piece of the shard.
    r: u32,
    u: u32,
    /// By position: the queries of the tree in which this rank has that position, and their result
    /// over the keys from there on.
    visits: Vec<Option<Visit>>,
}

#[derive(Clone, Copy)]
struct Visit {
    inputs: Inputs,
    result: BufferId,
}

/// Attention of the queries against the keys and values of every shard. Frees all inputs, returns
/// the running state.
fn attend_everywhere(builder: &mut PlanBuilder<'_>, _: &Routes, inputs: Inputs) -> BufferId {
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
    let (r, u) = mesh.coordinates(builder.rank);
    let mut trees = Trees { builder, inputs, partials, ring: mesh.ring(), r, u, visits: Vec::new() };
    trees.visits = vec![None; trees.ring as usize];
    trees.visits[0] = Some(Visit { inputs, result: partials.own() });
    trees.send_queries_down();
    trees.send_results_up();
    builder.free(inputs.kv);
    builder.end_queries(inputs);
}

impl Trees<'_, '_> {
    /// Sends queries down, depth by depth, so that no message waits for another one that could
    /// travel at the same time. A rank attends to queries while they travel further.
    fn send_queries_down(&mut self) {
        self.partials.attend_own(self.builder, self.inputs);
        let deepest = (1..self.ring).map(u32::count_ones).max().unwrap_or(0);
        let mut arriving: Vec<(u32, Option<u32>)> = Vec::new();
        for depth in 1..=deepest + 1 {
            for (_, exchange) in &arriving {
                self.builder.wait(*exchange);
            }
            let arrived = std::mem::take(&mut arriving);
            for position in self.positions(depth) {
                let send = self.goes_down(self.owner(parent(position)), position).then(|| {
                    let visit = self.visits[parent(position) as usize]
                        .expect("received before they are sent on")
                        .inputs;
                    let parts = visit.of_queries().map(|part| self.builder.whole(part)).collect();
                    Send { to: self.child(position), parts }
                });
                let owner = self.owner(position);
                let recv = self.goes_down(owner, position).then(|| {
                    let inputs = self.builder.visitor(owner, self.inputs);
                    let met = self.met_from(owner, position);
                    let result = self.partials.travelling(self.builder, inputs.q, met);
                    self.visits[position as usize] = Some(Visit { inputs, result });
                    Recv { from: self.parent_rank(position), parts: inputs.of_queries().collect() }
                });
                let exchange = self.builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
                arriving.push((position, exchange));
            }
            for (position, _) in arrived {
                if let Some(visit) = self.visits[position as usize]
                    && self.builder.sees(self.owner(position), self.r)
                {
                    self.partials.attend_visitor(self.builder, visit.inputs, visit.result);
                }
            }
        }
    }

    /// Sends results up, from the deepest position on. Each is sent after all results from below it
    /// have arrived.
    fn send_results_up(&mut self) {
        let deepest = (1..self.ring).map(u32::count_ones).max().unwrap_or(0);
        let mut arriving: Vec<(u32, Option<u32>, Option<BufferId>)> = Vec::new();
        for depth in (0..=deepest).rev() {
            for (position, exchange, returned) in std::mem::take(&mut arriving) {
                self.builder.wait(exchange);
                if let Some(Visit { inputs, result }) = self.visits[position as usize].take() {
                    self.builder.free(result);
                    self.builder.end_queries(inputs);
                }
                if let Some(returned) = returned {
                    let into = self.result(parent(position));
                    self.partials.add(self.builder, returned, into);
                    self.builder.free(returned);
                }
            }
            for position in self.positions(depth) {
                let send = self.visits[position as usize].map(|visit| Send {
                    to: self.parent_rank(position),
                    parts: vec![self.builder.whole(visit.result)],
                });
                let owner = self.owner(parent(position));
                let returned = self.goes_down(owner, position).then(|| {
                    let visit = self.visits[parent(position) as usize]
                        .expect("sent on before their result returns")
                        .inputs;
                    let met = self.met_from(owner, position);
                    self.partials.travelling(self.builder, visit.q, met)
                });
                let recv =
                    returned.map(|returned| Recv { from: self.child(position), parts: vec![returned] });
                let exchange = self.builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
                arriving.push((position, exchange, returned));
            }
        }
    }

    /// Positions at this depth, without the root.
    fn positions(&self, depth: u32) -> Vec<u32> {
        (1..self.ring).filter(|position| position.count_ones() == depth).collect()
    }

    /// The shard whose tree has this rank at `position`.
    fn owner(&self, position: u32) -> u32 {
        (self.r + self.ring - position) % self.ring
    }

    /// The rank at `position` in the tree in which this rank is its parent.
    fn child(&self, position: u32) -> u32 {
        let shard = (self.owner(parent(position)) + position) % self.ring;
        self.builder.set.mesh.rank(shard, self.u).0
    }

    fn parent_rank(&self, position: u32) -> u32 {
        let shard = (self.owner(position) + parent(position)) % self.ring;
        self.builder.set.mesh.rank(shard, self.u).0
    }

    /// The result of the queries at `position`.
    fn result(&self, position: u32) -> BufferId {
        self.visits[position as usize].expect("queries that are here").result
    }

    /// Shards of the subtree of `position` in the tree of `owner` whose keys its queries see.
    fn seen_from(&self, owner: u32, position: u32) -> impl Iterator<Item = u32> {
        seen_from(self.ring, owner, position, |owner, shard| self.builder.sees(owner, shard))
    }

    fn goes_down(&self, owner: u32, position: u32) -> bool {
        self.seen_from(owner, position).next().is_some()
    }

    /// The keys that the queries of `owner` meet in the subtree of `position`.
    fn met_from(&self, owner: u32, position: u32) -> TokenRuns {
        let mut met = TokenRuns::default();
        for shard in self.seen_from(owner, position) {
            met.extend(&self.builder.set.kv_placement.of_shard(shard));
        }
        met
    }
}

/// Shards of the subtree of `position` in the tree of `owner` for which `sees(owner, shard)` holds.
fn seen_from(
    ring: u32,
    owner: u32,
    position: u32,
    sees: impl Fn(u32, u32) -> bool,
) -> impl Iterator<Item = u32> {
    let below = 1 << position.trailing_zeros();
    let shards = (position..ring.min(position + below)).map(move |position| (owner + position) % ring);
    shards.filter(move |shard| sees(owner, *shard))
}

/// Queries, once for every edge of every tree that they travel along, and their states back.
fn round_bytes(traffic: &Traffic<'_>, _: &Routes) -> u128 {
    let ring = traffic.q.mesh().ring();
    let edges = (0..ring).flat_map(|owner| (1..ring).map(move |position| (owner, position)));
    let goes_down =
        |owner, position| seen_from(ring, owner, position, |q, kv| traffic.sees(q, kv)).next().is_some();
    let owners = edges.filter(|(owner, position)| goes_down(*owner, *position)).map(|(owner, _)| owner);
    owners.map(|owner| traffic.query_bytes(traffic.q.of_shard(owner).len())).sum()
}

fn parent(position: u32) -> u32 {
    position & (position - 1)
}
