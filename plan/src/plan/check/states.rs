//! Running states in the proof of a plan: the keys that each has met, and the ranks that it travels
//! between.

use super::met::MetKeys;
use super::proof::RankProof;
use crate::error::Result;
use crate::plan::{BufferId, Content, Slice};

impl RankProof<'_> {
    pub(super) fn merge(&mut self, from: BufferId, into: BufferId) -> Result<()> {
        self.state(from)?;
        self.changed(into)?;
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

    /// Checks that every key that a row of `state` can see has been met once; keys that were not
    /// met are invisible to all rows.
    pub(super) fn every_visible_key_once(&self, state: BufferId) -> Result<()> {
        let problem = &self.set.problem;
        let gaps = self.lives[state.0].met.gaps();
        // No row can see a key that was not met where there is none.
        if gaps.are_none() {
            return Ok(());
        }
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

    /// Checks that `id` can be used as a running state; the first use of a state declares it empty.
    pub(super) fn state(&mut self, id: BufferId) -> Result<()> {
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
            self.lives[id.0].met = MetKeys::none(self.set.problem.kv_len);
        }
        Ok(())
    }

    /// As [`Self::state`], for a step that changes the state.
    pub(super) fn changed(&mut self, id: BufferId) -> Result<()> {
        self.state(id)?;
        if self.lives[id.0].sent {
            return self.fault(format!("{} is changed after it was sent", self.name(id)));
        }
        Ok(())
    }

    /// Checks that a state is sent whole, with the keys that it declares. From then on it is only
    /// read.
    pub(super) fn send_state(&mut self, part: &Slice) -> Result<()> {
        self.in_bounds(part)?;
        let id = part.buffer;
        if *part != self.plan.whole(id) {
            return self.fault(format!("only a part of {} is sent", self.name(id)));
        }
        self.state(id)?;
        let keys = &self.plan.buffer(id).met;
        if !self.lives[id.0].met.are(keys) {
            return self
                .fault(format!("{} has not met exactly the keys {keys} when it is sent", self.name(id)));
        }
        self.lives[id.0].sent = true;
        Ok(())
    }

    /// Takes a state that is received: it has met the keys that it declares.
    pub(super) fn receive_state(&mut self, id: BufferId) -> Result<()> {
        if self.lives[id.0].live {
            return self.fault(format!("{} is received into", self.name(id)));
        }
        self.state(id)?;
        let keys = &self.plan.buffer(id).met;
        if !self.lives[id.0].met.exist(keys) {
            return self.fault(format!("{} has met keys that do not exist", self.name(id)));
        }
        match self.lives[id.0].met.meet(keys) {
            Some(key) => self.fault(format!("{} has met key {key} twice", self.name(id))),
            None => Ok(()),
        }
    }
}
