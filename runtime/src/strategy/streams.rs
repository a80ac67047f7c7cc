//! Rounds in which keys and values travel from neighbour to neighbour, and queries stay.
//!
//! A *stream* is a part of every shard that travels in one direction. It travels until no further shard sees any of it:
//! keys that a mask hides from all further shards are not sent to them. A hop is posted before the present blocks are
//! attended, so that the next blocks travel during the computation: of each stream one block is read and sent while the
//! next one arrives.

use std::ops::Range;

use super::build::{Inputs, PlanBuilder};
use super::price::Traffic;
use crate::plan::{BufferId, Recv, Send, Slice};
use crate::{AttentionProblem, Placement, TokenRuns, lower};

/// A stream as a strategy describes it.
#[derive(Debug)]
pub(super) struct StreamShape {
    /// The part of a shard that travels.
    pub(super) part: Part,
    /// Whether it travels to higher shards, and from the last shard to the first.
    pub(super) forwards: bool,
    /// Largest number of hops of the part of a shard. Arguments: the farthest hop R − 1, and the shard.
    pub(super) most_hops: fn(u32, u32) -> u32,
}

/// A part of a shard, by position in its list of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Whole,
    /// Its first ⌈n/2⌉ tokens: the front chunk of a zigzag placement.
    Front,
    /// The other tokens.
    Back,
}

/// The streams of a world.
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
    pub(super) fn of(self, tokens: usize) -> Range<usize> {
        match self {
            Self::Whole => 0..tokens,
            Self::Front => 0..tokens.div_ceil(2),
            Self::Back => tokens.div_ceil(2)..tokens,
        }
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

    /// The shard from which stream `stream` has brought keys to shard `shard` after `hops` hops, if it brings any so far.
    pub(super) fn owner(&self, stream: usize, shard: u32, hops: u32) -> Option<u32> {
        let Stream { forwards, reach, .. } = &self.streams[stream];
        let ring = u32::try_from(reach.len()).expect("shards are counted in u32");
        let owner = passed(ring, !forwards, shard, hops);
        (hops <= reach[owner as usize]).then_some(owner)
    }

    /// The shard to which stream `stream` has brought keys of shard `owner` after `hops` hops, if they go so far.
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

    /// Uses a block that arrived in a stream from the shard at this distance; it is freed afterwards.
    fn arrived(&mut self, builder: &mut PlanBuilder<'_>, stream: usize, distance: u32, kv: BufferId);

    /// The blocks from shards at this distance have been used, and those at the next distance have arrived.
    fn used(&mut self, builder: &mut PlanBuilder<'_>, distance: u32);
}

/// A block of a stream on a rank, which may have to send it on.
struct Held {
    slice: Slice,
    /// The buffer to use and to free; none for the rank's own keys.
    arrived: Option<BufferId>,
}

/// Attention of the queries against the keys and values of every shard; `inputs.kv` holds those of this rank. Frees all
/// inputs, returns the running state.
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

/// Keys and values travel along all streams, and `visitor` uses them on the way; `kv` holds those of this rank, and is freed.
pub(super) fn travel(
    builder: &mut PlanBuilder<'_>,
    routes: &Routes,
    kv: BufferId,
    visitor: &mut impl Visitor,
) {
    let mesh = builder.world.mesh;
    let (ring, (r, u)) = (mesh.ring(), mesh.coordinates(builder.rank));
    let kv_heads = builder.buffer(kv).heads.clone();
    let mut packed = Vec::new();
    let own = builder.own_keys(kv).tokens;
    let mut held: Vec<Option<Held>> = Vec::new();
    for stream in &routes.streams {
        let goes = stream.reach[r as usize] > 0;
        // A part that travels both ways is converted once.
        let same = routes.streams.iter().zip(&held).filter(|(other, _)| other.part == stream.part);
        let made = { same }.find_map(|(_, held)| held.as_ref().map(|held| held.slice.clone()));
        held.push(goes.then(|| {
            let slice = made.unwrap_or_else(|| {
                let part = stream.part.of(own.len());
                let slice = builder.tokens_of(kv, own.start + part.start..own.start + part.end);
                builder.for_the_wire(slice, &mut packed)
            });
            Held { slice, arrived: None }
        }));
    }
    for hop in 1..=routes.hops() {
        let mut sends: Vec<Send> = Vec::new();
        let mut recvs: Vec<Recv> = Vec::new();
        let mut arriving = Vec::new();
        for (stream, held) in routes.streams.iter().zip(&held) {
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
            arriving.push((hop <= stream.reach[owner as usize]).then(|| {
                let shard = builder.world.kv_placement.of_shard(owner);
                let part = shard.slice(stream.part.of(shard.len()));
                let buffer = builder.arrival(owner, part, kv_heads.clone());
                let from = neighbour(!stream.forwards);
                match recvs.iter_mut().find(|recv| recv.from == from) {
                    Some(recv) => recv.parts.push(buffer),
                    None => recvs.push(Recv { from, parts: vec![buffer] }),
                }
                buffer
            }));
        }
        let exchange = builder.exchange(sends, recvs);
        use_held(builder, &held, hop - 1, visitor);
        builder.wait(exchange);
        end_held(builder, held, &mut packed);
        if hop == 1 {
            builder.free(kv);
        }
        visitor.used(builder, hop - 1);
        held = arriving
            .into_iter()
            .map(|arrived| {
                let buffer = arrived?;
                Some(Held { slice: builder.whole(buffer), arrived })
            })
            .collect();
    }
    use_held(builder, &held, routes.hops(), visitor);
    end_held(builder, held, &mut packed);
    if routes.hops() == 0 {
        builder.free(kv);
    }
    visitor.used(builder, routes.hops());
}

/// Uses the blocks from shards at this distance: at distance 0 the rank's own keys.
fn use_held(builder: &mut PlanBuilder<'_>, held: &[Option<Held>], distance: u32, visitor: &mut impl Visitor) {
    if distance == 0 {
        visitor.own(builder);
    }
    for (stream, held) in held.iter().enumerate() {
        if let Some(kv) = held.as_ref().and_then(|held| held.arrived) {
            visitor.arrived(builder, stream, distance, kv);
        }
    }
}

fn end_held(builder: &mut PlanBuilder<'_>, held: Vec<Option<Held>>, packed: &mut Vec<BufferId>) {
    let arrived = held.into_iter().flatten().filter_map(|held| held.arrived);
    for buffer in packed.drain(..).chain(arrived) {
        builder.free(buffer);
    }
}
