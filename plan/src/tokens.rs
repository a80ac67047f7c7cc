//! Lists of global tokens and their order: used alike by placement, check and lowering.

use smallvec::SmallVec;

/// `count` tokens: `start`, `start + stride`, `start + 2·stride`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Run {
    /// First global token.
    pub start: u32,
    /// Number of tokens.
    pub count: u32,
    /// Distance between two, at least 1.
    pub stride: u32,
}

/// An ordered list of global tokens. Lists of the same tokens in the same order are equal, even if
/// their runs differ.
#[derive(Clone, Debug, Default)]
pub struct TokenRuns {
    /// Most lists are one run, and large plans have millions of lists.
    runs: SmallVec<[Run; 1]>,
}

impl serde::Serialize for TokenRuns {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.runs())
    }
}

impl PartialEq for TokenRuns {
    fn eq(&self, other: &Self) -> bool {
        self.runs == other.runs || self.iter().eq(other.iter())
    }
}

impl Eq for TokenRuns {}

impl TokenRuns {
    /// The tokens `range`, ascending.
    pub fn contiguous(range: std::ops::Range<u32>) -> Self {
        let mut tokens = Self::default();
        tokens.push(Run { start: range.start, count: range.end.saturating_sub(range.start), stride: 1 });
        tokens
    }

    /// The list of these tokens, in this order.
    pub fn from_positions(positions: impl IntoIterator<Item = u32>) -> Self {
        let mut tokens = Self::default();
        for start in positions {
            tokens.push(Run { start, count: 1, stride: 1 });
        }
        tokens
    }

    /// Appends a run, and joins it to the last run if it continues that run.
    pub fn push(&mut self, run: Run) {
        if run.count == 0 {
            return;
        }
        // A run of one has no stride of its own.
        let run = Run { stride: if run.count == 1 { 1 } else { run.stride }, ..run };
        if let Some(last) = self.runs.last_mut() {
            let gap = run.start.wrapping_sub(last.last());
            let stride_fits = |stride: u32, count: u32| count == 1 || stride == gap;
            if run.start > last.last()
                && stride_fits(last.stride, last.count)
                && stride_fits(run.stride, run.count)
            {
                last.stride = gap;
                last.count += run.count;
                return;
            }
        }
        self.runs.push(run);
    }

    /// Appends all tokens of `other`.
    pub fn extend(&mut self, other: &Self) {
        for run in &other.runs {
            self.push(*run);
        }
    }

    /// The same list with tokens renumbered around `gap`: the tokens from its start on move behind
    /// its end.
    pub(crate) fn around(&self, gap: &std::ops::Range<u32>) -> Self {
        let mut out = Self::default();
        for run in &self.runs {
            let before = gap.start.saturating_sub(run.start).div_ceil(run.stride).min(run.count);
            out.push(Run { count: before, ..*run });
            if before < run.count {
                let start = run.start + before * run.stride + gap.len() as u32;
                out.push(Run { start, count: run.count - before, ..*run });
            }
        }
        out
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.runs.iter().map(|run| run.count as usize).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The runs, in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The tokens, in order.
    pub(crate) fn to_vec(&self) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(self.len());
        for run in &self.runs {
            match run.stride {
                1 => tokens.extend(run.start..=run.last()),
                _ => tokens.extend(run.tokens()),
            }
        }
        tokens
    }

    /// The same list in the runs of [`Self::from_positions`]: equal lists have equal runs then.
    pub fn canonical(&self) -> Self {
        // Runs of several adjacent tokens, with gaps between them, are found again token by token.
        let many = |run: &Run| run.stride == 1 && run.count > 1;
        let joined = |pair: &[Run]| pair[0].last() + 1 == pair[1].start;
        let before_last = self.runs.len().saturating_sub(1);
        let last_is_plain = self.runs.last().is_none_or(|run| run.stride == 1);
        if self.runs[..before_last].iter().all(many) && last_is_plain && !self.runs.windows(2).any(joined) {
            return self.clone();
        }
        Self::from_positions(self.iter())
    }

    /// The tokens, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(Run::tokens)
    }

    /// The tokens at the list positions `range`, in order.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Self {
        let mut out = Self::default();
        let mut at = 0;
        for run in &self.runs {
            let (begin, end) = (at, at + run.count as usize);
            at = end;
            let (from, to) = (range.start.max(begin), range.end.min(end));
            if from < to {
                out.push(Run {
                    start: run.start + (from - begin) as u32 * run.stride,
                    count: (to - from) as u32,
                    stride: run.stride,
                });
            }
        }
        out
    }
}

/// Finds the tokens of a list in ranges, many times: by its runs if they are few or ascend, else in
/// a sorted copy.
pub(crate) enum TokenIndex<'a> {
    Runs(&'a [Run]),
    Ascending(&'a [Run]),
    Sorted(Vec<u32>),
}

impl<'a> TokenIndex<'a> {
    pub(crate) fn new(tokens: &'a TokenRuns) -> Self {
        if tokens.runs.len() <= FEW_RUNS {
            return Self::Runs(&tokens.runs);
        }
        if tokens.runs.windows(2).all(|pair| pair[0].last() < pair[1].start) {
            return Self::Ascending(&tokens.runs);
        }
        let mut sorted: Vec<u32> = tokens.iter().collect();
        sorted.sort_unstable();
        Self::Sorted(sorted)
    }

    /// Whether a token of the list lies in `lo..hi`.
    pub(crate) fn meets(&self, lo: u32, hi: u32) -> bool {
        match self {
            Self::Runs(runs) => runs.iter().any(|run| run.meets(lo, hi)),
            Self::Ascending(runs) => {
                let from = runs.partition_point(|run| run.last() < lo);
                runs[from..].iter().take_while(|run| run.start < hi).any(|run| run.meets(lo, hi))
            }
            Self::Sorted(sorted) => sorted.get(below(sorted, lo)).is_some_and(|token| *token < hi),
        }
    }
}

/// Number of tokens below `bound` in a sorted list.
pub(crate) fn below(sorted: &[u32], bound: u32) -> usize {
    sorted.partition_point(|token| *token < bound)
}

/// Lists of more runs are searched in a sorted copy.
pub(crate) const FEW_RUNS: usize = 64;

impl Run {
    /// Whether a token of the run lies in `lo..hi`.
    pub fn meets(&self, lo: u32, hi: u32) -> bool {
        // The first token of the run that is not below `lo`.
        let steps = lo.saturating_sub(self.start).div_ceil(self.stride);
        steps < self.count && self.start + steps * self.stride < hi
    }

    /// The tokens of the run, ascending.
    pub fn tokens(&self) -> impl Iterator<Item = u32> + use<> {
        let Self { start, count, stride } = *self;
        (0..count).map(move |i| start + i * stride)
    }

    /// The last token of the run; the run must not be empty.
    pub(crate) fn last(&self) -> u32 {
        self.start + (self.count - 1) * self.stride
    }
}

impl std::fmt::Display for TokenRuns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.runs.is_empty() {
            return f.write_str("none");
        }
        for (i, run) in self.runs.iter().enumerate() {
            if i == 4 && self.runs.len() > 5 {
                return write!(f, " … {} runs", self.runs.len());
            }
            let space = if i == 0 { "" } else { " " };
            match (run.count, run.stride) {
                (1, _) => write!(f, "{space}{}", run.start)?,
                (_, 1) => write!(f, "{space}{}..{}", run.start, run.start + run.count)?,
                (_, stride) => write!(f, "{space}{}..{}:{stride}", run.start, run.last() + 1)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_token_lists_are_equal_however_they_were_built() {
        let whole = TokenRuns::contiguous(3..9);
        let mut parts = TokenRuns::contiguous(3..4);
        parts.extend(&TokenRuns::contiguous(4..7));
        parts.extend(&TokenRuns::contiguous(7..9));
        assert_eq!(whole, parts);
        assert_eq!(whole, TokenRuns::from_positions(3..9));
        let mut parts = TokenRuns::from_positions([0, 5, 6, 7]);
        assert_eq!(parts, {
            let mut other = TokenRuns::contiguous(0..1);
            other.extend(&TokenRuns::contiguous(5..8));
            other
        });
        parts.push(Run { start: 2, count: 1, stride: 1 });
        assert_ne!(parts, TokenRuns::from_positions([0, 5, 6, 7]));
        assert_eq!(TokenRuns::from_positions([0, 4, 8]).runs(), &[Run { start: 0, count: 3, stride: 4 }]);
    }

    #[test]
    fn an_index_finds_the_tokens_of_a_list_of_many_runs() {
        // Each third token, downwards: as many runs as tokens.
        let many = TokenRuns::from_positions((10..310).step_by(3).rev());
        let few = TokenRuns::from_positions((10..310).step_by(3));
        let (many, few) = (TokenIndex::new(&many), TokenIndex::new(&few));
        assert!(matches!((&many, &few), (TokenIndex::Sorted(_), TokenIndex::Runs(_))));
        for lo in 0..320 {
            for hi in lo..320 {
                let expected = (lo..hi).any(|token| (10..310).contains(&token) && (token - 10) % 3 == 0);
                assert_eq!([many.meets(lo, hi), few.meets(lo, hi)], [expected; 2], "{lo}..{hi}");
            }
        }
    }

    #[test]
    fn a_slice_of_a_list_is_the_list_of_the_slice() {
        let positions: Vec<u32> = (0..7).chain((20..40).step_by(3)).chain([5, 100]).collect();
        let tokens = TokenRuns::from_positions(positions.iter().copied());
        assert_eq!(tokens.iter().collect::<Vec<_>>(), positions);
        for from in 0..=positions.len() {
            for to in from..=positions.len() {
                let slice: Vec<u32> = tokens.slice(from..to).iter().collect();
                assert_eq!(slice, &positions[from..to]);
            }
        }
    }

    /// Lists in runs that were cut anywhere: the canonical runs, the index and the plain list are
    /// those of the tokens.
    #[test]
    fn runs_that_are_cut_anywhere_mean_the_same_tokens() {
        let mut state = 7u32;
        let mut below = |bound: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % bound
        };
        for round in 0..300 {
            let mut tokens = TokenRuns::default();
            let mut start = 0;
            for _ in 0..1 + below(150) {
                start = if round % 3 == 0 { below(500) } else { start + below(3) };
                let run =
                    Run { start, count: 1 + below(4), stride: if round % 2 == 0 { 1 } else { 1 + below(3) } };
                start = run.last() + 1;
                // Not by `push`, which joins runs.
                tokens.runs.push(run);
            }
            let plain: Vec<u32> = tokens.iter().collect();
            assert_eq!(tokens.to_vec(), plain);
            assert_eq!(tokens.canonical().runs, TokenRuns::from_positions(plain.iter().copied()).runs);
            let index = TokenIndex::new(&tokens);
            for (lo, hi) in [(0, 3), (below(400), below(400)), (start, start + 9), (start / 2, start / 2 + 2)]
            {
                let meets = plain.iter().any(|token| (lo..hi).contains(token));
                assert_eq!(index.meets(lo, hi), meets, "{lo}..{hi} {plain:?}");
            }
        }
    }
}
