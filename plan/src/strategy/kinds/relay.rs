//! Keys and values travel round the shards, and each KV head crosses between two shards only once.
//!
//! After the all-to-all, ranks of a shard whose query heads need the same KV heads, a *group*, hold
//! the same keys and values. In a plain ring each rank of a group sends all of them. Here each rank
//! sends one *piece* of every block, a share of its tokens, to the rank at the same position of the
//! next shard, and the group exchanges the arrived pieces. With U ranks in a shard and Hkv < U KV
//! heads a slow link between shards carries Hkv/U of the bytes, as evenly as before.
//!
//! Both transfers overlap with computation: while a block is attended, the pieces of the next block
//! travel inside the group, and the piece of the block after it between the shards. A rank attends
//! to its own keys in two halves, so that it computes while the first block travels too. Pieces are
//! joined before they are attended: with few KV heads a copy of a block costs less than reading and
//! writing the running state for each piece.
//!
//! The ranks of a group need exactly the same KV heads. Where the heads of two ranks overlap only
//! in part, as with 3 KV heads over 4 ranks, the common heads still cross more than once. A rank
//! that is alone in its group sends whole blocks.

use std::ops::Range;

use super::unified;
use crate::mesh::{Mesh, kv_heads_for};
use crate::plan::{BufferId, Content, Recv, Send, Slice};
use crate::problem::AttentionProblem;
use crate::strategy::build::{Inputs, PlanBuilder};
use crate::strategy::facts::{Extent, MeshRule, StrategyFacts};
use crate::strategy::price::Traffic;
use crate::strategy::streams;
use crate::strategy::streams::Routes;

pub(in crate::strategy) const FACTS: StrategyFacts = StrategyFacts {
    meshes: MeshRule { ulysses: Extent::AtLeastTwo, ring: Extent::AtLeastTwo },
    default_on: None,
    is_distinct: |problem, mesh| mesh.fits(problem).is_err() || !all_alone(problem, mesh),
    attend_round,
    backward_round: None,
    round_bytes,
    ..unified::FACTS
};

/// Whether no two ranks of a shard need the same KV heads: then this is unified.
fn all_alone(problem: &AttentionProblem, mesh: Mesh) -> bool {
    mesh.kv_groups(problem).iter().all(|group| group.len() == 1)
}

/// The round of a plan set, for one rank.
struct Relay<'a, 'b> {
    builder: &'a mut PlanBuilder<'b>,
    routes: &'a Routes,
    /// Positions in the shard of the ranks with the same KV heads; this rank is one of them.
    group: Range<u32>,
    heads: Range<u32>,
}

/// This rank's piece of a block.
#[derive(Default)]
struct Piece {
    /// The piece as it is sent; none if the block does not reach this shard, or the piece is empty.
    slice: Option<Slice>,
    /// The buffer in which the piece arrived; none for the rank's own keys.
    arrived: Option<BufferId>,
}

/// Attention of the queries against the keys and values of every shard; `inputs.kv` holds those of
/// this rank. Frees all inputs, returns the running state.
fn attend_round(builder: &mut PlanBuilder<'_>, routes: &Routes, inputs: Inputs) -> BufferId {
    let mesh = builder.set.mesh;
    let groups = mesh.kv_groups(&builder.set.problem);
    if routes.hops() == 0 || all_alone(&builder.set.problem, mesh) {
        return streams::attend_round(builder, routes, inputs);
    }
    let (ring, (r, u)) = (mesh.ring(), mesh.coordinates(builder.rank));
    let group = groups.into_iter().find(|group| group.contains(&u)).expect("every rank is in a group");
    let heads = builder.buffer(inputs.kv).heads.clone();
    let state = builder.state(inputs.q);
    let [front, back] = builder.halves(inputs.kv);
    let mut relay = Relay { builder, routes, group, heads };
    let mut made = Vec::new();
    let own = relay.own_piece(inputs.kv, &mut made);
    let (mut piece, between) = relay.send_on(0, r, &own);
    relay.builder.attend_part(inputs, front, state);
    relay.builder.wait(between);
    made.into_iter().for_each(|buffer| relay.builder.free(buffer));
    let mut block = None;
    for hop in 1..=routes.hops() {
        let owner = (r + ring - hop) % ring;
        let (next, between) = relay.send_on(hop, owner, &piece);
        let (others, inside) = relay.share(owner, &piece);
        if hop == 1 {
            relay.builder.attend_part(inputs, back.clone(), state);
            relay.builder.free(inputs.kv);
        }
        relay.attend_block(inputs, block, state);
        relay.builder.wait(inside);
        relay.builder.wait(between);
        block = relay.put_together(owner, &piece, others);
        piece = next;
    }
    relay.attend_block(inputs, block, state);
    builder.end_queries(inputs);
    state
}

impl Relay<'_, '_> {
    /// The piece of the rank's own keys, in wire format.
    fn own_piece(&mut self, kv: BufferId, made: &mut Vec<BufferId>) -> Piece {
        let (r, u) = self.builder.set.mesh.coordinates(self.builder.rank);
        let first = self.builder.replicated();
        let tokens = self.tokens(r, u);
        let goes = self.routes.reach(r) > 0 && !tokens.is_empty();
        let slice = goes.then(|| {
            let slice = self.builder.tokens_of(kv, first + tokens.start..first + tokens.end);
            self.builder.for_the_wire(slice, made)
        });
        Piece { slice, arrived: None }
    }

    /// Posts the hop of a block that has made `hop` hops from this shard to the next, and the
    /// arrival of the block after it.
    fn send_on(&mut self, hop: u32, owner: u32, piece: &Piece) -> (Piece, Option<u32>) {
        if hop == self.routes.hops() {
            return (Piece::default(), None);
        }
        let mesh = self.builder.set.mesh;
        let (ring, (r, u)) = (mesh.ring(), mesh.coordinates(self.builder.rank));
        let goes_on = piece.slice.clone().filter(|_| hop < self.routes.reach(owner));
        let send = goes_on.map(|slice| Send { to: mesh.rank((r + 1) % ring, u).0, parts: vec![slice] });
        let behind = (owner + ring - 1) % ring;
        let arrived = (hop < self.routes.reach(behind)).then(|| self.arrival(behind, u)).flatten();
        let from = mesh.rank((r + ring - 1) % ring, u).0;
        let recv = arrived.map(|buffer| Recv { from, parts: vec![buffer] });
        let exchange = self.builder.exchange(send.into_iter().collect(), recv.into_iter().collect());
        (Piece { slice: arrived.map(|buffer| self.builder.whole(buffer)), arrived }, exchange)
    }

    /// Posts the exchange of pieces of a block inside the group, if this shard sees any of it.
    /// Returns the buffers that arrive, each with the position of its rank in the shard, and the
    /// exchange.
    fn share(&mut self, owner: u32, piece: &Piece) -> (Vec<(u32, BufferId)>, Option<u32>) {
        let mesh = self.builder.set.mesh;
        let (r, u) = mesh.coordinates(self.builder.rank);
        let (mut sends, mut recvs, mut others) = (Vec::new(), Vec::new(), Vec::new());
        if self.builder.sees(r, owner) {
            // Nearest successor first, so that no two ranks send to the same peer at once.
            for peer_u in (u + 1..self.group.end).chain(self.group.start..u) {
                let peer = mesh.rank(r, peer_u).0;
                sends.extend(piece.slice.clone().map(|slice| Send { to: peer, parts: vec![slice] }));
                if let Some(buffer) = self.arrival(owner, peer_u) {
                    recvs.push(Recv { from: peer, parts: vec![buffer] });
                    others.push((peer_u, buffer));
                }
            }
        }
        (others, self.builder.exchange(sends, recvs))
    }

    /// The block of `owner`, if this shard sees any of it; frees its pieces. A block of one piece
    /// is that piece.
    fn put_together(
        &mut self,
        owner: u32,
        piece: &Piece,
        mut pieces: Vec<(u32, BufferId)>,
    ) -> Option<BufferId> {
        let (r, u) = self.builder.set.mesh.coordinates(self.builder.rank);
        if !self.builder.sees(r, owner) {
            piece.arrived.into_iter().for_each(|buffer| self.builder.free(buffer));
            return None;
        }
        pieces.extend(piece.arrived.map(|buffer| (u, buffer)));
        if let [(_, only)] = pieces[..] {
            return Some(only);
        }
        let tokens = self.builder.set.kv_placement.of_shard(owner);
        let name = format!("all kv of shard {owner}");
        let block = self.builder.declare(name, Content::KeyValue, tokens, self.heads.clone());
        for (from, buffer) in pieces {
            let into = self.builder.tokens_of(block, self.tokens(owner, from));
            let stored = self.builder.stored(buffer);
            self.builder.unpack(stored, into);
        }
        Some(block)
    }

    /// Attends to a block and frees it.
    fn attend_block(&mut self, inputs: Inputs, block: Option<BufferId>, state: BufferId) {
        if let Some(block) = block {
            self.builder.attend_arrived(inputs, block, state);
            self.builder.free(block);
        }
    }

    /// The piece that rank `u` of a shard has of the block of `owner`, to be received; none where
    /// it is empty.
    fn arrival(&mut self, owner: u32, u: u32) -> Option<BufferId> {
        let tokens = self.tokens(owner, u);
        let piece = self.builder.set.kv_placement.of_shard(owner).slice(tokens);
        (!piece.is_empty()).then(|| self.builder.arrival(owner, piece, self.heads.clone()))
    }

    /// The positions of the piece of rank `u` of the group in the token list of the block of
    /// `owner`.
    fn tokens(&self, owner: u32, u: u32) -> Range<usize> {
        let set = self.builder.set;
        let block = set.kv_placement.of_shard(owner);
        piece(block.len(), (u - self.group.start) as usize, self.group.len())
    }
}

/// List positions of piece `index` of `count` of a block of `tokens` tokens: sizes differ by at
/// most one, larger first.
fn piece(tokens: usize, index: usize, count: usize) -> Range<usize> {
    let cut = |index: usize| tokens / count * index + index.min(tokens % count);
    cut(index)..cut(index + 1)
}

/// Bytes of the pieces that cross between shards, and of their copies inside the shards that see
/// them.
fn round_bytes(traffic: &Traffic<'_>, routes: &Routes) -> u128 {
    let Traffic { problem, kv, .. } = *traffic;
    let mesh = kv.mesh();
    let q_heads = mesh.q_heads(problem);
    let of_group = |group: Range<u32>| -> u128 {
        let kv_heads = kv_heads_for(problem, &q_heads[group.start as usize]).len();
        let sent = |owner: u32| -> u128 {
            let tokens = kv.of_shard(owner).len();
            let pieces = (0..group.len()).map(|index| piece(tokens, index, group.len()).len());
            pieces.map(|tokens| traffic.key_bytes_of(tokens, kv_heads)).sum()
        };
        let between =
            (0..mesh.ring()).map(|owner| u128::from(routes.reach(owner)) * sent(owner)).sum::<u128>();
        let passed_on = traffic.visits().map(|(_, owner)| sent(owner)).sum::<u128>();
        between + passed_on * (group.len() as u128 - 1)
    };
    mesh.kv_groups(problem).into_iter().map(of_group).sum()
}
