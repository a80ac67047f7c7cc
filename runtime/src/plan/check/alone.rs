//! One rank's plan by itself, step by step.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use kyklos_transport::Rank;

use super::met::MetKeys;
use crate::mesh::kv_heads_for;
use crate::plan::{BufferId, Content, Kept, Plan, Recv, Send, Slice, Step, World};
use crate::{Error, Result, TokenRuns};

/// A rectangle of a buffer that has been written: list positions × heads.
type Area = (std::ops::Range<usize>, std::ops::Range<u32>);

#[derive(Default)]
pub(super) struct Life {
    /// Written parts, disjoint.
    written: Vec<Area>,
    /// Exchanges that still read it.
    sending: Vec<u32>,
    /// The exchange that is still writing it.
    pub(super) arriving: Option<u32>,
    /// For a state: the keys it has met.
    pub(super) met: MetKeys,
    pub(super) live: bool,
    freed: bool,
    pub(super) consumed: bool,
}

/// An exchange that has been posted.
struct Posted<'a> {
    waited: bool,
    sends: &'a [Send],
    recvs: &'a [Recv],
}

/// Walks a plan and keeps, for every buffer, what has happened to it.
pub(super) struct RankProof<'a> {
    world: &'a World,
    pub(super) plan: &'a Plan,
    pub(super) step: Option<usize>,
    pub(super) lives: Vec<Life>,
    exchanges: BTreeMap<u32, Posted<'a>>,
    live_bytes: u64,
    peak_bytes: u64,
}

impl<'a> RankProof<'a> {
    pub(super) fn new(world: &'a World, plan: &'a Plan) -> Self {
        let lives = plan.buffers.iter().map(|_| Life::default()).collect();
        Self { world, plan, step: None, lives, exchanges: BTreeMap::new(), live_bytes: 0, peak_bytes: 0 }
    }

    /// Peak bytes of buffers alive at once.
    pub(super) fn run(mut self) -> Result<u64> {
        self.declarations()?;
        for (index, step) in self.plan.steps.iter().enumerate() {
            self.step = Some(index);
            self.step(step)?;
        }
        self.step = None;
        if let Some((id, _)) = self.exchanges.iter().find(|(_, posted)| !posted.waited) {
            return self.fault(format!("exchange {id} is never waited for"));
        }
        self.must_be_written(&self.plan.whole(self.plan.output))?;
        let left = (0..self.lives.len()).map(BufferId).find(|id| {
            self.lives[id.0].live
                && !self.plan.is_own(*id)
                && self.plan.buffer(*id).bytes(&self.world.problem) > 0
        });
        match left {
            Some(id) => self.fault(format!("{} is never freed", self.name(id))),
            None => Ok(self.peak_bytes),
        }
    }

    /// The rank's own buffers are what the placement says, and its inputs are there from the start.
    pub(super) fn declarations(&mut self) -> Result<()> {
        let (problem, rank) = (&self.world.problem, Rank(self.plan.rank));
        for (index, buffer) in self.plan.buffers.iter().enumerate() {
            let (tokens, heads) = match buffer.content {
                Content::KeyValue | Content::WireKeyValue => (problem.kv_len, problem.kv_heads),
                Content::Query | Content::State | Content::Output => (problem.q_len, problem.q_heads),
                Content::Pairs => (problem.q_len, problem.pairs.map_or(0, |pairs| pairs.heads)),
            };
            let heads_fit = buffer.heads.start <= buffer.heads.end && buffer.heads.end <= heads;
            if !heads_fit || buffer.tokens.runs().iter().any(|run| run.last() >= tokens) {
                return self.fault(format!("buffer {index} `{}` holds what does not exist", buffer.name));
            }
        }
        let (q_tokens, kv_tokens) =
            (self.world.q_placement.of_rank(rank), &self.world.kv_placement.held_by(rank));
        if self.plan.pairs.is_some() != problem.pairs.is_some() {
            return self
                .fault("the plan and the problem do not agree whether there is a pair tensor".to_owned());
        }
        let pairs = self.plan.pairs.zip(problem.pairs);
        for (id, content, tokens, heads) in [
            (self.plan.q, Content::Query, q_tokens, problem.q_heads),
            (self.plan.kv, Content::KeyValue, kv_tokens, problem.kv_heads),
            (self.plan.output, Content::Output, q_tokens, problem.q_heads),
        ]
        .into_iter()
        .chain(pairs.map(|(id, pairs)| (id, Content::Pairs, q_tokens, pairs.heads)))
        {
            let buffer = self.plan.buffers.get(id.0).filter(|buffer| {
                buffer.content == content && buffer.tokens == *tokens && buffer.heads == (0..heads)
            });
            if buffer.is_none() {
                return self.fault(format!("buffer {} is not the rank's own {content:?}", id.0));
            }
            if id != self.plan.output {
                self.bring_to_life(id);
                self.lives[id.0].written.push((0..tokens.len(), 0..heads));
            }
        }
        self.plan.kept.iter().try_for_each(|kept| self.kept(*kept))
    }

    /// What is kept of a plan that was cut off is there too, and states have met what they say.
    fn kept(&mut self, Kept { buffer: id, .. }: Kept) -> Result<()> {
        self.exists(id)?;
        if self.lives[id.0].live || (self.plan.is_own(id) && id != self.plan.output) {
            return self.fault(format!("{} is kept, and is here already", self.name(id)));
        }
        match self.plan.buffer(id).content {
            Content::State => self.receive_state(id),
            Content::KeyValue | Content::WireKeyValue | Content::Output => self.write(&self.plan.whole(id)),
            content => self.fault(format!("{} is kept, which is {content:?}", self.name(id))),
        }
    }

    pub(super) fn step(&mut self, step: &'a Step) -> Result<()> {
        match step {
            Step::Repack { from, into } => {
                if from.buffer == into.buffer {
                    return self.fault(format!("{} is copied into itself", self.name(from.buffer)));
                }
                self.not_empty(from)?;
                self.same_meaning(from, into)?;
                self.must_be_written(from)?;
                self.write(into)
            }
            Step::Exchange { id, sends, recvs } => {
                if self.exchanges.insert(*id, Posted { waited: false, sends, recvs }).is_some() {
                    return self.fault(format!("exchange {id} is posted twice"));
                }
                self.peers(sends.iter().map(|send| send.to), "sends to")?;
                self.peers(recvs.iter().map(|recv| recv.from), "receives from")?;
                if sends.iter().any(|send| send.parts.is_empty())
                    || recvs.iter().any(|recv| recv.parts.is_empty())
                {
                    return self.fault(format!("exchange {id} has a message without parts"));
                }
                for part in sends.iter().flat_map(|send| &send.parts) {
                    if self.plan.buffer(part.buffer).content == Content::State {
                        self.send_state(part)?;
                    } else {
                        self.must_be_written(part)?;
                    }
                    if !self.plan.is_one_piece(&self.world.problem, part) {
                        return self
                            .fault(format!("the part of {} is not one piece", self.name(part.buffer)));
                    }
                    if self.plan.slice_bytes(&self.world.problem, part) == 0 {
                        return self.fault(format!("an empty part of {} is sent", self.name(part.buffer)));
                    }
                    self.lives[part.buffer.0].sending.push(*id);
                }
                for part in recvs.iter().flat_map(|recv| &recv.parts) {
                    self.exists(*part)?;
                    if self.plan.buffer(*part).content == Content::State {
                        self.receive_state(*part)?;
                    } else {
                        self.write(&self.plan.whole(*part))?;
                    }
                    self.lives[part.0].arriving = Some(*id);
                }
                Ok(())
            }
            Step::Wait { id } => {
                let (sends, recvs) = match self.exchanges.get_mut(id) {
                    None => return self.fault(format!("exchange {id} has not been posted")),
                    Some(Posted { waited: true, .. }) => {
                        return self.fault(format!("exchange {id} has been waited for before"));
                    }
                    Some(posted) => {
                        posted.waited = true;
                        (posted.sends, posted.recvs)
                    }
                };
                // Nothing else has to do with the exchange; a plan has many buffers and many waits.
                for part in sends.iter().flat_map(|send| &send.parts) {
                    self.lives[part.buffer.0].sending.retain(|sending| sending != id);
                }
                for part in recvs.iter().flat_map(|recv| &recv.parts) {
                    self.lives[part.0].arriving = None;
                }
                Ok(())
            }
            Step::Attend { q, kv, state, pairs } => {
                self.attend(q, kv, *state)?;
                self.pairs(q, pairs.as_ref())
            }
            Step::Convert { from, into } => self.convert(from, *into),
            Step::Merge { from, into } => self.merge(*from, *into),
            Step::Finalize { state, into } => {
                self.exists(*into)?;
                self.same_meaning_but_content(*state, *into, Content::State, Content::Output)?;
                self.state(*state)?;
                self.every_visible_key_once(*state)?;
                self.lives[state.0].consumed = true;
                self.write(&self.plan.whole(*into))
            }
            Step::Free { buffer } => self.free(*buffer),
        }
    }

    fn attend(&mut self, q: &Slice, kv: &Slice, state: BufferId) -> Result<()> {
        for slice in [q, kv] {
            self.not_empty(slice)?;
            self.must_be_written(slice)?;
        }
        self.state(state)?;
        for (slice, content) in [(q, Content::Query), (kv, Content::KeyValue)] {
            if self.plan.buffer(slice.buffer).content != content {
                return self.fault(format!("{} is no {content:?}", self.name(slice.buffer)));
            }
        }
        let (q_heads, kv_heads) = (self.plan.slice_heads(q), self.plan.slice_heads(kv));
        let declared = self.plan.buffer(state);
        if declared.tokens != *self.tokens(q) || declared.heads != q_heads {
            return self.fault(format!("{} is not of the queries' tokens and heads", self.name(state)));
        }
        let needed = kv_heads_for(&self.world.problem, &q_heads);
        if needed.start < kv_heads.start || needed.end > kv_heads.end {
            return self
                .fault(format!("query heads {q_heads:?} need kv heads {needed:?}, there are {kv_heads:?}"));
        }
        let keys = self.tokens(kv);
        match self.lives[state.0].met.meet(&keys) {
            Some(key) => self.fault(format!("{} meets key {key} twice", self.name(state))),
            None => Ok(()),
        }
    }

    /// The pair tensor's rows are there, and are those of the queries.
    fn pairs(&self, q: &Slice, pairs: Option<&Slice>) -> Result<()> {
        let (tensor, slice) = match (self.world.problem.pairs, pairs) {
            (None, None) => return Ok(()),
            (Some(tensor), Some(slice)) => (tensor, slice),
            (None, Some(_)) => {
                return self.fault("attends with a pair tensor that the problem has not".to_owned());
            }
            (Some(_), None) => return self.fault("attends without the problem's pair tensor".to_owned()),
        };
        self.not_empty(slice)?;
        self.must_be_written(slice)?;
        let heads = if tensor.heads > 1 { self.plan.slice_heads(q) } else { 0..1 };
        if self.plan.buffer(slice.buffer).content != Content::Pairs
            || self.tokens(slice) != self.tokens(q)
            || self.plan.slice_heads(slice) != heads
        {
            return self
                .fault(format!("{} is not of the queries' tokens and heads", self.name(slice.buffer)));
        }
        Ok(())
    }

    /// Keys and values become the same keys and values in the other form.
    fn convert(&mut self, from: &Slice, into: BufferId) -> Result<()> {
        self.not_empty(from)?;
        self.exists(into)?;
        self.must_be_written(from)?;
        let contents = [from.buffer, into].map(|id| self.plan.buffer(id).content);
        let kinds = [[Content::KeyValue, Content::WireKeyValue], [Content::WireKeyValue, Content::KeyValue]];
        let (whole, problem) = (self.plan.whole(into), &self.world.problem);
        if !kinds.contains(&contents)
            || !problem.wire.rounds()
            || !self.plan.is_one_piece(problem, from)
            || self.tokens(from) != self.tokens(&whole)
            || self.plan.slice_heads(from) != self.plan.slice_heads(&whole)
        {
            return self.fault(format!("{} is no conversion of {}", self.name(into), self.name(from.buffer)));
        }
        self.write(&whole)
    }

    fn merge(&mut self, from: BufferId, into: BufferId) -> Result<()> {
        self.state(from)?;
        self.state(into)?;
        self.same_meaning_but_content(from, into, Content::State, Content::State)?;
        if from == into {
            return self.fault(format!("{} is merged into itself", self.name(from)));
        }
        self.lives[from.0].consumed = true;
        let other = std::mem::take(&mut self.lives[from.0].met);
        match self.lives[into.0].met.merge(other) {
            Some(key) => self.fault(format!("{} meets key {key} twice by a merge", self.name(into))),
            None => Ok(()),
        }
    }

    /// Every key that a row of `state` can see has been met once; keys that were not met are invisible to all rows.
    fn every_visible_key_once(&mut self, state: BufferId) -> Result<()> {
        let problem = &self.world.problem;
        let gaps = self.lives[state.0].met.gaps();
        for batch in 0..problem.mask.batch_classes() {
            for token in self.plan.buffer(state).tokens.iter() {
                for span in problem.mask.visible(batch, problem.q_position(token), problem.kv_len).iter() {
                    if let Some(key) = gaps.first_in(span.lo..span.hi) {
                        return self.fault(format!(
                            "query {token} of batch {batch} sees keys {}..{}, of which {key} was never met",
                            span.lo, span.hi
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// `id` can be used as a running state; its first use brings it to life.
    fn state(&mut self, id: BufferId) -> Result<()> {
        self.exists(id)?;
        if self.plan.buffer(id).content != Content::State {
            return self.fault(format!("{} is no running state", self.name(id)));
        }
        if self.lives[id.0].consumed {
            return self.fault(format!("{} has been consumed", self.name(id)));
        }
        if let Some(exchange) = self.lives[id.0].arriving {
            return self.fault(format!("{} is used before exchange {exchange} is done", self.name(id)));
        }
        if !self.lives[id.0].live {
            self.bring_to_life(id);
            self.lives[id.0].met = MetKeys::none(self.world.problem.kv_len);
        }
        Ok(())
    }

    /// A state goes to another rank: whole, with the keys that it says, and for good.
    fn send_state(&mut self, part: &Slice) -> Result<()> {
        self.in_bounds(part)?;
        let id = part.buffer;
        if *part != self.plan.whole(id) {
            return self.fault(format!("only a part of {} is sent", self.name(id)));
        }
        self.state(id)?;
        let keys = &self.plan.buffer(id).met;
        if !self.lives[id.0].met.are(keys) {
            return self.fault(format!("{} has not met just the keys {keys} when it is sent", self.name(id)));
        }
        self.lives[id.0].consumed = true;
        Ok(())
    }

    /// A state comes from another rank, and has met what it says.
    fn receive_state(&mut self, id: BufferId) -> Result<()> {
        if self.lives[id.0].live {
            return self.fault(format!("{} is received into", self.name(id)));
        }
        self.state(id)?;
        let keys = &self.plan.buffer(id).met;
        if keys.runs().iter().any(|run| run.last() >= self.world.problem.kv_len) {
            return self.fault(format!("{} has met keys that do not exist", self.name(id)));
        }
        match self.lives[id.0].met.meet(keys) {
            Some(key) => self.fault(format!("{} has met key {key} twice", self.name(id))),
            None => Ok(()),
        }
    }

    fn free(&mut self, id: BufferId) -> Result<()> {
        self.exists(id)?;
        if self.plan.is_own(id) {
            return self.fault(format!("{} is the caller's and cannot be freed", self.name(id)));
        }
        let life = &mut self.lives[id.0];
        if let Some(exchange) = life.sending.first().or(life.arriving.as_ref()) {
            let exchange = *exchange;
            return self.fault(format!("{} is freed while exchange {exchange} uses it", self.name(id)));
        }
        if life.live {
            self.live_bytes -= self.plan.buffer(id).bytes(&self.world.problem);
        }
        life.live = false;
        life.freed = true;
        Ok(())
    }

    pub(super) fn must_be_written(&self, slice: &Slice) -> Result<()> {
        self.in_bounds(slice)?;
        let life = &self.lives[slice.buffer.0];
        if let Some(exchange) = life.arriving {
            return self
                .fault(format!("{} is read before exchange {exchange} is done", self.name(slice.buffer)));
        }
        // Written areas are disjoint, so the slice is written when their intersections with it fill it.
        let size = |area: &Area| area.0.len() as u64 * u64::from(area.1.end.saturating_sub(area.1.start));
        let wanted: Area = (slice.tokens.clone(), slice.heads.clone());
        let there: u64 = life.written.iter().map(|area| size(&overlap(area, &wanted))).sum();
        if there == size(&wanted) {
            return Ok(());
        }
        self.fault(format!("{} is read before it is written", self.name(slice.buffer)))
    }

    fn write(&mut self, slice: &Slice) -> Result<()> {
        self.in_bounds(slice)?;
        let id = slice.buffer;
        if self.plan.is_own(id) && id != self.plan.output {
            return self.fault(format!("{} is the caller's and cannot be written", self.name(id)));
        }
        if self.plan.buffer(id).content == Content::State {
            return self.fault(format!("{} is a running state and cannot be copied to", self.name(id)));
        }
        let area: Area = (slice.tokens.clone(), slice.heads.clone());
        if self.lives[id.0].written.iter().any(|other| {
            let (tokens, heads) = overlap(other, &area);
            !tokens.is_empty() && !heads.is_empty()
        }) {
            return self.fault(format!("{} is written twice", self.name(id)));
        }
        if !self.lives[id.0].live {
            self.bring_to_life(id);
        }
        let written = &mut self.lives[id.0].written;
        // Most buffers are written whole, by one message.
        written.reserve_exact(usize::from(written.is_empty()));
        written.push(area);
        Ok(())
    }

    /// The global tokens of a slice; nearly always all of its buffer's.
    fn tokens(&self, slice: &Slice) -> Cow<'a, TokenRuns> {
        let tokens = &self.plan.buffer(slice.buffer).tokens;
        match slice.tokens == (0..tokens.len()) {
            true => Cow::Borrowed(tokens),
            false => Cow::Owned(tokens.slice(slice.tokens.clone())),
        }
    }

    fn same_meaning(&self, from: &Slice, into: &Slice) -> Result<()> {
        self.in_bounds(from)?;
        self.in_bounds(into)?;
        let content = |slice: &Slice| self.plan.buffer(slice.buffer).content;
        if content(from) == content(into)
            && self.tokens(from) == self.tokens(into)
            && self.plan.slice_heads(from) == self.plan.slice_heads(into)
        {
            return Ok(());
        }
        self.fault(format!(
            "{} (tokens {}, heads {:?}) is copied to {} (tokens {}, heads {:?})",
            self.name(from.buffer),
            self.plan.slice_tokens(from),
            self.plan.slice_heads(from),
            self.name(into.buffer),
            self.plan.slice_tokens(into),
            self.plan.slice_heads(into),
        ))
    }

    fn same_meaning_but_content(
        &self,
        from: BufferId,
        into: BufferId,
        is: Content,
        becomes: Content,
    ) -> Result<()> {
        self.exists(from)?;
        self.exists(into)?;
        let (a, b) = (self.plan.buffer(from), self.plan.buffer(into));
        if a.content == is && b.content == becomes && a.tokens == b.tokens && a.heads == b.heads {
            return Ok(());
        }
        self.fault(format!("{} does not fit {}", self.name(from), self.name(into)))
    }

    fn in_bounds(&self, slice: &Slice) -> Result<()> {
        self.exists(slice.buffer)?;
        let buffer = self.plan.buffer(slice.buffer);
        let fits = slice.tokens.start <= slice.tokens.end
            && slice.tokens.end <= buffer.tokens.len()
            && slice.heads.start <= slice.heads.end
            && slice.heads.end <= buffer.head_count();
        if !fits {
            return self.fault(format!("a slice reaches outside of {}", self.name(slice.buffer)));
        }
        if *slice != self.plan.whole(slice.buffer) && buffer.content.shares_rows(&self.world.problem) {
            return self
                .fault(format!("a part of {} is used, whose tokens share scales", self.name(slice.buffer)));
        }
        Ok(())
    }

    fn not_empty(&self, slice: &Slice) -> Result<()> {
        self.in_bounds(slice)?;
        if slice.tokens.is_empty() || slice.heads.is_empty() {
            return self.fault(format!("a slice of {} is empty", self.name(slice.buffer)));
        }
        Ok(())
    }

    fn exists(&self, id: BufferId) -> Result<()> {
        match self.lives.get(id.0) {
            None => self.fault(format!("there is no buffer {}", id.0)),
            Some(life) if life.freed => self.fault(format!("{} is used after it was freed", self.name(id))),
            Some(_) => Ok(()),
        }
    }

    fn peers(&self, peers: impl ExactSizeIterator<Item = u32> + Clone, verb: &str) -> Result<()> {
        let wrong = |peer: &u32| *peer == self.plan.rank || *peer >= self.world.mesh.world();
        let mut known = BTreeSet::new();
        // A ring has one peer each way, which needs no list of those that are known.
        let twice = match peers.len() {
            0 | 1 => None,
            _ => peers.clone().find(|peer| !known.insert(*peer)),
        };
        match { peers }.find(wrong).or(twice) {
            Some(peer) => {
                self.fault(format!("an exchange {verb} rank {peer}, which is itself, unknown or named twice"))
            }
            None => Ok(()),
        }
    }

    fn bring_to_life(&mut self, id: BufferId) {
        self.lives[id.0].live = true;
        self.live_bytes += self.plan.buffer(id).bytes(&self.world.problem);
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
    }

    fn name(&self, id: BufferId) -> String {
        format!("`{}`", self.plan.buffer(id).name)
    }

    pub(super) fn fault<T>(&self, fault: String) -> Result<T> {
        Err(Error::plan(Rank(self.plan.rank), self.step, fault))
    }
}

fn overlap(a: &Area, b: &Area) -> Area {
    (a.0.start.max(b.0.start)..a.0.end.min(b.0.end), a.1.start.max(b.1.start)..a.1.end.min(b.1.end))
}
