//! Which rank holds which tokens of a cache, in which rows of its tensors. Every rank keeps the
//! same record for all ranks.

use std::ops::Range;

use kyklos_transport::Rank;

use kyklos_plan::{Run, TokenRuns};

/// The record of a cache, for all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Holdings {
    /// By rank.
    holders: Vec<Holder>,
    /// Tokens that were appended, those that are no longer held included. The next token gets this
    /// position.
    len: u32,
    /// The tokens before this position were dropped because no later query sees them.
    first: u32,
    /// Tokens that only lost ranks held, ascending.
    missing: TokenRuns,
    /// The rank that takes the next token of all ranks, and how many more it takes.
    open: (Rank, u32),
}

/// What one rank holds.
#[derive(Clone, Debug, PartialEq)]
struct Holder {
    /// The contents of its rows, in order.
    rows: Vec<Rows>,
    /// Tokens that it can hold.
    most: u32,
    /// Its share of tokens that all ranks pass.
    share: f64,
}

/// Consecutive rows of a rank's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rows {
    /// Position of the first token; the others follow. None: the rows hold nothing.
    token: Option<u32>,
    count: u32,
}

impl Rows {
    /// Whether `next` continues these rows.
    fn joins(self, next: Self) -> bool {
        match (self.token, next.token) {
            (Some(first), Some(second)) => first + self.count == second,
            (None, None) => true,
            _ => false,
        }
    }
}

impl Holder {
    fn held(&self) -> u32 {
        self.rows.iter().filter(|rows| rows.token.is_some()).map(|rows| rows.count).sum()
    }

    /// Rows up to the last one that holds a token.
    fn used(&self) -> u32 {
        self.rows.iter().map(|rows| rows.count).sum()
    }

    fn room(&self) -> u32 {
        self.most.saturating_sub(self.held())
    }

    /// The rows that the next `count` tokens get: rows that hold nothing, the first ones first,
    /// then new ones.
    fn next_rows(&self, mut count: u32) -> Vec<Range<u32>> {
        let (mut found, mut at) = (Vec::new(), 0);
        for rows in &self.rows {
            if rows.token.is_none() && count > 0 {
                let taken = rows.count.min(count);
                found.push(at..at + taken);
                count -= taken;
            }
            at += rows.count;
        }
        if count > 0 {
            found.push(at..at + count);
        }
        found
    }

    /// Records that the next rows hold `tokens`, in this order.
    fn take(&mut self, tokens: &TokenRuns) {
        let mut tokens = Adjacent::of(tokens);
        let mut rows = Vec::with_capacity(self.rows.len() + tokens.ranges.len());
        for old in std::mem::take(&mut self.rows) {
            let mut left = old.count;
            while old.token.is_none()
                && left > 0
                && let Some(next) = tokens.next(left)
            {
                left -= next.count;
                push(&mut rows, next);
            }
            push(&mut rows, Rows { count: left, ..old });
        }
        while let Some(next) = tokens.next(u32::MAX) {
            push(&mut rows, next);
        }
        self.rows = rows;
    }

    /// Drops the tokens outside of `kept`.
    fn keep(&mut self, kept: &Range<u32>) {
        let mut rows = Vec::with_capacity(self.rows.len() + 2);
        for old in std::mem::take(&mut self.rows) {
            let Some(token) = old.token else {
                push(&mut rows, old);
                continue;
            };
            let end = token + old.count;
            let (from, to) = (kept.start.clamp(token, end), kept.end.clamp(token, end).max(token));
            let to = to.max(from);
            push(&mut rows, Rows { token: None, count: from - token });
            push(&mut rows, Rows { token: Some(from), count: to - from });
            push(&mut rows, Rows { token: None, count: end - to });
        }
        if rows.last().is_some_and(|rows| rows.token.is_none()) {
            rows.pop();
        }
        self.rows = rows;
    }
}

/// A list of tokens, taken from its front as ranges of adjacent tokens.
struct Adjacent {
    /// The last one is the first to be taken.
    ranges: Vec<Range<u32>>,
}

impl Adjacent {
    fn of(tokens: &TokenRuns) -> Self {
        let mut ranges: Vec<Range<u32>> = Vec::with_capacity(tokens.runs().len());
        for run in tokens.runs() {
            match run.stride {
                1 => ranges.push(run.start..run.start + run.count),
                _ => ranges.extend(run.tokens().map(|token| token..token + 1)),
            }
        }
        ranges.reverse();
        Self { ranges }
    }

    /// The next tokens, at most `most` of them.
    fn next(&mut self, most: u32) -> Option<Rows> {
        let range = self.ranges.last_mut()?;
        let rows = Rows { token: Some(range.start), count: (range.end - range.start).min(most) };
        range.start += rows.count;
        if range.start == range.end {
            self.ranges.pop();
        }
        Some(rows)
    }
}

/// Adds rows at the end, as one entry with the last ones where they follow them.
fn push(list: &mut Vec<Rows>, rows: Rows) {
    if rows.count == 0 {
        return;
    }
    match list.last_mut() {
        Some(last) if last.joins(rows) => last.count += rows.count,
        _ => list.push(rows),
    }
}

impl Holdings {
    /// An empty cache of ranks that can hold `most` tokens each, and take these shares of tokens
    /// that all ranks pass.
    pub(super) fn new(ranks: impl IntoIterator<Item = (u32, f64)>) -> Self {
        let holders =
            ranks.into_iter().map(|(most, share)| Holder { rows: Vec::new(), most, share }).collect();
        Self { holders, len: 0, first: 0, missing: TokenRuns::default(), open: (Rank(0), 0) }
    }

    /// Tokens that were appended.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// The positions of the tokens that queries may still see.
    pub(super) fn live(&self) -> Range<u32> {
        self.first..self.len
    }

    /// Tokens that only lost ranks held.
    pub(super) fn missing(&self) -> &TokenRuns {
        &self.missing
    }

    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..u32::try_from(self.holders.len()).unwrap_or(u32::MAX)).map(Rank)
    }

    /// Tokens that `rank` holds.
    pub(super) fn held(&self, rank: Rank) -> u32 {
        self.of(rank).held()
    }

    /// Tokens that `rank` can still take.
    pub(super) fn room(&self, rank: Rank) -> u32 {
        self.of(rank).room()
    }

    /// Rows of the tensors of `rank` up to the last one that holds a token.
    pub(super) fn used(&self, rank: Rank) -> u32 {
        self.of(rank).used()
    }

    /// The rows of `rank` that its next `count` tokens get.
    pub(super) fn next_rows(&self, rank: Rank, count: u32) -> Vec<Range<u32>> {
        self.of(rank).next_rows(count)
    }

    /// The positions that the ranks hold, in the order of their rows.
    pub(super) fn tokens(&self, rank: Rank) -> TokenRuns {
        let mut tokens = TokenRuns::default();
        for rows in &self.of(rank).rows {
            if let Some(start) = rows.token {
                tokens.push(Run { start, count: rows.count, stride: 1 });
            }
        }
        tokens
    }

    /// The keys of a call for each rank, one for each of its rows: the live tokens are numbered
    /// from 0. Rows that hold nothing get the numbers behind them, which no query of a causal
    /// mask sees. Also returns the count of all numbers.
    pub(super) fn keys(&self) -> (Vec<TokenRuns>, u32) {
        let mut next = self.len - self.first;
        let keys = self.holders.iter().map(|holder| {
            let mut keys = TokenRuns::default();
            for rows in &holder.rows {
                let start = match rows.token {
                    Some(token) => token - self.first,
                    None => {
                        next += rows.count;
                        next - rows.count
                    }
                };
                keys.push(Run { start, count: rows.count, stride: 1 });
            }
            keys
        });
        let keys = keys.collect();
        (keys, next)
    }

    /// Appends tokens: `own` are the tokens of each rank, numbered from 0 over all ranks.
    pub(super) fn append(&mut self, own: &[TokenRuns]) {
        let mut count = 0;
        for (holder, tokens) in self.holders.iter_mut().zip(own) {
            count += u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            let mut placed = TokenRuns::default();
            for run in tokens.runs() {
                placed.push(Run { start: self.len + run.start, ..*run });
            }
            holder.take(&placed);
        }
        self.len += count;
    }

    /// The owners of the next `count` tokens, which all ranks pass: blocks of `block` tokens, each
    /// on the rank with the fewest tokens for its share that has room. None if the ranks have
    /// no room for all of them.
    pub(super) fn share_out(&mut self, count: u32, block: u32) -> Option<Vec<TokenRuns>> {
        let mut own = vec![TokenRuns::default(); self.holders.len()];
        let mut more = vec![0; self.holders.len()];
        let (mut at, mut open) = (0, self.open);
        while at < count {
            let room = |rank: Rank| self.room(rank).saturating_sub(more[rank.0 as usize]);
            if open.1 == 0 || room(open.0) == 0 {
                let fill =
                    |rank: &Rank| f64::from(self.held(*rank) + more[rank.0 as usize]) / self.of(*rank).share;
                let takers = self.ranks().filter(|rank| room(*rank) > 0 && self.of(*rank).share > 0.0);
                open = (takers.min_by(|a, b| fill(a).total_cmp(&fill(b)))?, block);
            }
            let (rank, left) = open;
            let taken = left.min(count - at).min(room(rank));
            own[rank.0 as usize].push(Run { start: at, count: taken, stride: 1 });
            more[rank.0 as usize] += taken;
            (at, open.1) = (at + taken, left - taken);
        }
        self.open = open;
        Some(own)
    }

    /// Drops the tokens before `first`: no later query sees them.
    pub(super) fn drop_before(&mut self, first: u32) {
        if first > self.first {
            self.first = first.min(self.len);
            self.keep();
        }
    }

    /// Drops the tokens from position `len` on.
    pub(super) fn truncate(&mut self, len: u32) {
        if len < self.len {
            (self.len, self.first) = (len, self.first.min(len));
            self.keep();
        }
    }

    fn keep(&mut self) {
        let live = self.live();
        self.holders.iter_mut().for_each(|holder| holder.keep(&live));
        self.missing = TokenRuns::from_positions(self.missing.iter().filter(|token| live.contains(token)));
    }

    /// The record of the survivors `ranks`: the tokens of the others are missing.
    pub(super) fn of_ranks(&self, ranks: &[Rank]) -> Self {
        let holders: Vec<Holder> = ranks.iter().map(|rank| self.of(*rank).clone()).collect();
        let mut left = Self { holders, open: (Rank(0), 0), ..self.clone() };
        let mut held: Vec<u32> =
            left.ranks().flat_map(|rank| left.tokens(rank).iter().collect::<Vec<_>>()).collect();
        held.sort_unstable();
        let mut held = held.into_iter().peekable();
        left.missing =
            TokenRuns::from_positions(self.live().filter(|token| held.next_if_eq(token).is_none()));
        left
    }

    /// Records that missing tokens are held again: `own` are the tokens of each rank, numbered from
    /// 0 over all missing ones.
    pub(super) fn restore(&mut self, own: &[TokenRuns]) {
        let missing: Vec<u32> = std::mem::take(&mut self.missing).iter().collect();
        for (holder, tokens) in self.holders.iter_mut().zip(own) {
            holder.take(&TokenRuns::from_positions(tokens.iter().map(|index| missing[index as usize])));
        }
    }

    /// All of it, for a comparison between ranks.
    pub(super) fn digest(&self) -> u64 {
        let mut hash = blake3::Hasher::new();
        let mut add = |values: &[u32]| {
            for value in values {
                hash.update(&value.to_le_bytes());
            }
        };
        add(&[self.len, self.first, self.open.0.0, self.open.1]);
        for holder in &self.holders {
            let share = holder.share.to_bits();
            add(&[holder.most, share as u32, (share >> 32) as u32]);
            add(&[u32::try_from(holder.rows.len()).unwrap_or(u32::MAX)]);
            for rows in &holder.rows {
                add(&[rows.token.unwrap_or(u32::MAX), rows.count]);
            }
        }
        for token in self.missing.iter() {
            add(&[token]);
        }
        let mut first = [0; 8];
        first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
        u64::from_le_bytes(first)
    }

    fn of(&self, rank: Rank) -> &Holder {
        &self.holders[rank.0 as usize]
    }
}

#[cfg(test)]
mod tests;
