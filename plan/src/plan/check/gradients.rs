//! Sums of gradients in the proof of a backward plan: every visible (query, key) pair counts once
//! in the gradient of its query, and once in that of its key.

use std::collections::BTreeSet;
use std::ops::Range;

use super::met::MetKeys;
use super::proof::{Contribution, RankProof};
use crate::error::Result;
use crate::lower;
use crate::mesh::kv_heads_for;
use crate::plan::{BufferId, Content, GradientStep, Slice};
use crate::tokens::TokenRuns;

impl RankProof<'_> {
    /// Checks [`Step::AttendBackward`](crate::plan::Step::AttendBackward).
    pub(super) fn attend_backward(&mut self, step: &GradientStep) -> Result<()> {
        let GradientStep { q, d_o, stats, kv, dq, d_kv, bias, d_bias } = step;
        let inputs = [
            (q, Content::Query),
            (d_o, Content::OutputGrad),
            (stats, Content::RowStats),
            (kv, Content::KeyValue),
        ];
        for (slice, content) in inputs {
            self.not_empty(slice)?;
            self.must_be_written(slice)?;
            if self.plan.buffer(slice.buffer).content != content {
                return self.fault(format!("{} is no {content:?}", self.name(slice.buffer)));
            }
        }
        for slice in [d_o, stats] {
            if self.tokens(slice) != self.tokens(q)
                || self.plan.slice_heads(slice) != self.plan.slice_heads(q)
            {
                return self
                    .fault(format!("{} is not of the queries' tokens and heads", self.name(slice.buffer)));
            }
        }
        let (q_heads, kv_heads) = (self.plan.slice_heads(q), self.plan.slice_heads(kv));
        let needed = kv_heads_for(&self.set.problem, &q_heads);
        if needed.start < kv_heads.start || needed.end > kv_heads.end {
            return self
                .fault(format!("query heads {q_heads:?} need kv heads {needed:?}, there are {kv_heads:?}"));
        }
        self.bias(q, bias.as_ref())?;

        self.sum(*dq, Content::QueryGradSum)?;
        let declared = self.plan.buffer(*dq);
        if declared.tokens != *self.tokens(q) || declared.heads != q_heads {
            return self.fault(format!("{} is not of the queries' tokens and heads", self.name(*dq)));
        }
        self.still_changes(*dq)?;
        let keys = self.tokens(kv);
        if let Some(key) = self.lives[dq.0].met.meet(&keys) {
            return self.fault(format!("{} meets key {key} twice", self.name(*dq)));
        }
        self.same_rows(kv, d_kv, Content::KeyValueGradSum)?;
        let others = self.tokens(q).into_owned();
        let of_keys = Contribution { rows: d_kv.tokens.clone(), others, q_heads: q_heads.clone() };
        self.contribute(d_kv, of_keys)?;
        match (bias, d_bias) {
            (Some(bias), Some(d_bias)) if self.set.problem.bias_gradient => {
                self.same_rows(bias, d_bias, Content::BiasGradSum)?;
                let others = keys.into_owned();
                self.contribute(d_bias, Contribution { rows: d_bias.tokens.clone(), others, q_heads })
            }
            (Some(_), None) if !self.set.problem.bias_gradient => Ok(()),
            (None, None) => Ok(()),
            _ => self.fault("the step and the problem do not agree whether it computes dbias".to_owned()),
        }
    }

    /// Checks that the result holds the gradient of every visible pair of its rows, once.
    pub(super) fn bias_sum_is_complete(&mut self, id: BufferId) -> Result<()> {
        let problem = &self.set.problem;
        let (all, q_heads) = (TokenRuns::contiguous(0..problem.kv_len), 0..problem.q_heads);
        self.sum(id, Content::BiasGradSum)?;
        self.holds_once(&self.plan.whole(id), &all, &q_heads)
    }

    /// Checks [`Step::Accumulate`].
    pub(super) fn accumulate(&mut self, from: BufferId, into: &Slice) -> Result<()> {
        let whole = self.plan.whole(from);
        self.not_empty(&whole)?;
        if from == into.buffer {
            return self.fault(format!("{} is added to itself", self.name(from)));
        }
        if self.plan.buffer(from).content == Content::QueryGradSum {
            return self.accumulate_queries(from, into);
        }
        let content = self.plan.buffer(from).content;
        self.sum(from, content)?;
        self.same_rows(&whole, into, content)?;
        self.carry_over(&whole, into)
    }

    /// Checks that a sum of gradients of queries is added to one of the same queries over other
    /// keys.
    fn accumulate_queries(&mut self, from: BufferId, into: &Slice) -> Result<()> {
        self.in_bounds(into)?;
        if *into != self.plan.whole(into.buffer) {
            return self.fault(format!(
                "{} is added to a part of {}",
                self.name(from),
                self.name(into.buffer)
            ));
        }
        self.same_meaning_but_content(from, into.buffer, Content::QueryGradSum, Content::QueryGradSum)?;
        self.sum(from, Content::QueryGradSum)?;
        self.sum(into.buffer, Content::QueryGradSum)?;
        self.still_changes(into.buffer)?;
        let other = self.lives[from.0].met.clone();
        match self.lives[into.buffer.0].met.merge(other) {
            Some(key) => {
                self.fault(format!("{} meets key {key} twice by an addition", self.name(into.buffer)))
            }
            None => Ok(()),
        }
    }

    /// Checks a copy of a part of a sum of gradients of keys or of a bias into another sum.
    pub(super) fn copy_sum(&mut self, from: &Slice, into: &Slice) -> Result<()> {
        self.not_empty(from)?;
        let content = self.plan.buffer(from.buffer).content;
        if content == Content::QueryGradSum {
            return self.fault(format!(
                "{} is a sum of gradients of queries, and is copied",
                self.name(from.buffer)
            ));
        }
        self.sum(from.buffer, content)?;
        self.same_meaning(from, into)?;
        if self.lives[into.buffer.0].live {
            return self.fault(format!("{} is a sum, and is copied to", self.name(into.buffer)));
        }
        if *into != self.plan.whole(into.buffer) {
            return self.fault(format!("only a part of {} is copied to", self.name(into.buffer)));
        }
        self.carry_over(from, into)
    }

    /// Checks that a complete sum is rounded to the storage type.
    pub(super) fn round_sum(&mut self, from: &Slice, into: BufferId) -> Result<()> {
        let sum = self.plan.buffer(from.buffer);
        let becomes = match sum.content {
            Content::QueryGradSum => Content::QueryGrad,
            Content::KeyValueGradSum => Content::KeyValueGrad,
            _ => return self.fault(format!("{} is rounded", self.name(from.buffer))),
        };
        self.sum(from.buffer, sum.content)?;
        if *from != self.plan.whole(from.buffer) {
            return self.fault(format!("only a part of {} is rounded", self.name(from.buffer)));
        }
        self.same_meaning_but_content(from.buffer, into, sum.content, becomes)?;
        if sum.content == Content::QueryGradSum {
            self.every_visible_key_once(from.buffer)?;
        } else {
            let (all, group) = (TokenRuns::contiguous(0..self.set.problem.q_len), self.set.problem.group());
            let q_heads = sum.heads.start * group..sum.heads.end * group;
            self.holds_once(from, &all, &q_heads)?;
        }
        self.lives[from.buffer.0].sent = true;
        self.write(&self.plan.whole(into))
    }

    /// Checks that a sum of gradients is sent with the contributions that it declares: of keys or a
    /// bias any part of it, of queries the whole.
    /// From then on it is only read.
    pub(super) fn send_sum(&mut self, part: &Slice) -> Result<()> {
        self.in_bounds(part)?;
        let (id, buffer) = (part.buffer, self.plan.buffer(part.buffer));
        if buffer.content == Content::QueryGradSum {
            self.sum(id, Content::QueryGradSum)?;
            if *part != self.plan.whole(id) || !self.lives[id.0].met.are(&buffer.met) {
                let fault =
                    format!("{} is not sent whole, over exactly the keys {}", self.name(id), buffer.met);
                return self.fault(fault);
            }
            self.lives[id.0].sent = true;
            return Ok(());
        }
        self.sum(id, buffer.content)?;
        self.holds_once(part, &buffer.met, &buffer.met_heads)?;
        self.lives[id.0].sent = true;
        Ok(())
    }

    /// Takes a sum that is received: it holds what it declares.
    pub(super) fn receive_sum(&mut self, id: BufferId) -> Result<()> {
        if self.lives[id.0].live {
            return self.fault(format!("{} is received into", self.name(id)));
        }
        if self.plan.buffer(id).content == Content::QueryGradSum {
            return self.receive_sum_of_queries(id);
        }
        let buffer = self.plan.buffer(id);
        self.sum(id, buffer.content)?;
        let (others, q_heads) = (buffer.met.clone(), buffer.met_heads.clone());
        let exist = self.others(buffer.content);
        if others.runs().iter().any(|run| run.last() >= exist) || q_heads.end > self.set.problem.q_heads {
            return self.fault(format!("{} has met tokens or heads that do not exist", self.name(id)));
        }
        self.contribute(&self.plan.whole(id), Contribution { rows: 0..buffer.tokens.len(), others, q_heads })
    }

    /// Number of tokens that the rows of a sum can meet: queries for keys, keys for the rows of a
    /// bias.
    fn others(&self, content: Content) -> u32 {
        let problem = &self.set.problem;
        if content.is_of_keys() { problem.q_len } else { problem.kv_len }
    }

    fn receive_sum_of_queries(&mut self, id: BufferId) -> Result<()> {
        self.sum(id, Content::QueryGradSum)?;
        let keys = &self.plan.buffer(id).met;
        if !self.lives[id.0].met.exist(keys) {
            return self.fault(format!("{} has met keys that do not exist", self.name(id)));
        }
        match self.lives[id.0].met.meet(keys) {
            Some(key) => self.fault(format!("{} has met key {key} twice", self.name(id))),
            None => Ok(()),
        }
    }

    /// Checks that a sum may still change.
    fn still_changes(&self, id: BufferId) -> Result<()> {
        if self.lives[id.0].sent {
            return self.fault(format!("{} is changed after it was sent or rounded", self.name(id)));
        }
        Ok(())
    }

    /// Checks that `id` can be used as a sum of this content; its first use declares it 0.
    fn sum(&mut self, id: BufferId, content: Content) -> Result<()> {
        self.exists(id)?;
        if self.plan.buffer(id).content != content {
            return self.fault(format!("{} is no {content:?}", self.name(id)));
        }
        if let Some(exchange) = self.lives[id.0].arriving {
            return self.fault(format!("{} is used before exchange {exchange} is done", self.name(id)));
        }
        if !self.lives[id.0].live {
            self.bring_to_life(id);
            self.lives[id.0].met = MetKeys::none(self.set.problem.kv_len);
        }
        Ok(())
    }

    /// Checks that two slices are of the same tokens and heads, the second of a sum of this
    /// content.
    fn same_rows(&mut self, rows: &Slice, sum: &Slice, content: Content) -> Result<()> {
        self.in_bounds(sum)?;
        self.sum(sum.buffer, content)?;
        if self.tokens(rows) == self.tokens(sum) && self.plan.slice_heads(rows) == self.plan.slice_heads(sum)
        {
            return Ok(());
        }
        self.fault(format!(
            "{} is not of the tokens and heads of {}",
            self.name(sum.buffer),
            self.name(rows.buffer)
        ))
    }

    /// Adds the contributions to the slice `from` to the slice `into`, which is of the same rows.
    fn carry_over(&mut self, from: &Slice, into: &Slice) -> Result<()> {
        let content = self.plan.buffer(from.buffer).content;
        for contribution in self.lives[from.buffer.0].contributions.clone() {
            let start = contribution.rows.start.max(from.tokens.start);
            let end = contribution.rows.end.min(from.tokens.end);
            if start < end {
                let at = |position: usize| position - from.tokens.start + into.tokens.start;
                self.sum(into.buffer, content)?;
                self.contribute(into, Contribution { rows: at(start)..at(end), ..contribution })?;
            }
        }
        self.sum(into.buffer, content)
    }

    fn contribute(&mut self, into: &Slice, contribution: Contribution) -> Result<()> {
        self.still_changes(into.buffer)?;
        self.lives[into.buffer.0].contributions.push(contribution);
        Ok(())
    }

    /// Checks that each row of `part`, a key or a query's row of a bias, has met exactly the tokens
    /// `others` in the query heads `q_heads`, each once. A pair that the mask hides may be left
    /// out.
    fn holds_once(&self, part: &Slice, others: &TokenRuns, q_heads: &Range<u32>) -> Result<()> {
        let problem = &self.set.problem;
        let buffer = self.plan.buffer(part.buffer);
        let of_keys = buffer.content.is_of_keys();
        let other = if of_keys { "query" } else { "key" };
        let name = || self.name(part.buffer);
        let all: Vec<&Contribution> = {
            let inside =
                |of: &&Contribution| of.rows.start < part.tokens.end && part.tokens.start < of.rows.end;
            self.lives[part.buffer.0].contributions.iter().filter(inside).collect()
        };
        if let Some(of) =
            all.iter().find(|of| of.q_heads.start < q_heads.start || of.q_heads.end > q_heads.end)
        {
            let fault = format!("{} has gradients of query heads {:?}, not {q_heads:?}", name(), of.q_heads);
            return self.fault(fault);
        }
        // Between two bounds all rows, and all heads, have the same contributions.
        let bounds = |ends: Range<u32>, of: &dyn Fn(&Contribution) -> Range<u32>| -> Vec<u32> {
            let inner = all.iter().flat_map(|one| [of(one).start, of(one).end]);
            let all: BTreeSet<u32> = inner.chain([ends.start, ends.end]).collect();
            all.into_iter().filter(|bound| (ends.start..=ends.end).contains(bound)).collect()
        };
        let position = |position: usize| u32::try_from(position).unwrap_or(u32::MAX);
        let rows = bounds(position(part.tokens.start)..position(part.tokens.end), &|of| {
            position(of.rows.start)..position(of.rows.end)
        });
        let heads = bounds(q_heads.clone(), &|of| of.q_heads.clone());
        let none = MetKeys::none(self.others(buffer.content));
        let mut declared = none.clone();
        if !declared.exist(others) {
            return self.fault(format!("{} declares a {other} that does not exist", name()));
        }
        if declared.meet(others).is_some() {
            return self.fault(format!("{} declares a {other} twice", name()));
        }
        for (rows, head) in
            rows.windows(2).flat_map(|rows| heads.windows(2).map(move |heads| (rows, heads[0])))
        {
            let tokens = buffer.tokens.slice(rows[0] as usize..rows[1] as usize);
            let mut met = none.clone();
            for of in &all {
                let here = of.rows.contains(&(rows[0] as usize)) && of.q_heads.contains(&head);
                let twice = if here { met.meet(&of.others) } else { None };
                if let Some(token) = twice {
                    return self
                        .fault(format!("{} counts {other} {token} twice for tokens {tokens}", name()));
                }
            }
            if let Some(token) = met.without(&declared).keys().iter().next() {
                return self.fault(format!(
                    "{} has gradients of {other} {token}, which it does not declare",
                    name()
                ));
            }
            let missing = declared.without(&met).keys();
            let (queries, keys) = if of_keys { (&missing, &tokens) } else { (&tokens, &missing) };
            if !missing.is_empty() && lower::any_visible(problem, queries, keys) {
                return self.fault(format!(
                    "{} lacks gradients of {other} tokens {missing} in head {head} for tokens {tokens}",
                    name()
                ));
            }
        }
        Ok(())
    }
}
