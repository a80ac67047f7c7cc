//! The U × R mesh: Ulysses inside on contiguous ranks, ring outside.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use kyklos_rank::{MAX_RANKS, Rank};

use crate::error::{Error, Result};
use crate::problem::AttentionProblem;
use crate::remedy::Remedy;

/// `ulysses × ring` ranks; rank `r·U + u` is piece `u` of ring shard `r`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Mesh {
    ulysses: u32,
    ring: u32,
}

impl Mesh {
    /// A mesh of `ulysses · ring` ranks.
    ///
    /// # Errors
    /// [`Error::Request`] for a zero extent or more than [`MAX_RANKS`] ranks.
    pub fn new(ulysses: u32, ring: u32) -> Result<Self> {
        if ulysses == 0 || ring == 0 || u64::from(ulysses) * u64::from(ring) > u64::from(MAX_RANKS) {
            return Err(Error::request(
                format!("mesh {ulysses}x{ring} is not possible"),
                format!("both extents are at least 1 and their product at most {MAX_RANKS}"),
            ));
        }
        Ok(Self { ulysses, ring })
    }

    /// U: the ranks of a shard, which exchange tokens for heads.
    pub fn ulysses(self) -> u32 {
        self.ulysses
    }

    /// R: the number of shards in the ring.
    pub fn ring(self) -> u32 {
        self.ring
    }

    /// Number of ranks, U·R.
    pub fn size(self) -> u32 {
        self.ulysses * self.ring
    }

    /// (ring shard, Ulysses piece) of `rank`.
    pub fn coordinates(self, rank: Rank) -> (u32, u32) {
        (rank.0 / self.ulysses, rank.0 % self.ulysses)
    }

    /// The rank that is piece `u` of ring shard `r`.
    pub fn rank(self, r: u32, u: u32) -> Rank {
        Rank(r * self.ulysses + u)
    }

    /// Whether `problem` can be laid on this mesh.
    ///
    /// # Errors
    /// [`Error::Request`] when the Ulysses extent exceeds the query heads.
    pub fn fits(self, problem: &AttentionProblem) -> Result<()> {
        let (ulysses, heads, size) = (self.ulysses, problem.q_heads, self.size());
        if ulysses <= heads {
            return Ok(());
        }
        let best = (1..=heads).rev().find(|u| size.is_multiple_of(*u)).unwrap_or(1);
        Err(Error::request(
            format!("ulysses = {ulysses} needs at least {ulysses} query heads, the problem has {heads}"),
            Remedy::UseMesh { ulysses: best, ring: size / best },
        ))
    }

    /// Query heads of each Ulysses piece: sizes differ by at most one, larger first.
    pub fn q_heads(self, problem: &AttentionProblem) -> Vec<Range<u32>> {
        (0..self.ulysses).map(|u| self.q_heads_of(problem, u)).collect()
    }

    /// Query heads of Ulysses piece `u`.
    pub(crate) fn q_heads_of(self, problem: &AttentionProblem, u: u32) -> Range<u32> {
        let (each, more) = (problem.q_heads / self.ulysses, problem.q_heads % self.ulysses);
        let start = |u: u32| u * each + u.min(more);
        start(u)..start(u + 1)
    }

    /// Consecutive Ulysses pieces whose query heads need the same KV heads, on a mesh that
    /// `problem` fits.
    pub(crate) fn kv_groups(self, problem: &AttentionProblem) -> Vec<Range<u32>> {
        let mut groups: Vec<(Range<u32>, Range<u32>)> = Vec::new();
        for (u, q_heads) in (0..).zip(self.q_heads(problem)) {
            let heads = kv_heads_for(problem, &q_heads);
            match groups.last_mut() {
                Some((group, shared)) if *shared == heads => group.end = u + 1,
                _ => groups.push((u..u + 1, heads)),
            }
        }
        groups.into_iter().map(|(group, _)| group).collect()
    }
}

/// The KV heads that the query heads `q_heads` need.
pub(crate) fn kv_heads_for(problem: &AttentionProblem, q_heads: &Range<u32>) -> Range<u32> {
    let group = problem.group();
    q_heads.start / group..(q_heads.end - 1) / group + 1
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.ulysses, self.ring)
    }
}

impl FromStr for Mesh {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.split_once('x')
            .and_then(|(ulysses, ring)| Some((ulysses.parse().ok()?, ring.parse().ok()?)))
            .ok_or_else(|| {
                Error::request(format!("mesh `{text}` is not UxR"), "write it like 2x4: ulysses 2, ring 4")
            })
            .and_then(|(ulysses, ring)| Self::new(ulysses, ring))
    }
}
