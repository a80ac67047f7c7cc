//! Sums of gradients in the proof of a backward plan: every visible (query, key) pair counts once in the gradient of its query,
//! and once in that of its key.

use std::collections::BTreeSet;
use std::ops::Range;

use super::met::MetKeys;
use super::proof::{Contribution, RankProof};
use crate::mesh::kv_heads_for;
use crate::plan::{BufferId, Content, Slice, Step};
use crate::{Result, TokenRuns, lower};

impl RankProof<'_> {
    /// Checks [`Step::AttendBackward`].
    pub(super) fn attend_backward(&mut self, step: &Step) -> Result<()> {
        let Step::AttendBackward { q, d_o, stats, kv, dq, d_kv, bias } = step else { return Ok(()) };
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
        let needed = kv_heads_for(&self.world.problem, &q_heads);
        if needed.start < kv_heads.start || needed.end > kv_heads.end {
            return self
                .fault(format!("query heads {q_heads:?} need kv heads {needed:?}, there are {kv_heads:?}"));
        }
        self.pairs(q, bias.as_ref())?;

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
        self.same_keys(kv, d_kv)?;
        let queries = self.tokens(q).into_owned();
        self.contribute(d_kv, Contribution { keys: d_kv.tokens.clone(), queries, q_heads })
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
        self.sum(from, Content::KeyValueGradSum)?;
        self.same_keys(&whole, into)?;
        self.carry_over(&whole, into)
    }

    /// Checks that a sum of gradients of queries is added to one of the same queries over other keys.
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

    /// Checks a copy of a part of a sum of gradients of keys into another sum.
    pub(super) fn copy_sum(&mut self, from: &Slice, into: &Slice) -> Result<()> {
        self.not_empty(from)?;
        self.sum(from.buffer, Content::KeyValueGradSum)?;
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
        let becomes =
            if sum.content == Content::QueryGradSum { Content::QueryGrad } else { Content::KeyValueGrad };
        self.sum(from.buffer, sum.content)?;
        if *from != self.plan.whole(from.buffer) {
            return self.fault(format!("only a part of {} is rounded", self.name(from.buffer)));
        }
        self.same_meaning_but_content(from.buffer, into, sum.content, becomes)?;
        if sum.content == Content::QueryGradSum {
            self.every_visible_key_once(from.buffer)?;
        } else {
            let (all, group) =
                (TokenRuns::contiguous(0..self.world.problem.q_len), self.world.problem.group());
            let q_heads = sum.heads.start * group..sum.heads.end * group;
            self.holds_once(from, &all, &q_heads)?;
        }
        self.lives[from.buffer.0].sent = true;
        self.write(&self.plan.whole(into))
    }

    /// Checks that a sum of gradients is sent with the contributions that it declares: of keys any part of it, of queries the whole.
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
        self.sum(id, Content::KeyValueGradSum)?;
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
        self.sum(id, Content::KeyValueGradSum)?;
        let buffer = self.plan.buffer(id);
        let (queries, q_heads) = (buffer.met.clone(), buffer.met_heads.clone());
        let problem = &self.world.problem;
        if queries.runs().iter().any(|run| run.last() >= problem.q_len) || q_heads.end > problem.q_heads {
            return self.fault(format!("{} has met queries that do not exist", self.name(id)));
        }
        self.contribute(&self.plan.whole(id), Contribution { keys: 0..buffer.tokens.len(), queries, q_heads })
    }

    fn receive_sum_of_queries(&mut self, id: BufferId) -> Result<()> {
        self.sum(id, Content::QueryGradSum)?;
        let keys = &self.plan.buffer(id).met;
        if keys.runs().iter().any(|run| run.last() >= self.world.problem.kv_len) {
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
            self.lives[id.0].met = MetKeys::none(self.world.problem.kv_len);
        }
        Ok(())
    }

    /// Checks that two slices are of the same keys and heads, the second of a sum.
    fn same_keys(&mut self, keys: &Slice, sum: &Slice) -> Result<()> {
        self.in_bounds(sum)?;
        self.sum(sum.buffer, Content::KeyValueGradSum)?;
        if self.tokens(keys) == self.tokens(sum) && self.plan.slice_heads(keys) == self.plan.slice_heads(sum)
        {
            return Ok(());
        }
        self.fault(format!(
            "{} is not of the keys and heads of {}",
            self.name(sum.buffer),
            self.name(keys.buffer)
        ))
    }

    /// Adds the contributions to the slice `from` to the slice `into`, which is of the same keys.
    fn carry_over(&mut self, from: &Slice, into: &Slice) -> Result<()> {
        for contribution in self.lives[from.buffer.0].contributions.clone() {
            let start = contribution.keys.start.max(from.tokens.start);
            let end = contribution.keys.end.min(from.tokens.end);
            if start < end {
                let at = |position: usize| position - from.tokens.start + into.tokens.start;
                self.sum(into.buffer, Content::KeyValueGradSum)?;
                self.contribute(into, Contribution { keys: at(start)..at(end), ..contribution })?;
            }
        }
        self.sum(into.buffer, Content::KeyValueGradSum)
    }

    fn contribute(&mut self, into: &Slice, contribution: Contribution) -> Result<()> {
        self.still_changes(into.buffer)?;
        self.lives[into.buffer.0].contributions.push(contribution);
        Ok(())
    }

    /// Checks that each key of `part` has the gradients of exactly the queries `queries` in the query heads `q_heads`, each once.
    /// A query that sees none of the keys may be left out.
    fn holds_once(&self, part: &Slice, queries: &TokenRuns, q_heads: &Range<u32>) -> Result<()> {
        let problem = &self.world.problem;
        let buffer = self.plan.buffer(part.buffer);
        let name = || self.name(part.buffer);
        let all: Vec<&Contribution> = {
            let inside =
                |of: &&Contribution| of.keys.start < part.tokens.end && part.tokens.start < of.keys.end;
            self.lives[part.buffer.0].contributions.iter().filter(inside).collect()
        };
        if let Some(other) =
            all.iter().find(|of| of.q_heads.start < q_heads.start || of.q_heads.end > q_heads.end)
        {
            return self.fault(format!(
                "{} has gradients of query heads {:?}, not {q_heads:?}",
                name(),
                other.q_heads
            ));
        }
        // Between two bounds all keys, and all heads, have the same contributions.
        let bounds = |ends: Range<u32>, of: &dyn Fn(&Contribution) -> Range<u32>| -> Vec<u32> {
            let inner = all.iter().flat_map(|one| [of(one).start, of(one).end]);
            let all: BTreeSet<u32> = inner.chain([ends.start, ends.end]).collect();
            all.into_iter().filter(|bound| (ends.start..=ends.end).contains(bound)).collect()
        };
        let position = |position: usize| u32::try_from(position).unwrap_or(u32::MAX);
        let keys = bounds(position(part.tokens.start)..position(part.tokens.end), &|of| {
            position(of.keys.start)..position(of.keys.end)
        });
        let heads = bounds(q_heads.clone(), &|of| of.q_heads.clone());
        let mut declared = MetKeys::none(problem.q_len);
        if declared.meet(queries).is_some() {
            return self.fault(format!("{} declares a query twice", name()));
        }
        let others = declared.gaps();
        for (keys, head) in
            keys.windows(2).flat_map(|keys| heads.windows(2).map(move |heads| (keys, heads[0])))
        {
            let tokens = buffer.tokens.slice(keys[0] as usize..keys[1] as usize);
            let mut met = MetKeys::none(problem.q_len);
            for of in &all {
                let here = of.keys.contains(&(keys[0] as usize)) && of.q_heads.contains(&head);
                let twice = if here { met.meet(&of.queries) } else { None };
                if let Some(query) = twice {
                    return self.fault(format!("{} counts query {query} twice for keys {tokens}", name()));
                }
            }
            let gaps = met.gaps();
            let missing: Vec<u32> =
                queries.iter().filter(|query| gaps.first_in(*query..query + 1).is_some()).collect();
            let undeclared = met.keys().iter().find(|query| others.first_in(*query..query + 1).is_some());
            if let Some(query) = undeclared {
                return self
                    .fault(format!("{} has gradients of query {query}, which it does not declare", name()));
            }
            let missing = TokenRuns::from_positions(missing);
            if !missing.is_empty() && lower::any_visible(problem, &missing, &tokens) {
                return self.fault(format!(
                    "{} lacks gradients of queries {missing} in head {head} for keys {tokens}",
                    name()
                ));
            }
        }
        Ok(())
    }
}
