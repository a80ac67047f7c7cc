//! Keys and values go round the shards, queries stay (Liu et al. 2023, arXiv 2310.01889), one way or both.
//!
//! A *stream* is a part of every shard that travels in one direction, from neighbour to neighbour, as far as anybody is
//! left who sees any of it: what a mask hides from all that are still to come is not sent on. A hop is posted before
//! what is here is computed, so that the next blocks travel under the computation: of each stream one block is read
//! and sent on while the next one arrives.
//!
//! | strategy | streams |
//! |---|---|
//! | ring | whole shards, forwards; likewise [`relay`](super::relay), in pieces |
//! | bidirectional | whole shards, half of the way forwards, the rest backwards: half the hops |
//! | two-way | the front halves of all shards forwards, the back halves backwards: half the bytes each way. Over a zigzag placement a causal mask hides every back half from all higher shards, and 75 % of a ring's bytes are left |
//! | line | whole shards, to the last shard forwards and to the first one backwards: no link closes the ring |

use std::ops::Range;

use super::Strategy;
use super::build::{Inputs, PlanBuilder};
use crate::plan::{BufferId, Recv, Send, Slice};
use crate::{AttentionProblem, Placement, TokenRuns, lower};

/// The streams of a world.
#[derive(Debug, Default)]
pub(super) struct Routes {
    streams: Vec<Stream>,
}

#[derive(Debug)]
struct Stream {
    part: Part,
    forwards: bool,
    /// For each shard, how many hops its part goes.
    reach: Vec<u32>,
}

/// Which part of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Whole,
    /// Its first ⌈n/2⌉ tokens: the front chunk of a zigzag placement.
    Front,
    Back,
}

impl Part {
    fn of(self, tokens: usize) -> Range<usize> {
        match self {
            Self::Whole => 0..tokens,
            Self::Front => 0..tokens.div_ceil(2),
            Self::Back => tokens.div_ceil(2)..tokens,
        }
    }
}

impl Routes {
    /// The streams by which `strategy` moves keys; none where it does not move them from neighbour to neighbour.
    pub(super) fn new(strategy: Strategy, problem: &AttentionProblem, q: &Placement, kv: &Placement) -> Self {
        let ring = kv.mesh().ring();
        let farthest = ring - 1;
        type Limit = fn(u32, u32) -> u32;
        let streams: Vec<(Part, bool, Limit)> = match strategy {
            Strategy::Dense | Strategy::Ulysses | Strategy::Gather | Strategy::PassQ | Strategy::Tree => {
                Vec::new()
            }
            Strategy::Ring | Strategy::Unified | Strategy::Chunked | Strategy::Relay => {
                vec![(Part::Whole, true, |farthest, _| farthest)]
            }
            Strategy::Bidirectional => vec![
                (Part::Whole, true, |farthest, _| farthest.div_ceil(2)),
                (Part::Whole, false, |farthest, _| farthest / 2),
            ],
            Strategy::TwoWay => {
                vec![(Part::Front, true, |farthest, _| farthest), (Part::Back, false, |farthest, _| farthest)]
            }
            Strategy::Line => vec![
                (Part::Whole, true, |farthest, owner| farthest - owner),
                (Part::Whole, false, |_, owner| owner),
            ],
        };
        let queries: Vec<TokenRuns> = (0..ring).map(|r| q.of_shard(r)).collect();
        let keys: Vec<TokenRuns> = (0..ring).map(|r| kv.of_shard(r)).collect();
        let stream = |(part, forwards, limit): (Part, bool, Limit)| {
            let reach = |owner: u32| {
                let shard = &keys[owner as usize];
                let part = shard.slice(part.of(shard.len()));
                let sees = |hops: &u32| {
                    let there = &queries[passed(ring, forwards, owner, *hops) as usize];
                    lower::any_visible(problem, there, &part)
                };
                let limit = limit(farthest, owner);
                (1..=limit).rev().find(sees).filter(|_| !part.is_empty()).unwrap_or(0)
            };
            Stream { part, forwards, reach: (0..ring).map(reach).collect() }
        };
        Self { streams: streams.into_iter().map(stream).collect() }
    }

    /// For each part of a shard that travels, how many hops it goes and of how many tokens it is.
    pub(super) fn parts_sent(&self, kv: &Placement) -> impl Iterator<Item = (u32, usize)> {
        self.streams.iter().flat_map(move |stream| {
            let tokens = move |owner| stream.part.of(kv.of_shard(owner).len()).len();
            (0..).zip(&stream.reach).map(move |(owner, hops)| (*hops, tokens(owner)))
        })
    }

    /// How many hops the keys of shard `owner` go, where whole shards go one way.
    pub(super) fn reach(&self, owner: u32) -> u32 {
        self.streams[0].reach[owner as usize]
    }

    /// Hops until every part is where it ends.
    pub(super) fn hops(&self) -> u32 {
        self.streams.iter().flat_map(|stream| &stream.reach).copied().max().unwrap_or(0)
    }
}

/// The shard that is `hops` hops from `owner` in a stream.
fn passed(ring: u32, forwards: bool, owner: u32, hops: u32) -> u32 {
    if forwards { (owner + hops) % ring } else { (owner + ring - hops) % ring }
}

/// What a rank holds of a stream, and may have to send on.
struct Held {
    slice: Slice,
    /// A buffer to attend to and to free; of the rank's own keys there is none.
    arrived: Option<BufferId>,
}

/// Attention of the queries against the keys and values of every shard, of which `inputs.kv` is this rank's. Ends all
/// inputs, returns the running state.
pub(super) fn attend_round(builder: &mut PlanBuilder<'_>, routes: &Routes, inputs: Inputs) -> BufferId {
    let mesh = builder.world.mesh;
    let (ring, (r, u)) = (mesh.ring(), mesh.coordinates(builder.rank));
    let kv_heads = builder.buffer(inputs.kv).heads.clone();
    let state = builder.state(inputs.q);
    let mut packed = Vec::new();
    let own = builder.own_keys(inputs.kv).tokens;
    let mut held: Vec<Option<Held>> = Vec::new();
    for stream in &routes.streams {
        let goes = stream.reach[r as usize] > 0;
        // What goes both ways is made for the wire once.
        let same = routes.streams.iter().zip(&held).filter(|(other, _)| other.part == stream.part);
        let made = { same }.find_map(|(_, held)| held.as_ref().map(|held| held.slice.clone()));
        held.push(goes.then(|| {
            let slice = made.unwrap_or_else(|| {
                let part = stream.part.of(own.len());
                let slice = builder.tokens_of(inputs.kv, own.start + part.start..own.start + part.end);
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
                // Where both neighbours are one rank, it gets one message.
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
        attend_held(builder, &held, inputs, hop == 1, state);
        builder.wait(exchange);
        end_held(builder, held, &mut packed);
        if hop == 1 {
            builder.free(inputs.kv);
        }
        held = arriving
            .into_iter()
            .map(|arrived| {
                let buffer = arrived?;
                Some(Held { slice: builder.whole(buffer), arrived })
            })
            .collect();
    }
    attend_held(builder, &held, inputs, routes.hops() == 0, state);
    end_held(builder, held, &mut packed);
    if routes.hops() == 0 {
        builder.free(inputs.kv);
    }
    builder.end_queries(inputs);
    state
}

/// Attends to what has arrived, and the first time to the rank's own keys.
fn attend_held(
    builder: &mut PlanBuilder<'_>,
    held: &[Option<Held>],
    inputs: Inputs,
    first: bool,
    state: BufferId,
) {
    if first {
        builder.attend(inputs, state);
    }
    for kv in held.iter().flatten().filter_map(|held| held.arrived) {
        builder.attend_arrived(inputs, kv, state);
    }
}

fn end_held(builder: &mut PlanBuilder<'_>, held: Vec<Option<Held>>, packed: &mut Vec<BufferId>) {
    let arrived = held.into_iter().flatten().filter_map(|held| held.arrived);
    for buffer in packed.drain(..).chain(arrived) {
        builder.free(buffer);
    }
}
