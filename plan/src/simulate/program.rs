//! A plan set as work for a machine: compute times, copies, messages and waits.

use std::collections::HashMap;

use super::cluster::Cluster;
use super::describe::MemoryKind;
use super::work::WorkCounter;
use crate::error::{Error, Result};
use crate::plan::{BufferId, GradientStep, Plan, PlanSet, Slice, Step};

/// The work of all ranks, and their messages.
#[derive(Debug, Default)]
pub(super) struct Program {
    pub(super) ranks: Vec<RankProgram>,
    pub(super) messages: Vec<Message>,
}

/// The work of one rank.
#[derive(Debug, Default)]
pub(super) struct RankProgram {
    pub(super) device: usize,
    pub(super) ops: Vec<Op>,
    pub(super) exchanges: Vec<Exchange>,
    /// Visible pairs times heads.
    pub(super) pairs: f64,
    /// Most bytes of buffers alive at once.
    pub(super) peak_bytes: u64,
}

/// One operation of a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Op {
    /// Computes, for this many nanoseconds on a device that no other rank uses.
    Compute(f64),
    /// Copies, for this many nanoseconds.
    Copy(f64),
    /// Posts an exchange, by its index among the rank's exchanges.
    Post(usize),
    /// Waits for it.
    Wait(usize),
}

/// Messages posted together, and the cost of staging them.
#[derive(Clone, Debug, Default)]
pub(super) struct Exchange {
    pub(super) sends: Vec<usize>,
    pub(super) recvs: Vec<usize>,
    pub(super) stage_out_ns: f64,
    pub(super) stage_in_ns: f64,
}

/// One message of the plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) bytes: u64,
    /// Index of the exchange among the sender's exchanges, and among the receiver's.
    pub(super) exchanges: [usize; 2],
}

impl Program {
    pub(super) fn new(set: &PlanSet, cluster: &Cluster) -> Result<Self> {
        let places = cluster.place(set.mesh.size())?;
        let mut program = Self::default();
        let mut known = HashMap::new();
        let mut counter = WorkCounter::default();
        for (plan, device) in set.plans.iter().zip(&places) {
            let pricer = Pricer::new(set, (cluster, &places), plan, *device, &mut counter)?;
            let rank = pricer.run(&mut program.messages, &mut known)?;
            program.ranks.push(rank);
        }
        Ok(program)
    }
}

/// Walks one plan.
struct Pricer<'a> {
    set: &'a PlanSet,
    cluster: &'a Cluster,
    /// The device of each rank.
    places: &'a [usize],
    plan: &'a Plan,
    counter: &'a mut WorkCounter,
    prices: Prices,
    rank: RankProgram,
    alive: Vec<bool>,
    live_bytes: u64,
}

/// A device's prices for this problem, in nanoseconds.
struct Prices {
    pair: f64,
    /// For the gradients of a pair.
    backward_pair: f64,
    /// Pairs that the end of an interval costs on average: half a tile of rows and half a tile of
    /// keys.
    edge_pairs: f64,
    attend_step: f64,
    piece: f64,
    piece_every: f64,
    copied_byte: f64,
    /// For one byte of a running state, read or written.
    state_byte: f64,
    /// For one byte of keys and values that an attend step reads.
    key_byte: f64,
    copy: f64,
    staged_byte: Option<f64>,
}

/// Sender, receiver and exchange name a message.
type Known = HashMap<(u32, u32, u32), usize>;

impl<'a> Pricer<'a> {
    fn new(
        set: &'a PlanSet,
        (cluster, places): (&'a Cluster, &'a [usize]),
        plan: &'a Plan,
        device: usize,
        counter: &'a mut WorkCounter,
    ) -> Result<Self> {
        let described = cluster.device(device);
        let prices = Prices {
            pair: cluster.ns_per_pair(device, &set.problem)?,
            backward_pair: cluster.backward_ns_per_pair(device, &set.problem)?,
            edge_pairs: f64::from(described.tile_rows + described.tile_keys - 2) / 2.0,
            attend_step: described.attend_step_us * 1e3,
            piece: described.piece_us * 1e3,
            piece_every: described.piece_ms * 1e6,
            copied_byte: 1.0 / described.copy_gb_per_s,
            key_byte: described.key_gb_per_s.map_or(0.0, |rate| 1.0 / rate),
            state_byte: 1.0 / described.state_gb_per_s.unwrap_or(described.copy_gb_per_s),
            copy: described.copy_us * 1e3,
            staged_byte: match described.memory {
                MemoryKind::Unified => None,
                MemoryKind::Discrete => described.staging_gb_per_s.map(|rate| 1.0 / rate),
            },
        };
        let rank = RankProgram { device, ..RankProgram::default() };
        let alive = vec![false; plan.buffers.len()];
        // An input that no buffer of the plan holds.
        let mut live_bytes = set.problem.shared_bias_bytes();
        if plan.gradients.is_some() {
            live_bytes += set.problem.shared_bias_gradient_bytes();
        }
        Ok(Self { set, cluster, places, plan, counter, prices, rank, alive, live_bytes })
    }

    fn run(mut self, messages: &mut Vec<Message>, known: &mut Known) -> Result<RankProgram> {
        let plan = self.plan;
        let gradients = plan.gradients.map(|own| [own.d_o, own.stats]);
        let inputs = [Some(plan.q), Some(plan.kv), plan.bias].into_iter().flatten();
        for id in inputs.chain(gradients.into_iter().flatten()) {
            self.born(id);
        }
        let mut exchanges: HashMap<u32, usize> = HashMap::new();
        for step in &plan.steps {
            match step {
                Step::Repack { from, into } => {
                    self.born(into.buffer);
                    let ns = self.prices.copy + self.bytes(from) as f64 * self.prices.copied_byte;
                    self.rank.ops.push(Op::Copy(ns));
                }
                Step::Convert { from, into } => {
                    self.born(*into);
                    // A conversion reads one buffer and writes the other: it costs a copy of half of both.
                    let both = self.bytes(from) + self.bytes(&plan.whole(*into));
                    let ns = self.prices.copy + both as f64 / 2.0 * self.prices.copied_byte;
                    self.rank.ops.push(Op::Copy(ns));
                }
                Step::Exchange { id, sends, recvs } => {
                    let mut exchange = Exchange::default();
                    let (mut out, mut back) = (0, 0);
                    for send in sends {
                        let bytes = send.parts.iter().map(|part| self.bytes(part)).sum();
                        out += if self.is_staged(send.to)? { bytes } else { 0 };
                        let message = message(messages, known, (plan.rank, send.to, *id));
                        messages[message].bytes = bytes;
                        messages[message].exchanges[0] = self.rank.exchanges.len();
                        exchange.sends.push(message);
                    }
                    for recv in recvs {
                        let is_staged = self.is_staged(recv.from)?;
                        for part in &recv.parts {
                            self.born(*part);
                            if is_staged {
                                back += plan.buffer(*part).bytes(&self.set.problem);
                            }
                        }
                        let message = message(messages, known, (recv.from, plan.rank, *id));
                        messages[message].exchanges[1] = self.rank.exchanges.len();
                        exchange.recvs.push(message);
                    }
                    if let Some(byte) = self.prices.staged_byte {
                        let copy =
                            |bytes: u64| if bytes > 0 { self.prices.copy + bytes as f64 * byte } else { 0.0 };
                        (exchange.stage_out_ns, exchange.stage_in_ns) = (copy(out), copy(back));
                    }
                    exchanges.insert(*id, self.rank.exchanges.len());
                    self.rank.ops.push(Op::Post(self.rank.exchanges.len()));
                    self.rank.exchanges.push(exchange);
                }
                Step::Wait { id } => match exchanges.get(id) {
                    Some(exchange) => self.rank.ops.push(Op::Wait(*exchange)),
                    None => {
                        return Err(Error::plan(
                            kyklos_rank::Rank(plan.rank),
                            None,
                            format!("exchange {id} is waited for and was not posted"),
                        ));
                    }
                },
                Step::Attend { q, kv, state, .. } => self.attend(q, kv, *state),
                Step::AttendBackward(step) => {
                    let GradientStep { q, kv, dq, d_kv, d_bias, .. } = &**step;
                    let d_bias = d_bias.as_ref().map(|sum| sum.buffer);
                    self.attend_backward(q, kv, [*dq, d_kv.buffer].into_iter().chain(d_bias));
                }
                // Both sums are read, one is written.
                Step::Accumulate { from, into } => {
                    self.born(*from);
                    self.born(into.buffer);
                    let bytes = 3.0 * self.bytes(into) as f64;
                    self.rank.ops.push(Op::Compute(bytes * self.prices.state_byte));
                }
                // Both states are read, one is written.
                Step::Merge { from, into } => {
                    self.born(*from);
                    self.born(*into);
                    self.touch(*from, 1.0, Some((*into, 2.0)));
                }
                // A state without an attend step is used here for the first time.
                Step::Finalize { state, into } => {
                    self.born(*state);
                    self.born(*into);
                    self.touch(*state, 1.0, Some((*into, 1.0)));
                }
                Step::Free { buffer } => {
                    if std::mem::take(&mut self.alive[buffer.0]) {
                        self.live_bytes -= plan.buffer(*buffer).bytes(&self.set.problem);
                    }
                }
            }
        }
        Ok(self.rank)
    }

    /// Whether messages with `peer` are copied to the host.
    fn is_staged(&self, peer: u32) -> Result<bool> {
        let both = [self.places[self.plan.rank as usize], self.places[peer as usize]];
        Ok(self.prices.staged_byte.is_some() && !self.cluster.reaches_memory(both[0], both[1])?)
    }

    fn attend(&mut self, q: &Slice, kv: &Slice, state: BufferId) {
        let (q_tokens, kv_tokens) = (self.plan.slice_tokens(q), self.plan.slice_tokens(kv));
        let work = self.counter.count(&self.set.problem, &q_tokens, &kv_tokens);
        let heads = f64::from(q.heads.end - q.heads.start);
        let computed = (work.pairs + work.edges * self.prices.edge_pairs).min(work.area) * heads;
        let attended = computed * self.prices.pair;
        let fresh = !self.alive[state.0];
        self.born(state);
        // A running state is read and written once; an empty one is written first.
        let state_bytes = self.plan.buffer(state).bytes(&self.set.problem) as f64;
        let state_ns = state_bytes * self.prices.state_byte * if fresh { 3.0 } else { 2.0 };
        let pieces = (attended / self.prices.piece_every).ceil().max(1.0);
        self.rank.pairs += work.pairs * heads;
        let keys_ns = self.bytes(kv) as f64 * self.prices.key_byte;
        let ns = attended + keys_ns + state_ns + self.prices.attend_step + pieces * self.prices.piece;
        self.rank.ops.push(Op::Compute(ns));
    }

    /// The gradients of as many pairs as attention has.
    fn attend_backward(&mut self, q: &Slice, kv: &Slice, sums: impl Iterator<Item = BufferId>) {
        let (q_tokens, kv_tokens) = (self.plan.slice_tokens(q), self.plan.slice_tokens(kv));
        let work = self.counter.count(&self.set.problem, &q_tokens, &kv_tokens);
        let heads = f64::from(q.heads.end - q.heads.start);
        let computed = (work.pairs + work.edges * self.prices.edge_pairs).min(work.area) * heads;
        let attended = computed * self.prices.backward_pair;
        let mut bytes = 0.0;
        for sum in sums {
            let fresh = !self.alive[sum.0];
            self.born(sum);
            let size = self.plan.buffer(sum).bytes(&self.set.problem) as f64;
            bytes += size * if fresh { 3.0 } else { 2.0 };
        }
        let pieces = (attended / self.prices.piece_every).ceil().max(1.0);
        self.rank.pairs += work.pairs * heads;
        let keys_ns = self.bytes(kv) as f64 * self.prices.key_byte;
        let ns = attended
            + keys_ns
            + bytes * self.prices.state_byte
            + self.prices.attend_step
            + pieces * self.prices.piece;
        self.rank.ops.push(Op::Compute(ns));
    }

    /// Reads and writes of whole buffers, in compute time.
    fn touch(&mut self, first: BufferId, times: f64, second: Option<(BufferId, f64)>) {
        let bytes = |id: BufferId| self.plan.buffer(id).bytes(&self.set.problem) as f64;
        let sum = bytes(first) * times + second.map_or(0.0, |(id, times)| bytes(id) * times);
        self.rank.ops.push(Op::Compute(sum * self.prices.state_byte));
    }

    fn born(&mut self, id: BufferId) {
        if !std::mem::replace(&mut self.alive[id.0], true) {
            self.live_bytes += self.plan.buffer(id).bytes(&self.set.problem);
            self.rank.peak_bytes = self.rank.peak_bytes.max(self.live_bytes);
        }
    }

    fn bytes(&self, slice: &Slice) -> u64 {
        self.plan.slice_bytes(&self.set.problem, slice)
    }
}

fn message(messages: &mut Vec<Message>, known: &mut Known, key: (u32, u32, u32)) -> usize {
    *known.entry(key).or_insert_with(|| {
        messages.push(Message { from: key.0 as usize, to: key.1 as usize, bytes: 0, exchanges: [0; 2] });
        messages.len() - 1
    })
}
