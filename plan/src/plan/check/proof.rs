//! The facts that a proof keeps about the buffers of one rank: written parts, messages that use
//! them, freed buffers.

use std::borrow::Cow;
use std::collections::BTreeMap;

use kyklos_rank::Rank;
use smallvec::SmallVec;

use super::met::MetKeys;
use crate::error::{Error, Result};
use crate::plan::{BufferId, Content, Plan, PlanSet, Recv, Send, Slice};
use crate::tokens::TokenRuns;

/// A rectangle of a buffer that has been written: list positions × heads.
pub(super) type Area = (std::ops::Range<usize>, std::ops::Range<u32>);

/// What was added to a part of a sum of gradients of keys, or of rows of a bias.
#[derive(Clone, Debug)]
pub(super) struct Contribution {
    /// List positions of these keys, or of the queries of these rows, in the buffer.
    pub(super) rows: std::ops::Range<usize>,
    /// The queries that met these keys, or the keys that met these queries.
    pub(super) others: TokenRuns,
    pub(super) q_heads: std::ops::Range<u32>,
}

#[derive(Default)]
pub(super) struct Life {
    /// Written parts, disjoint.
    pub(super) written: SmallVec<[Area; 1]>,
    /// Exchanges that still read it.
    pub(super) sending: SmallVec<[u32; 2]>,
    /// The exchange that is still writing it.
    pub(super) arriving: Option<u32>,
    /// For a state, and for a sum of gradients of queries: the keys it has met.
    pub(super) met: MetKeys,
    /// For a sum of gradients of keys or of a bias.
    pub(super) contributions: Vec<Contribution>,
    pub(super) live: bool,
    freed: bool,
    /// For a state: it may be read, and no longer changed.
    pub(super) sent: bool,
    pub(super) consumed: bool,
}

/// An exchange that has been posted.
pub(super) struct Posted<'a> {
    pub(super) waited: bool,
    pub(super) sends: &'a [Send],
    pub(super) recvs: &'a [Recv],
}

/// Walks a plan and keeps the history of every buffer.
pub(super) struct RankProof<'a> {
    pub(super) set: &'a PlanSet,
    pub(super) plan: &'a Plan,
    pub(super) step: Option<usize>,
    pub(super) lives: Vec<Life>,
    pub(super) exchanges: BTreeMap<u32, Posted<'a>>,
    live_bytes: u64,
    pub(super) peak_bytes: u64,
}

impl<'a> RankProof<'a> {
    pub(super) fn new(set: &'a PlanSet, plan: &'a Plan) -> Self {
        let lives = plan.buffers.iter().map(|_| Life::default()).collect();
        // Held from the start to the end, and in no buffer of the plan.
        let mut bytes = set.problem.shared_bias_bytes();
        if plan.gradients.is_some() {
            bytes += set.problem.shared_bias_gradient_bytes();
        }
        Self {
            set,
            plan,
            step: None,
            lives,
            exchanges: BTreeMap::new(),
            live_bytes: bytes,
            peak_bytes: bytes,
        }
    }

    pub(super) fn free(&mut self, id: BufferId) -> Result<()> {
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
            self.live_bytes -= self.plan.buffer(id).bytes(&self.set.problem);
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

    pub(super) fn write(&mut self, slice: &Slice) -> Result<()> {
        self.in_bounds(slice)?;
        let id = slice.buffer;
        if self.plan.is_own(id) && !self.plan.is_result(id) {
            return self.fault(format!("{} is the caller's and cannot be written", self.name(id)));
        }
        if self.plan.buffer(id).content.is_sum() {
            return self.fault(format!("{} is a sum and cannot be overwritten", self.name(id)));
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
        add(&mut self.lives[id.0].written, area);
        Ok(())
    }

    /// The global tokens of a slice; usually these are all tokens of its buffer.
    pub(super) fn tokens(&self, slice: &Slice) -> Cow<'a, TokenRuns> {
        let tokens = &self.plan.buffer(slice.buffer).tokens;
        match slice.tokens == (0..tokens.len()) {
            true => Cow::Borrowed(tokens),
            false => Cow::Owned(tokens.slice(slice.tokens.clone())),
        }
    }

    pub(super) fn same_meaning(&self, from: &Slice, into: &Slice) -> Result<()> {
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

    pub(super) fn same_meaning_but_content(
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

    pub(super) fn in_bounds(&self, slice: &Slice) -> Result<()> {
        self.exists(slice.buffer)?;
        let buffer = self.plan.buffer(slice.buffer);
        let fits = slice.tokens.start <= slice.tokens.end
            && slice.tokens.end <= buffer.tokens.len()
            && slice.heads.start <= slice.heads.end
            && slice.heads.end <= buffer.head_count();
        if !fits {
            return self.fault(format!("a slice reaches outside of {}", self.name(slice.buffer)));
        }
        if *slice != self.plan.whole(slice.buffer) && buffer.content.shares_rows(&self.set.problem) {
            return self
                .fault(format!("a slice of {} splits tokens that share a scale", self.name(slice.buffer)));
        }
        Ok(())
    }

    pub(super) fn not_empty(&self, slice: &Slice) -> Result<()> {
        self.in_bounds(slice)?;
        if slice.tokens.is_empty() || slice.heads.is_empty() {
            return self.fault(format!("a slice of {} is empty", self.name(slice.buffer)));
        }
        Ok(())
    }

    pub(super) fn exists(&self, id: BufferId) -> Result<()> {
        match self.lives.get(id.0) {
            None => self.fault(format!("there is no buffer {}", id.0)),
            Some(life) if life.freed => self.fault(format!("{} is used after it was freed", self.name(id))),
            Some(_) => Ok(()),
        }
    }

    pub(super) fn peers(&self, peers: impl ExactSizeIterator<Item = u32> + Clone, verb: &str) -> Result<()> {
        let wrong = |peer: &u32| *peer == self.plan.rank || *peer >= self.set.mesh.size();
        let mut known = vec![false; if peers.len() > 1 { self.set.mesh.size() as usize } else { 0 }];
        // A ring has one peer in each direction, which needs no list.
        let twice = match peers.len() {
            0 | 1 => None,
            _ => peers.clone().find(|peer| {
                known.get_mut(*peer as usize).is_some_and(|known| std::mem::replace(known, true))
            }),
        };
        match { peers }.find(wrong).or(twice) {
            Some(peer) => {
                self.fault(format!("an exchange {verb} rank {peer}, which is itself, unknown or named twice"))
            }
            None => Ok(()),
        }
    }

    pub(super) fn bring_to_life(&mut self, id: BufferId) {
        self.lives[id.0].live = true;
        self.live_bytes += self.plan.buffer(id).bytes(&self.set.problem);
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
    }

    pub(super) fn name(&self, id: BufferId) -> String {
        format!("`{}`", self.plan.buffer(id).name)
    }

    pub(super) fn fault<T>(&self, fault: String) -> Result<T> {
        Err(Error::plan(Rank(self.plan.rank), self.step, fault))
    }
}

fn overlap(a: &Area, b: &Area) -> Area {
    (a.0.start.max(b.0.start)..a.0.end.min(b.0.end), a.1.start.max(b.1.start)..a.1.end.min(b.1.end))
}

/// Adds an area to disjoint ones. Areas that make a rectangle together become one: a buffer that
/// many messages fill has few.
fn add(written: &mut SmallVec<[Area; 1]>, mut area: Area) {
    while let Some((place, whole)) =
        written.iter().enumerate().find_map(|(place, other)| Some((place, joined(other, &area)?)))
    {
        written.swap_remove(place);
        area = whole;
    }
    written.push(area);
}

/// The rectangle that two disjoint areas make, if they do.
fn joined(a: &Area, b: &Area) -> Option<Area> {
    let touch = |a_end, b_start, b_end, a_start| a_end == b_start || b_end == a_start;
    let same_heads = a.1 == b.1 && touch(a.0.end, b.0.start, b.0.end, a.0.start);
    let same_tokens = a.0 == b.0 && (a.1.end == b.1.start || b.1.end == a.1.start);
    (same_heads || same_tokens).then(|| {
        (a.0.start.min(b.0.start)..a.0.end.max(b.0.end), a.1.start.min(b.1.start)..a.1.end.max(b.1.end))
    })
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    #[test]
    fn pieces_that_fill_a_buffer_become_one_area() {
        // In the order in which a rank of an all-to-all takes them: from its successors on, by tokens and
        // by heads.
        let mut written = SmallVec::new();
        for u in (5..64).chain(0..5) {
            add(&mut written, (3 * u..3 * (u + 1), 0..2));
            assert!(written.len() <= 2, "{written:?}");
        }
        assert_eq!(written[..], [(0..192, 0..2)]);
        let mut written = SmallVec::new();
        for u in (60..64).chain(0..60) {
            add(&mut written, (0..7, 2 * u..2 * (u + 1)));
            assert!(written.len() <= 2, "{written:?}");
        }
        assert_eq!(written[..], [(0..7, 0..128)]);
        // Neither tokens nor heads are the same: they stay two areas, also if they touch.
        let mut written: SmallVec<[Area; 1]> = smallvec![(0..4, 0..2)];
        add(&mut written, (4..8, 0..3));
        add(&mut written, (0..4, 3..4));
        assert_eq!(written.len(), 3);
        // One area closes the gap between two.
        add(&mut written, (0..4, 2..3));
        assert_eq!(written.len(), 2);
    }
}
