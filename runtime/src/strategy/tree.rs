//! Queries go to the keys along a tree, and what they found comes back along it, merged on the way.
//!
//! As [`pass_q`](super::pass_q), but a shard's queries are handed on from shard to shard, and partial results meet half
//! way: the owner of the queries sends and receives log₂ R messages instead of R − 1, after log₂ R latencies instead of
//! one. All ranks together send the same bytes. For queries that one rank has, such as a token that is decoded, over keys
//! that many have (Shyam et al. 2024, arXiv 2408.04093).
//!
//! Of each shard's tree this shard is the root, at position 0, and the shard `p` places ahead is at position p. The
//! parent of a position is it without its lowest bit, so those below p are p and the next ones, and an exchange is named by the
//! position of the child in it: every rank is that child in one tree, and that child's parent in another.

use super::build::{Inputs, PlanBuilder};
use super::facts::StrategyFacts;
use super::pass_q;
use super::price::Traffic;
use super::streams::Routes;
use crate::TokenRuns;
use crate::plan::{BufferId, Recv, Send};

pub(super) const FACTS: StrategyFacts = StrategyFacts {
    example_mesh: (1, 4),
    // A tree of three ranks has no branches.
    is_distinct: |_, mesh| mesh.ring() > 3,
    attend_round: attend_everywhere,
    round_bytes,
    ..pass_q::FACTS
};

/// The trees of a world, from the side of one rank.
struct Trees<'a, 'b> {
    builder: &'a mut PlanBuilder<'b>,
    inputs: Inputs,
    ring: u32,
    /// This rank's shard, and its place inside.
    r: u32,
    u: u32,
    /// By position: the queries of the tree in which this rank is there, and what they have found from there on.
    guests: Vec<Option<Guest>>,
}

#[derive(Clone, Copy)]
struct Guest {
    inputs: Inputs,
    found: BufferId,
}

/// Attention of the queries against the keys and values of every shard. Ends all inputs, returns the running state.
fn attend_everywhere(builder: &mut PlanBuilder<'_>, _: &Routes, inputs: Inputs) -> BufferId {
    let mesh = builder.world.mesh;
    let (r, u) = mesh.coordinates(builder.rank);
    let state = builder.state(inputs.q);
    let mut trees = Trees { builder, inputs, ring: mesh.ring(), r, u, guests: Vec::new() };
    trees.guests = vec![None; trees.ring as usize];
    trees.guests[0] = Some(Guest { inputs, found: state });
    trees.hand_queries_down();
    trees.hand_states_up();
    builder.free(inputs.kv);
    builder.end_queries(inputs);
    state
}

impl Trees<'_, '_> {
    /// Depth by depth, so that no message waits for one that could travel beside it. What has arrived is attended to while
    /// it travels on.
    fn hand_queries_down(&mut self) {
        self.builder.attend(self.inputs, self.found(0));
        let deepest = (1..self.ring).map(u32::count_ones).max().unwrap_or(0);
        let mut arriving: Vec<(u32, Option<u32>)> = Vec::new();
        for depth in 1..=deepest + 1 {
            for (_, exchange) in &arriving {
                self.builder.wait(*exchange);
            }
            let arrived = std::mem::take(&mut arriving);
            for position in self.positions(depth) {
                let send = self.goes_down(self.owner(parent(position)), position).then(|| {
                    let guest =
                        self.guests[parent(position) as usize].expect("it has what it hands on").inputs;
                    let parts = [Some(guest.q), guest.pairs].into_iter().flatten();
                    let parts = parts.map(|part| self.builder.whole(part)).collect();
                    Send { to: self.child(position), parts }
                });
                let owner = self.owner(position);
                let recv = self.goes_down(owner, position).then(|| {
                    let inputs = self.builder.visitor(owner, self.inputs);
                    let met = self.met_from(owner, position);
                    let found = self.builder.travelling_state(inputs.q, met);
                    self.guests[position as usize] = Some(Guest { inputs, found });
                    let parts = [Some(inputs.q), inputs.pairs].into_iter().flatten().collect();
                    Recv { from: self.parent_rank(position), parts }
                });
                let exchange = self.builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
                arriving.push((position, exchange));
            }
            for (position, _) in arrived {
                if let Some(guest) = self.guests[position as usize] {
                    // What every rank holds, the visitor has met at home.
                    let own = self.builder.own_keys(self.inputs.kv);
                    if self.builder.sees(self.owner(position), self.r) {
                        self.builder.attend_some(guest.inputs, own, guest.found);
                    }
                }
            }
        }
    }

    /// The same way back: from the deepest on, each once all below it have come.
    fn hand_states_up(&mut self) {
        let deepest = (1..self.ring).map(u32::count_ones).max().unwrap_or(0);
        let mut arriving: Vec<(u32, Option<u32>, Option<BufferId>)> = Vec::new();
        for depth in (0..=deepest).rev() {
            for (position, exchange, came) in std::mem::take(&mut arriving) {
                self.builder.wait(exchange);
                if let Some(Guest { inputs, found }) = self.guests[position as usize].take() {
                    self.builder.free(found);
                    self.builder.end_queries(inputs);
                }
                if let Some(came) = came {
                    let into = self.found(parent(position));
                    self.builder.merge(came, into);
                    self.builder.free(came);
                }
            }
            for position in self.positions(depth) {
                let send = self.guests[position as usize].map(|guest| Send {
                    to: self.parent_rank(position),
                    parts: vec![self.builder.whole(guest.found)],
                });
                let owner = self.owner(parent(position));
                let came = self.goes_down(owner, position).then(|| {
                    let guest = self.guests[parent(position) as usize].expect("it has handed them on").inputs;
                    let met = self.met_from(owner, position);
                    self.builder.travelling_state(guest.q, met)
                });
                let recv = came.map(|came| Recv { from: self.child(position), parts: vec![came] });
                let exchange = self.builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
                arriving.push((position, exchange, came));
            }
        }
    }

    /// Positions at this depth, but for the root.
    fn positions(&self, depth: u32) -> Vec<u32> {
        (1..self.ring).filter(|position| position.count_ones() == depth).collect()
    }

    /// Whose tree it is in which this rank is at `position`.
    fn owner(&self, position: u32) -> u32 {
        (self.r + self.ring - position) % self.ring
    }

    /// The rank at `position` in the tree in which this rank is its parent.
    fn child(&self, position: u32) -> u32 {
        let shard = (self.owner(parent(position)) + position) % self.ring;
        self.builder.world.mesh.rank(shard, self.u).0
    }

    fn parent_rank(&self, position: u32) -> u32 {
        let shard = (self.owner(position) + parent(position)) % self.ring;
        self.builder.world.mesh.rank(shard, self.u).0
    }

    /// The running state of the queries that this rank has at `position`.
    fn found(&self, position: u32) -> BufferId {
        self.guests[position as usize].expect("queries that it has").found
    }

    /// Shards from `position` on, as far as its part of the tree of `owner` reaches, whose keys those queries see.
    fn seen_from(&self, owner: u32, position: u32) -> impl Iterator<Item = u32> {
        seen_from(self.ring, owner, position, |owner, shard| self.builder.sees(owner, shard))
    }

    fn goes_down(&self, owner: u32, position: u32) -> bool {
        self.seen_from(owner, position).next().is_some()
    }

    /// The keys that the queries of `owner` meet there.
    fn met_from(&self, owner: u32, position: u32) -> TokenRuns {
        let mut met = TokenRuns::default();
        for shard in self.seen_from(owner, position) {
            met.extend(&self.builder.world.kv_placement.of_shard(shard));
        }
        met
    }
}

/// Shards from `position` on, as far as its part of the tree of `owner` reaches, of which `sees` says so.
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

/// Of every edge of every tree along which queries travel, those queries.
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
