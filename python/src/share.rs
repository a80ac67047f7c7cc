//! The tokens of each rank: by measured speed, even, or by weights.

use kyklos::{
    AttentionProblem, Error, Execution, Mask, Mesh, Placement, PlacementKind, Result, Session, SharedTokens,
    Split, Strategy, TokenRuns, deal_tokens,
};
use kyklos_transport::Rank;
use pyo3::prelude::*;

use crate::call::TokenLists;
use crate::plans::dtype_of;

/// What to share, and how.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Sharing {
    batch: u32,
    heads: u32,
    kv_heads: u32,
    dim: u32,
    dtype: String,
    q_len: u32,
    kv_len: u32,
    mask: String,
    q_offset: u32,
    fixed_order: bool,
    strategy: Option<String>,
    mesh: Option<String>,
    placement: Option<String>,
    shares: SharesOption,
}

/// `"auto"`, `"even"`, or a weight for each rank.
#[derive(FromPyObject)]
enum SharesOption {
    Name(String),
    Weights(Vec<f64>),
}

/// The tokens of all ranks, as Python gets them: of queries, of keys, the mesh, the strategy.
pub(crate) type Shared = (TokenLists, TokenLists, String, String);

/// What [`Sharing`] asks for, checked.
pub(crate) struct Request {
    problem: AttentionProblem,
    mesh: Mesh,
    strategy: Strategy,
    placement: PlacementKind,
    /// None: by the measured speed.
    split: Option<Split>,
}

impl Sharing {
    pub(crate) fn checked(&self, size: u32) -> Result<Request> {
        let Self { batch, heads, kv_heads, dim, q_len, kv_len, q_offset, .. } = self;
        let mask = self.mask.parse::<Mask>()?;
        let problem =
            AttentionProblem::new([*batch, *kv_len, *heads, *kv_heads, *dim], dtype_of(&self.dtype)?, mask)?
                .with_queries(*q_len, *q_offset)?
                .with_fixed_order(self.fixed_order)?;
        let mesh = self.mesh.as_deref().map_or_else(|| Mesh::new(1, size), str::parse)?;
        if mesh.size() != size {
            return Err(Error::request(
                format!("mesh {mesh} for {size} ranks"),
                "use a mesh of all ranks of the group, or none",
            ));
        }
        let strategy =
            self.strategy.as_deref().map_or_else(|| Ok(Strategy::of_mesh(mesh)), str::parse::<Strategy>)?;
        strategy.accepts(mesh)?;
        let placement = self.placement.as_deref().map_or_else(|| Ok(PlacementKind::default()), str::parse)?;
        let split = match &self.shares {
            SharesOption::Name(name) if name == "auto" => None,
            SharesOption::Name(name) if name == "even" => Some(Split::Even),
            SharesOption::Name(name) => {
                return Err(Error::request(
                    format!("shares {name:?} are not known"),
                    "use \"auto\", \"even\" or a weight for each rank",
                ));
            }
            SharesOption::Weights(weights) => Some(Split::Weights(weights.clone())),
        };
        // What the dealer refuses is refused before ranks measure.
        let request = Request { problem, mesh, strategy, placement, split };
        request.deal(request.split.as_ref().unwrap_or(&Split::Even))?;
        Ok(request)
    }
}

impl Request {
    /// Pairs of a query and a key that each rank attends to in a second, over all heads.
    pub(crate) fn speeds(&self, session: &mut Session) -> Result<Vec<u64>> {
        Ok(session.capacities(&self.problem)?.iter().map(|rank| rank.pairs_per_s).collect())
    }

    /// The machine of the group, in TOML.
    pub(crate) fn cluster(&self, session: &mut Session) -> Result<String> {
        Ok(session.cluster(&self.problem)?.to_toml()?)
    }

    /// Agrees with the other ranks, if speed counts.
    pub(crate) fn share(&self, session: &mut Session) -> Result<Shared> {
        match &self.split {
            None => {
                let execution =
                    Execution::new().mesh(self.mesh).strategy(self.strategy).placement(self.placement);
                let SharedTokens { queries, keys, .. } = session.share(&self.problem, &execution)?;
                Ok(self.tokens_of(&queries, &keys))
            }
            Some(split) => self.deal(split),
        }
    }

    fn deal(&self, split: &Split) -> Result<Shared> {
        let (queries, keys) = deal_tokens(&self.problem, self.mesh, self.placement, split)?;
        Ok(self.tokens_of(&queries, &keys))
    }

    fn tokens_of(&self, queries: &Placement, keys: &Placement) -> Shared {
        let lists = |placement: &Placement| -> TokenLists {
            (0..self.mesh.size()).map(|rank| ranges(placement.of_rank(Rank(rank)))).collect()
        };
        (lists(queries), lists(keys), self.mesh.to_string(), self.strategy.to_string())
    }
}

/// A list of tokens as half-open ranges.
pub(crate) fn ranges(tokens: &TokenRuns) -> Vec<(u32, u32)> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for token in tokens.iter() {
        match ranges.last_mut() {
            Some(last) if last.1 == token => last.1 += 1,
            _ => ranges.push((token, token + 1)),
        }
    }
    ranges
}
