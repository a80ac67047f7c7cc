//! Rounds in which keys and values travel from neighbour to neighbour, and queries stay.
//!
//! A *stream* is a part of every shard that travels in one direction. It travels until no further
//! shard sees any of it: keys that a mask hides from all further shards are not sent to them. A hop
//! is posted before the present blocks are attended, so that the next blocks travel during the
//! computation: of each stream one block is read and sent while the next one arrives.
//!
//! The hop of a stream shares its exchange with at most one stream of the other direction. Streams
//! of one direction have exchanges of their own: a block is sent on and attended as soon as it has
//! arrived, while the blocks of the others travel.

use std::ops::Range;

use super::build::{Inputs, PlanBuilder};
use super::price::Traffic;
use crate::lower;
use crate::placement::Placement;
use crate::plan::{BufferId, Recv, Send, Slice};
use crate::problem::AttentionProblem;
use crate::tokens::TokenRuns;

/// A stream as a strategy describes it.
#[derive(Debug)]
pub(super) struct StreamShape {
    /// The part of a shard that travels.
    pub(super) part: Part,
    /// Whether it travels to higher shards, and from the last shard to the first.
    pub(super) forwards: bool,
    /// Largest number of hops of the part of a shard. Arguments: the farthest hop R − 1, and the
    /// shard.
    pub(super) most_hops: fn(u32, u32) -> u32,
}

/// One of the equal parts of a shard, by position in its list of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    number: usize,
    /// The number of parts of a shard.
    of: usize,
}

/// The streams of a plan set.
#[derive(Debug, Default)]
pub(super) struct Routes {
    streams: Vec<Stream>,
}

#[derive(Debug)]
struct Stream {
    part: Part,
    forwards: bool,
    /// For each shard, the number of hops of its part.
    reach: Vec<u32>,
}

impl Part {
    pub(super) const WHOLE: Self = Self::new(0, 1);
    /// The first ⌈n/2⌉ tokens: the front chunk of a zigzag placement.
    pub(super) const FRONT: Self = Self::new(0, 2);
    /// The other tokens.
    pub(super) const BACK: Self = Self::new(1, 2);

    /// Part `number` of `of`.
    pub(super) const fn new(number: usize, of: usize) -> Self {
        assert!(number < of);
        Self { number, of }
    }

    /// The number of parts of a shard.
    pub(super) fn count(self) -> usize {
        self.of
    }

    /// Its positions in a list of `tokens`.
    pub(super) fn of(self, tokens: usize) -> Range<usize> {
        let start = |number: usize| (tokens * number).div_ceil(self.of);
        start(self.number)..start(self.number + 1)
    }
}

impl Routes {
    /// Computes the number of hops of each shard in each stream of `shapes`.
    pub(super) fn new(
        shapes: &[StreamShape],
        problem: &AttentionProblem,
        q: &Placement,
        kv: &Placement,
    ) -> Self {
        let ring = kv.mesh().ring();
        let queries: Vec<TokenRuns> = (0..ring).map(|r| q.of_shard(r)).collect();
        let keys: Vec<TokenRuns> = (0..ring).map(|r| kv.of_shard(r)).collect();
        let stream = |shape: &StreamShape| {
            let StreamShape { part, forwards, most_hops } = *shape;
            let reach = |owner: u32| {
                let shard = &keys[owner as usize];
                let part = shard.slice(part.of(shard.len()));
                let sees = |hops: &u32| {
                    let there = &queries[passed(ring, forwards, owner, *hops) as usize];
                    lower::any_visible(problem, there, &part)
                };
                (1..=most_hops(ring - 1, owner)).rev().find(sees).filter(|_| !part.is_empty()).unwrap_or(0)
            };
            Stream { part, forwards, reach: (0..ring).map(reach).collect() }
        };
        Self { streams: shapes.iter().map(stream).collect() }
    }

    /// For each part of a shard that travels: its hops, and its tokens.
    fn parts_sent(&self, kv: &Placement) -> impl Iterator<Item = (u32, usize)> {
        self.streams.iter().flat_map(move |stream| {
            let tokens = move |owner| stream.part.of(kv.of_shard(owner).len()).len();
            (0..).zip(&stream.reach).map(move |(owner, hops)| (*hops, tokens(owner)))
        })
    }

    /// Hops of the keys of shard `owner`, for strategies that send whole shards in one direction.
    pub(super) fn reach(&self, owner: u32) -> u32 {
        self.streams[0].reach[owner as usize]
    }

    /// The part of each shard that stream `stream` carries.
    pub(super) fn part(&self, stream: usize) -> Part {
        self.streams[stream].part
    }

    /// The shard from which stream `stream` has brought keys to shard `shard` after `hops` hops, if
    /// it brings any so far.
    pub(super) fn owner(&self, stream: usize, shard: u32, hops: u32) -> Option<u32> {
        let Stream { forwards, reach, .. } = &self.streams[stream];
        let ring = u32::try_from(reach.len()).expect("shards are counted in u32");
        let owner = passed(ring, !forwards, shard, hops);
        (hops <= reach[owner as usize]).then_some(owner)
    }

    /// The streams in groups: those of a group share the exchange of a hop.
    fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for (stream, shape) in self.streams.iter().enumerate() {
            let alike =
                self.streams[..stream].iter().filter(|other| other.forwards == shape.forwards).count();
            match groups.get_mut(alike) {
                Some(group) => group.push(stream),
                None => groups.push(vec![stream]),
            }
        }
        groups
    }

    /// The shard to which stream `stream` has brought keys of shard `owner` after `hops` hops, if
    /// they go so far.
    pub(super) fn reader(&self, stream: usize, owner: u32, hops: u32) -> Option<u32> {
        let Stream { forwards, reach, .. } = &self.streams[stream];
        let ring = u32::try_from(reach.len()).expect("shards are counted in u32");
        (hops <= reach[owner as usize]).then(|| passed(ring, *forwards, owner, hops))
    }

    /// Number of streams.
    pub(super) fn len(&self) -> usize {
        self.streams.len()
    }

    /// Hops of the part that goes farthest.
    pub(super) fn hops(&self) -> u32 {
        self.streams.iter().flat_map(|stream| &stream.reach).copied().max().unwrap_or(0)
    }
}

/// The shard that is `hops` hops from `owner` in a stream.
fn passed(ring: u32, forwards: bool, owner: u32, hops: u32) -> u32 {
    if forwards { (owner + hops) % ring } else { (owner + ring - hops) % ring }
}

/// Payload in bytes that all ranks together send in the round.
pub(super) fn round_bytes(traffic: &Traffic<'_>, routes: &Routes) -> u128 {
    routes.parts_sent(traffic.kv).map(|(hops, tokens)| u128::from(hops) * traffic.key_bytes(tokens)).sum()
}

/// What a rank does with the keys that it holds.
pub(super) trait Visitor {
    /// Uses the rank's own keys.
    fn own(&mut self, builder: &mut PlanBuilder<'_>);

    /// Uses a block that arrived in a stream from the shard at this distance; it is freed
    /// afterwards.
    fn arrived(&mut self, builder: &mut PlanBuilder<'_>, stream: usize, distance: u32, kv: BufferId);

    /// The blocks from shards at this distance have been used, and those at the next distance have
    /// begun to arrive.
    fn used(&mut self, builder: &mut PlanBuilder<'_>, distance: u32);
}

/// Attention of the queries against the keys and values of every shard; `inputs.kv` holds those of
/// this rank. Frees all inputs, returns the running state.
pub(super) fn attend_round(builder: &mut PlanBuilder<'_>, routes: &Routes, inputs: Inputs) -> BufferId {
    let state = builder.state(inputs.q);
    travel(builder, routes, inputs.kv, &mut Attending { inputs, state });
    builder.end_queries(inputs);
    state
}

/// The visitor of a forward pass.
pub(super) struct Attending {
    pub(super) inputs: Inputs,
    pub(super) state: BufferId,
}

impl Visitor for Attending {
    fn own(&mut self, builder: &mut PlanBuilder<'_>) {
        builder.attend(self.inputs, self.state);
    }

    fn arrived(&mut self, builder: &mut PlanBuilder<'_>, _: usize, _: u32, kv: BufferId) {
        builder.attend_arrived(self.inputs, kv, self.state);
    }

    fn used(&mut self, _: &mut PlanBuilder<'_>, _: u32) {}
}

/// Keys and values travel along all streams, and `visitor` uses them on the way; `kv` holds those
/// of this rank, and is freed.
pub(super) fn travel(
    builder: &mut PlanBuilder<'_>,
    routes: &Routes,
    kv: BufferId,
    visitor: &mut impl Visitor,
) {
    let mut packed = Vec::new();
    let mut own = own_blocks(builder, routes, kv, &mut packed);
    let kv_heads = builder.buffer(kv).heads.clone();
    let group = |streams: Vec<usize>| {
        let held = streams.iter().map(|stream| own[*stream].take()).collect();
        Group { routes, kv_heads: kv_heads.clone(), streams, held, arriving: Vec::new(), exchange: None }
    };
    let mut groups: Vec<Group<'_>> = routes.groups().into_iter().map(group).collect();
    groups.iter_mut().for_each(|group| group.post(builder, 1));
    visitor.own(builder);
    for distance in 1..=routes.hops() {
        let last = groups.len() - 1;
        for (place, group) in groups.iter_mut().enumerate() {
            group.wait(builder);
            if distance == 1 && place == last {
                packed.drain(..).for_each(|buffer| builder.free(buffer));
                builder.free(kv);
            }
            if place == 0 {
                visitor.used(builder, distance - 1);
            }
            group.post(builder, distance + 1);
            group.visit(builder, distance, visitor);
        }
    }
    if routes.hops() == 0 {
        builder.free(kv);
    }
    visitor.used(builder, routes.hops());
}

/// The parts of this rank's keys that travel, for each stream. New buffers for them are added to
/// `packed`.
fn own_blocks(
    builder: &mut PlanBuilder<'_>,
    routes: &Routes,
    kv: BufferId,
    packed: &mut Vec<BufferId>,
) -> Vec<Option<Block>> {
    let (r, _) = builder.set.mesh.coordinates(builder.rank);
    let own = builder.own_keys(kv).tokens;
    let mut blocks: Vec<Option<Block>> = Vec::new();
    for stream in &routes.streams {
        let goes = stream.reach[r as usize] > 0;
        // A part that travels both ways is converted once.
        let same = routes.streams.iter().zip(&blocks).filter(|(other, _)| other.part == stream.part);
        let made = { same }.find_map(|(_, block)| block.as_ref().map(|block| block.slice.clone()));
        blocks.push(goes.then(|| {
            let slice = made.unwrap_or_else(|| {
                let part = stream.part.of(own.len());
                let slice = builder.tokens_of(kv, own.start + part.start..own.start + part.end);
                builder.for_the_wire(slice, packed)
            });
            Block { slice, arrived: None }
        }));
    }
    blocks
}

/// A block of a stream on a rank, which may have to send it on.
struct Block {
    slice: Slice,
    /// The buffer to use and to free; none for the rank's own keys.
    arrived: Option<BufferId>,
}

/// Streams that share the exchange of a hop, on one rank.
struct Group<'r> {
    routes: &'r Routes,
    kv_heads: Range<u32>,
    streams: Vec<usize>,
    /// The present block of each stream.
    held: Vec<Option<Block>>,
    /// The next one.
    arriving: Vec<Option<BufferId>>,
    /// The exchange that is under way.
    exchange: Option<u32>,
}

impl Group<'_> {
    /// Sends the present blocks on, and expects the next ones.
    fn post(&mut self, builder: &mut PlanBuilder<'_>, hop: u32) {
        if hop > self.routes.hops() {
            return;
        }
        let mesh = builder.set.mesh;
        let (ring, (r, u)) = (mesh.ring(), mesh.coordinates(builder.rank));
        let mut sends: Vec<Send> = Vec::new();
        let mut recvs: Vec<Recv> = Vec::new();
        for (stream, held) in self.streams.iter().zip(&self.held) {
            let stream = &self.routes.streams[*stream];
            let at = |hops: u32| passed(ring, !stream.forwards, r, hops);
            let neighbour = |forwards| mesh.rank(passed(ring, forwards, r, 1), u).0;
            let goes_on = hop <= stream.reach[at(hop - 1) as usize];
            if let Some(held) = held.as_ref().filter(|_| goes_on) {
                let to = neighbour(stream.forwards);
                // If both neighbours are the same rank, that rank gets one message.
                match sends.iter_mut().find(|send| send.to == to) {
                    Some(send) => send.parts.push(held.slice.clone()),
                    None => sends.push(Send { to, parts: vec![held.slice.clone()] }),
                }
            }
            let owner = at(hop);
            self.arriving.push((hop <= stream.reach[owner as usize]).then(|| {
                let shard = builder.set.kv_placement.of_shard(owner);
                let part = shard.slice(stream.part.of(shard.len()));
                let buffer = builder.arrival(owner, part, self.kv_heads.clone());
                let from = neighbour(!stream.forwards);
                match recvs.iter_mut().find(|recv| recv.from == from) {
                    Some(recv) => recv.parts.push(buffer),
                    None => recvs.push(Recv { from, parts: vec![buffer] }),
                }
                buffer
            }));
        }
        self.exchange = builder.exchange(sends, recvs);
    }

    /// Waits for the next blocks, and frees the present ones, which have left.
    fn wait(&mut self, builder: &mut PlanBuilder<'_>) {
        builder.wait(self.exchange.take());
        self.end(builder);
        let arrived = |arrived: Option<BufferId>| {
            arrived.map(|buffer| Block { slice: builder.whole(buffer), arrived: Some(buffer) })
        };
        self.held = self.arriving.drain(..).map(arrived).collect();
    }

    /// Uses the present blocks, from shards at this distance, and frees them unless they still
    /// travel.
    fn visit(&mut self, builder: &mut PlanBuilder<'_>, distance: u32, visitor: &mut impl Visitor) {
        for (stream, held) in self.streams.iter().zip(&self.held) {
            if let Some(kv) = held.as_ref().and_then(|held| held.arrived) {
                visitor.arrived(builder, *stream, distance, kv);
            }
        }
        if self.exchange.is_none() {
            self.end(builder);
        }
    }

    fn end(&mut self, builder: &mut PlanBuilder<'_>) {
        let arrived = self.held.drain(..).flatten().filter_map(|held| held.arrived);
        arrived.for_each(|buffer| builder.free(buffer));
    }
}
