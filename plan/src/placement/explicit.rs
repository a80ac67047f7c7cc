//! Token lists that the caller gives, instead of a dealer.

use std::ops::Range;

use kyklos_rank::Rank;

use super::Placement;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::tokens::TokenRuns;

impl Placement {
    /// The placement in which each rank owns the tokens of its list, in this order: any token on
    /// any rank. A list may be empty. The dealers of [`PlacementKind`](crate::PlacementKind)
    /// make such lists too.
    ///
    /// `total` counts all tokens, and `replicated` names those that every rank holds and none owns:
    /// of keys, the replicated keys of the problem; of queries, none. Use the placements of
    /// queries and keys with [`plan_placed`](crate::plan_placed).
    ///
    /// ```
    /// use kyklos_plan::{AttentionProblem, Dtype, Mask, Mesh, Placement, Strategy, TokenRuns, plan, plan_placed};
    ///
    /// // Blocks of 16 tokens, in turn on two ranks, as in a paged cache. The queries are the last 8 tokens, on rank 1.
    /// let problem = AttentionProblem::new([1, 64, 8, 2, 64], Dtype::F32, Mask::causal())?.with_queries(8, 56)?;
    /// let mesh = Mesh::new(1, 2)?;
    /// let blocks = |first: u32| TokenRuns::from_positions((0..64).filter(|token| token / 16 % 2 == first));
    /// let keys = Placement::explicit(mesh, 64, 0..0, vec![blocks(0), blocks(1)])?;
    /// let queries = Placement::explicit(mesh, 8, 0..0, vec![TokenRuns::default(), TokenRuns::contiguous(0..8)])?;
    /// let set = plan_placed(&problem, mesh, queries, keys, Strategy::PassQ)?;
    /// assert_eq!(plan::check(&set)?.len(), 2);
    /// # Ok::<(), kyklos_plan::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Request`] unless there is a list for each rank and every token of `0..total` has
    /// exactly one owner, or is replicated. It names the token and the ranks.
    pub fn explicit(mesh: Mesh, total: u32, replicated: Range<u32>, lists: Vec<TokenRuns>) -> Result<Self> {
        let size = mesh.size();
        if lists.len() != size as usize {
            return Err(Error::request(
                format!("{} token lists for {size} ranks", lists.len()),
                format!("give one for each rank of the mesh {mesh}; a list may be empty"),
            ));
        }
        if replicated.start > replicated.end || replicated.end > total {
            return Err(Error::request(
                format!("tokens {}..{} of {total} on every rank", replicated.start, replicated.end),
                "name an ascending range of tokens that exist",
            ));
        }
        let shared = TokenRuns::contiguous(replicated.clone());
        let placement =
            |ranks| Self { kind: None, mesh, total, replicated: shared, ranks, spare: Vec::new() };
        if covers_once(total, &replicated, &lists) {
            return Ok(placement(lists));
        }
        let mut seen = Seen::new(total);
        for (rank, list) in (0..).map(Rank).zip(&lists) {
            for run in list.runs() {
                let last =
                    u64::from(run.start) + u64::from(run.count.saturating_sub(1)) * u64::from(run.stride);
                if run.count > 0 && last >= u64::from(total) {
                    return Err(Error::request(
                        format!("the list of rank {rank} has token {last}, there are {total}"),
                        "tokens count from 0: name tokens that exist",
                    ));
                }
                for token in run.tokens() {
                    if replicated.contains(&token) {
                        return Err(Error::request(
                            format!("token {token} is replicated, and the list of rank {rank} has it too"),
                            "leave replicated tokens out of the lists: every rank holds them",
                        ));
                    }
                    if seen.replace(token) {
                        return Err(owned_twice(token, rank, &lists));
                    }
                }
            }
        }
        if let Some(token) = (0..total).find(|token| !replicated.contains(token) && !seen.has(*token)) {
            return Err(Error::request(
                format!("token {token} of {total} is in none of the {size} token lists"),
                "give every token that is not replicated one owner",
            ));
        }
        Ok(placement(lists))
    }

    /// The placement in which every rank of `mesh` holds all of `0..total`, and none owns any: that
    /// of the queries of a problem with
    /// [`same_queries`](crate::AttentionProblem::same_queries).
    pub fn everywhere(mesh: Mesh, total: u32) -> Self {
        let replicated = TokenRuns::contiguous(0..total);
        let ranks = vec![TokenRuns::default(); mesh.size() as usize];
        Self { kind: None, mesh, total, replicated, ranks, spare: Vec::new() }
    }

    /// The same tokens, in tensors that have room for more: `rows` for each rank, rows of each
    /// batch entry behind its tokens. Only the keys and values of a rank may have them.
    ///
    /// # Errors
    /// [`Error::Request`] unless there is a number for each rank.
    pub fn with_spare(self, rows: Vec<u32>) -> Result<Self> {
        if rows.len() != self.ranks.len() {
            return Err(Error::request(
                format!("{} numbers of spare rows for {} ranks", rows.len(), self.ranks.len()),
                format!("give one for each rank of the mesh {}", self.mesh),
            ));
        }
        Ok(Self { spare: rows, ..self })
    }

    /// The same list for each rank, on another mesh of as many ranks. A shard has the tokens of its
    /// ranks, one after the other, so this is no longer the placement of a dealer, unless the
    /// mesh is the same.
    ///
    /// # Errors
    /// [`Error::Request`] for a mesh with another number of ranks.
    pub fn on_mesh(&self, mesh: Mesh) -> Result<Self> {
        if mesh.size() != self.mesh.size() {
            return Err(Error::request(
                format!("token lists of {} ranks on the mesh {mesh}", self.mesh.size()),
                format!("use a mesh of {} ranks", self.mesh.size()),
            ));
        }
        Ok(Self { kind: self.kind.filter(|_| mesh == self.mesh), mesh, ..self.clone() })
    }

    /// Whether every token has an owner or is replicated. Placements of a few rows lack some.
    pub(crate) fn is_complete(&self) -> bool {
        let owned: usize = self.ranks.iter().map(TokenRuns::len).sum();
        owned + self.replicated.len() == self.total as usize
    }
}

/// Whether `lists` and `replicated` together have each token of `0..total` once. Known from the
/// runs alone where all of them are of adjacent tokens; otherwise false.
pub(crate) fn covers_once(total: u32, replicated: &Range<u32>, lists: &[TokenRuns]) -> bool {
    let mut ranges = vec![(u64::from(replicated.start), u64::from(replicated.end))];
    for run in lists.iter().flat_map(TokenRuns::runs) {
        if run.stride != 1 {
            return false;
        }
        ranges.push((u64::from(run.start), u64::from(run.start) + u64::from(run.count)));
    }
    ranges.retain(|(start, end)| start < end);
    ranges.sort_unstable();
    let mut next = 0;
    for (start, end) in ranges {
        if start != next {
            return false;
        }
        next = end;
    }
    next == u64::from(total)
}

/// The refusal of `token`, which `rank` owns again.
fn owned_twice(token: u32, rank: Rank, lists: &[TokenRuns]) -> Error {
    let has = |list: &TokenRuns| list.iter().any(|other| other == token);
    let first = (0..).map(Rank).zip(lists).find(|(_, list)| has(list)).map_or(rank, |(first, _)| first);
    let mismatch = if first == rank {
        format!("the list of rank {rank} has token {token} twice")
    } else {
        format!("token {token} is in the lists of rank {first} and rank {rank}")
    };
    Error::request(mismatch, "give every token that is not replicated one owner")
}

/// A set of tokens, one bit each.
struct Seen(Vec<u64>);

impl Seen {
    fn new(total: u32) -> Self {
        Self(vec![0; (total as usize).div_ceil(64)])
    }

    fn has(&self, token: u32) -> bool {
        (self.0[token as usize / 64] >> (token % 64)) & 1 == 1
    }

    /// Adds `token`; returns whether it was there.
    fn replace(&mut self, token: u32) -> bool {
        let was = self.has(token);
        self.0[token as usize / 64] |= 1 << (token % 64);
        was
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::Run;

    fn explicit(total: u32, replicated: Range<u32>, lists: &[&[u32]]) -> Result<Placement> {
        let mesh = Mesh::new(1, u32::try_from(lists.len()).unwrap())?;
        let lists = lists.iter().map(|list| TokenRuns::from_positions(list.iter().copied())).collect();
        Placement::explicit(mesh, total, replicated, lists)
    }

    #[test]
    fn any_owner_and_any_order_is_taken() {
        let placement = explicit(9, 3..5, &[&[8, 0, 5], &[], &[7, 6, 2, 1]]).unwrap();
        assert_eq!((placement.kind(), placement.name(), placement.total()), (None, "explicit", 9));
        assert_eq!(placement.held_by(Rank(0)).iter().collect::<Vec<_>>(), [3, 4, 8, 0, 5]);
        assert_eq!(placement.of_rank(Rank(2)).iter().collect::<Vec<_>>(), [7, 6, 2, 1]);
        assert!(placement.is_complete());
        assert!(explicit(0, 0..0, &[&[], &[]]).unwrap().is_complete());
        assert!(explicit(4, 0..4, &[&[], &[]]).unwrap().is_complete());
    }

    #[test]
    fn a_token_without_exactly_one_owner_is_refused_by_its_number_and_ranks() {
        for (total, replicated, lists, expected) in [
            (3, 0..0, &[&[0, 1][..], &[1, 2]][..], "token 1 is in the lists of rank 0 and rank 1"),
            (3, 0..0, &[&[0, 1], &[2, 2]], "the list of rank 1 has token 2 twice"),
            (4, 0..0, &[&[0, 1], &[2]], "token 3 of 4 is in none of the 2 token lists"),
            (3, 0..0, &[&[0, 1], &[2, 3]], "the list of rank 1 has token 3, there are 3"),
            (4, 1..3, &[&[0, 1], &[3]], "token 1 is replicated, and the list of rank 0 has it too"),
            (4, 3..5, &[&[0, 1], &[2]], "tokens 3..5 of 4 on every rank"),
        ] {
            let error = explicit(total, replicated, lists).unwrap_err();
            assert!(error.is_request() && error.to_string().starts_with(expected), "{error}");
        }
        let two = Mesh::new(2, 1).unwrap();
        let error = Placement::explicit(two, 1, 0..0, vec![TokenRuns::contiguous(0..1)]).unwrap_err();
        assert!(error.to_string().starts_with("1 token lists for 2 ranks"), "{error}");
        // The last token of a run may be beyond what 32 bits hold.
        let mut far = TokenRuns::default();
        far.push(Run { start: 0, count: 3, stride: u32::MAX });
        let error = Placement::explicit(Mesh::new(1, 1).unwrap(), 8, 0..0, vec![far]).unwrap_err();
        assert!(error.to_string().contains("token 8589934590, there are 8"), "{error}");
    }

    /// The quick answer is never wrong, and is given for runs of adjacent tokens.
    #[test]
    fn what_covers_every_token_once_is_known_from_runs() {
        let runs = |positions: &[u32]| TokenRuns::from_positions(positions.iter().copied());
        for (total, replicated, lists, covers) in [
            (6, 0..0, [runs(&[0, 1, 4, 5]), runs(&[2, 3])], true),
            (6, 2..4, [runs(&[4, 5]), runs(&[0, 1])], true),
            (6, 0..0, [runs(&[0, 1, 4]), runs(&[2, 3])], false),
            (6, 0..0, [runs(&[0, 1, 2, 3, 4, 5]), runs(&[3])], false),
            (6, 2..4, [runs(&[4, 5, 3]), runs(&[0, 1])], false),
            (5, 0..0, [runs(&[0, 1, 2, 3, 4, 5]), runs(&[])], false),
            (0, 0..0, [runs(&[]), runs(&[])], true),
        ] {
            assert_eq!(covers_once(total, &replicated, &lists), covers, "{total} {replicated:?} {lists:?}");
            let mesh = Mesh::new(1, 2).unwrap();
            assert_eq!(Placement::explicit(mesh, total, replicated, lists.to_vec()).is_ok(), covers);
        }
    }

    #[test]
    fn lists_move_to_a_mesh_of_as_many_ranks() {
        let placement = explicit(6, 0..0, &[&[5, 0], &[], &[3, 1], &[2, 4]]).unwrap();
        let moved = placement.on_mesh(Mesh::new(2, 2).unwrap()).unwrap();
        assert_eq!(moved.ranks(), placement.ranks());
        assert_eq!(moved.of_shard(1).iter().collect::<Vec<_>>(), [3, 1, 2, 4]);
        assert!(placement.on_mesh(Mesh::new(1, 3).unwrap()).unwrap_err().is_request());
    }
}
