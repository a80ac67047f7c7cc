//! One rank's plan by itself, step by step.

use kyklos_rank::Rank;

use super::proof::{Posted, RankProof};
use crate::error::Result;
use crate::mesh::kv_heads_for;
use crate::plan::{BufferId, Content, Slice, Step};

impl<'a> RankProof<'a> {
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
        for result in self.plan.results() {
            match self.plan.buffer(result).content {
                Content::BiasGradSum => self.bias_sum_is_complete(result)?,
                _ => self.must_be_written(&self.plan.whole(result))?,
            }
        }
        let left = (0..self.lives.len()).map(BufferId).find(|id| {
            self.lives[id.0].live
                && !self.plan.is_own(*id)
                && self.plan.buffer(*id).bytes(&self.set.problem) > 0
        });
        match left {
            Some(id) => self.fault(format!("{} is never freed", self.name(id))),
            None => Ok(self.peak_bytes),
        }
    }

    /// Checks that the rank's own buffers agree with the placement. Its inputs are written from the
    /// start.
    pub(super) fn declarations(&mut self) -> Result<()> {
        let (problem, rank) = (&self.set.problem, Rank(self.plan.rank));
        for (index, buffer) in self.plan.buffers.iter().enumerate() {
            let (tokens, heads) = match buffer.content {
                Content::Bias | Content::BiasGradSum => {
                    (problem.q_len, problem.query_bias().map_or(0, |bias| bias.heads))
                }
                content if content.is_of_keys() => (problem.kv_len, problem.kv_heads),
                _ => (problem.q_len, problem.q_heads),
            };
            let heads_fit = buffer.heads.start <= buffer.heads.end && buffer.heads.end <= heads;
            let spare = if BufferId(index) == self.plan.kv { self.set.kv_placement.spare(rank) } else { 0 };
            if buffer.spare != spare {
                let fault =
                    format!("buffer {index} `{}` has {} spare rows, not {spare}", buffer.name, buffer.spare);
                return self.fault(fault);
            }
            if !heads_fit || buffer.tokens.runs().iter().any(|run| run.last() >= tokens) {
                return self.fault(format!(
                    "buffer {index} `{}` holds tokens or heads that do not exist",
                    buffer.name
                ));
            }
        }
        let (q_tokens, kv_tokens) =
            (&self.set.q_placement.held_by(rank), &self.set.kv_placement.held_by(rank));
        if self.plan.bias.is_some() != problem.query_bias().is_some() {
            return self.fault(
                "the plan and the problem do not agree whether there are rows of an attention bias tensor"
                    .to_owned(),
            );
        }
        if self.plan.gradients.is_some() == self.set.direction.is_forward() {
            return self
                .fault("the plan and its plan set do not agree whether it computes gradients".to_owned());
        }
        let d_bias = self.plan.gradients.and_then(|own| own.d_bias);
        if self.plan.gradients.is_some()
            && d_bias.is_some() != (problem.bias_gradient && problem.query_bias().is_some())
        {
            return self.fault(
                "the plan and the problem do not agree whether there is a gradient of a bias tensor"
                    .to_owned(),
            );
        }
        let bias = self.plan.bias.zip(problem.query_bias());
        let of_bias = d_bias.zip(problem.query_bias());
        let output = if self.set.direction.is_forward() { Content::Output } else { Content::QueryGrad };
        let of_gradients = self.plan.gradients.map(|own| {
            [
                (own.d_o, Content::OutputGrad, q_tokens, problem.q_heads),
                (own.stats, Content::RowStats, q_tokens, problem.q_heads),
                (own.d_kv, Content::KeyValueGrad, kv_tokens, problem.kv_heads),
            ]
        });
        for (id, content, tokens, heads) in [
            (self.plan.q, Content::Query, q_tokens, problem.q_heads),
            (self.plan.kv, Content::KeyValue, kv_tokens, problem.kv_heads),
            (self.plan.output, output, &self.set.output_tokens(rank), problem.q_heads),
        ]
        .into_iter()
        .chain(of_gradients.into_iter().flatten())
        .chain(bias.map(|(id, bias)| (id, Content::Bias, q_tokens, bias.heads)))
        .chain(of_bias.map(|(id, bias)| (id, Content::BiasGradSum, q_tokens, bias.heads)))
        {
            let buffer = self.plan.buffers.get(id.0).filter(|buffer| {
                buffer.content == content && buffer.tokens == *tokens && buffer.heads == (0..heads)
            });
            if buffer.is_none() {
                return self.fault(format!("buffer {} is not the rank's own {content:?}", id.0));
            }
            if !self.plan.is_result(id) {
                self.bring_to_life(id);
                self.lives[id.0].written.push((0..tokens.len(), 0..heads));
            }
        }
        Ok(())
    }

    pub(super) fn step(&mut self, step: &'a Step) -> Result<()> {
        match step {
            Step::Repack { from, into } => {
                if from.buffer == into.buffer {
                    return self.fault(format!("{} is copied into itself", self.name(from.buffer)));
                }
                if self.plan.buffer(from.buffer).content.is_sum() {
                    return self.copy_sum(from, into);
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
                    match self.plan.buffer(part.buffer).content {
                        Content::State => self.send_state(part)?,
                        content if content.is_sum() => self.send_sum(part)?,
                        _ => self.must_be_written(part)?,
                    }
                    if !self.plan.is_one_piece(&self.set.problem, part) {
                        return self.fault(format!(
                            "the part of {} is not contiguous in memory",
                            self.name(part.buffer)
                        ));
                    }
                    if self.plan.slice_bytes(&self.set.problem, part) == 0 {
                        return self.fault(format!("an empty part of {} is sent", self.name(part.buffer)));
                    }
                    self.lives[part.buffer.0].sending.push(*id);
                }
                for part in recvs.iter().flat_map(|recv| &recv.parts) {
                    self.exists(*part)?;
                    match self.plan.buffer(*part).content {
                        Content::State => self.receive_state(*part)?,
                        content if content.is_sum() => self.receive_sum(*part)?,
                        _ => self.write(&self.plan.whole(*part))?,
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
                // Only the buffers of this exchange: a plan has many buffers and many waits.
                for part in sends.iter().flat_map(|send| &send.parts) {
                    self.lives[part.buffer.0].sending.retain(|sending| sending != id);
                }
                for part in recvs.iter().flat_map(|recv| &recv.parts) {
                    self.lives[part.0].arriving = None;
                }
                Ok(())
            }
            Step::Attend { q, kv, state, bias } => {
                self.attend(q, kv, *state)?;
                self.bias(q, bias.as_deref())
            }
            Step::AttendBackward(step) => self.attend_backward(step),
            Step::Accumulate { from, into } => self.accumulate(*from, into),
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
        self.changed(state)?;
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
        let needed = kv_heads_for(&self.set.problem, &q_heads);
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

    /// Checks that the rows of the attention bias tensor are written, and belong to the same
    /// queries.
    pub(super) fn bias(&self, q: &Slice, bias: Option<&Slice>) -> Result<()> {
        let (tensor, slice) = match (self.set.problem.query_bias(), bias) {
            (None, None) => return Ok(()),
            (Some(tensor), Some(slice)) => (tensor, slice),
            (None, Some(_)) => {
                return self.fault(
                    "attends with rows of an attention bias tensor, the problem has none for each query"
                        .to_owned(),
                );
            }
            (Some(_), None) => {
                return self.fault("attends without the problem's attention bias tensor".to_owned());
            }
        };
        self.not_empty(slice)?;
        self.must_be_written(slice)?;
        let heads = if tensor.heads > 1 { self.plan.slice_heads(q) } else { 0..1 };
        if self.plan.buffer(slice.buffer).content != Content::Bias
            || self.tokens(slice) != self.tokens(q)
            || self.plan.slice_heads(slice) != heads
        {
            return self
                .fault(format!("{} is not of the queries' tokens and heads", self.name(slice.buffer)));
        }
        Ok(())
    }

    /// Checks that keys and values become the same keys and values in the other format, or that a
    /// sum is rounded.
    fn convert(&mut self, from: &Slice, into: BufferId) -> Result<()> {
        self.not_empty(from)?;
        self.exists(into)?;
        if self.plan.buffer(from.buffer).content.is_sum() {
            return self.round_sum(from, into);
        }
        self.must_be_written(from)?;
        let contents = [from.buffer, into].map(|id| self.plan.buffer(id).content);
        let kinds = [[Content::KeyValue, Content::WireKeyValue], [Content::WireKeyValue, Content::KeyValue]];
        let (whole, problem) = (self.plan.whole(into), &self.set.problem);
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
}
