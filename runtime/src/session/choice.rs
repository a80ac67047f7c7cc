//! The plans of a call: by the same rules on all ranks, from the facts on which they agree.

use std::ops::Range;
use std::sync::Arc;

use kyklos_transport::Rank;

use super::agreement::Agreed;
use crate::call::{Attention, Execution, Extents, GivenPlans, Options};
use crate::error::{Error, Result};
use kyklos_plan::plan::{Direction, ProvedPlans};
use kyklos_plan::{
    AttentionProblem, Deal, Dtype, Mesh, Placement, PlacementKind, Split, Strategy, placed_meshes_by_bytes,
    plan_backward_placed, plan_placed,
};

/// Owners of queries, and of keys and values.
type Owners = (Placement, Placement);

impl Attention {
    /// The plans that sessions make for this call: of all ranks, with their bytes and their proof,
    /// before any rank is there. `shape` = `[batch, q_heads, kv_heads, dim]`; the tokens of
    /// each rank, by rank: queries, and keys without the replicated ones. The label and the
    /// elements of a bias tensor do not matter.
    ///
    /// ```
    /// use kyklos::{Attention, Dtype, Mask, plan};
    ///
    /// let call = Attention::new().mask(Mask::causal());
    /// let plans = call.plans([1, 8, 2, 64], Dtype::F16, &[96, 32], &[96, 32])?;
    /// println!("{}", plan::explain(plans.set(), plans.checks(), None));
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Request`] for a call that sessions refuse, except where the fault is in the
    /// tensors.
    pub fn plans(
        &self,
        shape: [u32; 4],
        dtype: Dtype,
        q_tokens: &[u32],
        kv_tokens: &[u32],
    ) -> Result<Arc<ProvedPlans>> {
        let Options { bias, execution, .. } = &self.options;
        if q_tokens.is_empty() || q_tokens.len() != kv_tokens.len() {
            return Err(Error::request(
                format!("queries of {} ranks and keys of {} ranks", q_tokens.len(), kv_tokens.len()),
                "give the number of both for each rank",
            ));
        }
        let sum = |tokens: &[u32]| {
            let sum: u64 = tokens.iter().copied().map(u64::from).sum();
            u32::try_from(sum).map_err(|_| {
                Error::request(format!("{sum} tokens over all ranks"), format!("use at most {}", u32::MAX))
            })
        };
        let [batch, q_heads, kv_heads, head_dim] = shape;
        let q_len = match execution.same_queries {
            true if q_tokens.iter().any(|tokens| *tokens != q_tokens[0]) => {
                return Err(Error::request(
                    format!("{q_tokens:?} queries, the same on all ranks"),
                    "give each rank the same number",
                ));
            }
            true => q_tokens[0],
            false => sum(q_tokens)?,
        };
        let replicated = execution.replicated.end - execution.replicated.start;
        let kv_len = sum(kv_tokens)?.saturating_add(replicated);
        let bytes = |queries: &u32| bias.map_or(0, |tensor| tensor.bytes(dtype, *queries, kv_len));
        // The rows are those of one rank, which is not known here.
        let rows = |queries: &u32| if bias.is_some_and(|tensor| tensor.shared_rows) { 1 } else { *queries };
        let axes = |queries: &u32| self.bias_axes.map(|[_, keys]| [rows(queries), keys]);
        let agreed = Agreed {
            extents: Extents { batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype },
            q_counts: q_tokens.to_vec(),
            kv_counts: kv_tokens.to_vec(),
            bias_bytes: q_tokens.iter().map(bytes).collect(),
            bias_axes: q_tokens.iter().map(axes).collect(),
            most_state_bytes: Vec::new(),
            cache_rows: None,
        };
        plans(&self.options, &agreed)
    }
}

/// The plans of a call.
pub(super) fn plans(options: &Options, agreed: &Agreed) -> Result<Arc<ProvedPlans>> {
    if let Some(GivenPlans(plans)) = &options.execution.plans {
        return given(plans, options, agreed, Direction::Forward);
    }
    let (problem, (q, kv), strategy) = chosen(options, agreed)?;
    Ok(Arc::new(ProvedPlans::new(plan_placed(&problem, q.mesh(), q, kv, strategy)?)?))
}

/// The plans of the backward pass of a call. A strategy without one is replaced by the default of
/// its mesh.
pub(super) fn backward_plans(options: &Options, agreed: &Agreed) -> Result<Arc<ProvedPlans>> {
    if let Some(GivenPlans(plans)) = &options.execution.plans {
        return given(plans, options, agreed, Direction::Backward);
    }
    let (problem, (q, kv), strategy) = chosen(options, agreed)?;
    let strategy = strategy.of_backward(&problem, q.mesh());
    Ok(Arc::new(ProvedPlans::new(plan_backward_placed(&problem, q.mesh(), q, kv, strategy)?)?))
}

/// Plans of the caller, if they are of this direction and of the tensors of the ranks.
fn given(
    plans: &Arc<ProvedPlans>,
    options: &Options,
    agreed: &Agreed,
    direction: Direction,
) -> Result<Arc<ProvedPlans>> {
    if *options != Attention::planned(plans).options {
        return Err(Error::request(
            "a call of given plans with another mask, scale or other option than theirs",
            "give options to the plans, or let the session plan the call",
        ));
    }
    let set = plans.set();
    if set.direction != direction {
        let (is, other) = match direction {
            Direction::Forward => ("an attention call with plans of a backward pass", "plan_forward"),
            Direction::Backward => ("a backward pass with plans of a forward pass", "plan_backward"),
        };
        return Err(Error::request(is, format!("make the plans with {other}")));
    }
    let (ranks, planned) = (agreed.q_counts.len(), set.mesh.size());
    if planned as usize != ranks {
        return Err(Error::request(
            format!("plans of {planned} ranks for a group of {ranks}"),
            "plan for all ranks of the group",
        ));
    }
    let Extents { batch, q_heads, kv_heads, head_dim, dtype, .. } = agreed.extents;
    let problem = &set.problem;
    let wanted = [problem.batch, problem.q_heads, problem.kv_heads, problem.head_dim];
    if ([batch, q_heads, kv_heads, head_dim], dtype) != (wanted, problem.dtype) {
        return Err(Error::request(
            format!(
                "tensors of batch, query heads, key/value heads and dim {:?} in {dtype}, and plans of {wanted:?} in {}",
                [batch, q_heads, kv_heads, head_dim],
                problem.dtype
            ),
            "plan the problem of the tensors",
        ));
    }
    bias_fits(problem, agreed)?;
    fits((&set.q_placement, &set.kv_placement), agreed)?;
    Ok(plans.clone())
}

/// The problem of a call, the owners of its tokens, and the strategy.
fn chosen(options: &Options, agreed: &Agreed) -> Result<(AttentionProblem, Owners, Strategy)> {
    let problem = options.problem(&agreed.extents)?;
    bias_fits(&problem, agreed)?;
    let execution = &options.execution;
    let ranks = u32::try_from(agreed.q_counts.len()).unwrap_or(u32::MAX);
    if let Some((q, kv)) = &execution.owners
        && [q.mesh().size(), kv.mesh().size()] != [ranks; 2]
    {
        return Err(Error::request(
            format!(
                "owners of queries on mesh {} and of keys on mesh {}, for {ranks} ranks",
                q.mesh(),
                kv.mesh()
            ),
            "place the tokens of all ranks of the group",
        ));
    }
    let mesh = match execution.mesh {
        None if execution.same_queries => Some(Mesh::new(1, ranks)?),
        mesh => mesh,
    };
    let (owners, strategy) = match mesh {
        Some(mesh) if mesh.size() != ranks => {
            return Err(Error::request(
                format!("mesh {mesh} for {ranks} ranks"),
                "use a mesh of all ranks of the group, or none",
            ));
        }
        Some(mesh) => {
            let owners = match &execution.owners {
                Some(owners) => on_mesh(owners, mesh)?,
                None => deal(options, &problem, agreed, mesh)?,
            };
            let default = match execution.same_queries && ranks > 1 {
                true => Strategy::PassQ,
                false => Strategy::of_mesh(mesh),
            };
            (owners, execution.strategy.unwrap_or(default))
        }
        None => fewest_bytes(execution, &problem, any_mesh(options, &problem, agreed, ranks)?)?,
    };
    fits((&owners.0, &owners.1), agreed)?;
    Ok((problem, owners, strategy))
}

/// Refuses attention bias tensors of other rows or keys than the call has.
fn bias_fits(problem: &AttentionProblem, agreed: &Agreed) -> Result<()> {
    let parts = agreed.bias_axes.iter().zip(&agreed.bias_bytes).zip(&agreed.q_counts);
    for (rank, ((axes, bytes), queries)) in parts.enumerate() {
        if let (Some(tensor), Some([rows, keys])) = (problem.bias, *axes) {
            tensor.axes_fit(rank, [rows, keys], *queries, problem.kv_len)?;
        }
        let wanted = problem.bias.map_or(0, |tensor| tensor.bytes(problem.dtype, *queries, problem.kv_len));
        if *bytes != wanted {
            return Err(Error::request(
                format!(
                    "the attention bias tensor of rank {rank} has {bytes} bytes, its shape needs {wanted}"
                ),
                "give the rows of the rank's queries, or with shared rows the whole tensor",
            ));
        }
    }
    Ok(())
}

/// The owners where no mesh is given: they must not depend on it.
fn any_mesh(options: &Options, problem: &AttentionProblem, agreed: &Agreed, ranks: u32) -> Result<Owners> {
    let Execution { owners, placement, .. } = &options.execution;
    match owners {
        Some(owners) => Ok(owners.clone()),
        None if *placement == PlacementKind::Contiguous => {
            deal(options, problem, agreed, Mesh::new(1, ranks)?)
        }
        None => Err(Error::request(
            format!("placement {placement} without a mesh, which decides the tokens of each rank"),
            "name the mesh, or use placement contiguous",
        )),
    }
}

fn deal(options: &Options, problem: &AttentionProblem, agreed: &Agreed, mesh: Mesh) -> Result<Owners> {
    let Execution { placement, replicated, .. } = &options.execution;
    let place = |total: u32, counts: &[u32], replicated: Range<u32>| {
        let documents = options.mask.document_boundaries().to_vec();
        let deal = Deal { total, replicated, documents };
        Placement::deal(&deal, *placement, mesh, &Split::Tokens(counts.to_vec()))
    };
    let queries = match problem.same_queries {
        true => Placement::everywhere(mesh, problem.q_len),
        false => place(problem.q_len, &agreed.q_counts, 0..0)?,
    };
    Ok((queries, place(problem.kv_len, &agreed.kv_counts, replicated.clone())?))
}

/// The mesh and the strategy that send the fewest bytes: keys and values go to the queries, or,
/// where queries are few, queries to the keys.
fn fewest_bytes(
    execution: &Execution,
    problem: &AttentionProblem,
    owners: Owners,
) -> Result<(Owners, Strategy)> {
    let (q, kv) = &owners;
    let best = |strategy| -> Result<(Mesh, u64)> {
        let meshes = placed_meshes_by_bytes(problem, q, kv, strategy)?;
        let none = || Error::request(format!("no mesh of {} ranks", q.mesh().size()), "use fewer ranks");
        meshes.first().copied().ok_or_else(none)
    };
    let (mut mesh, mut least) = best(execution.strategy)?;
    let mut strategy = execution.strategy;
    if strategy.is_none() {
        for other in Strategy::ALL.into_iter().filter(|strategy| strategy.moves_queries()) {
            // A strategy that refuses the problem is no candidate.
            if let Ok((its_mesh, bytes)) = best(Some(other))
                && bytes < least
            {
                (mesh, least, strategy) = (its_mesh, bytes, Some(other));
            }
        }
    }
    Ok((on_mesh(&owners, mesh)?, strategy.unwrap_or_else(|| Strategy::of_mesh(mesh))))
}

fn on_mesh((q, kv): &Owners, mesh: Mesh) -> Result<Owners> {
    Ok((q.on_mesh(mesh)?, kv.on_mesh(mesh)?))
}

/// Refuses ranks that pass other numbers of tokens than they own, and rows behind the keys, which
/// only a cache has.
fn fits((q, kv): (&Placement, &Placement), agreed: &Agreed) -> Result<()> {
    for (what, placement, counts) in [("queries", q, &agreed.q_counts), ("keys", kv, &agreed.kv_counts)] {
        let mut ranks = (0..).map(Rank).take(counts.len());
        if agreed.cache_rows.is_none() && ranks.any(|rank| placement.spare(rank) > 0) {
            return Err(Error::request(
                format!("{what} with spare rows (Placement::with_spare) in a call without a cache"),
                "place the tokens without spare rows",
            ));
        }
        // Of keys, each rank passes the replicated ones too, and they are not counted.
        let everywhere = if what == "queries" { placement.replicated().len() } else { 0 };
        for (rank, (tokens, count)) in placement.ranks().iter().zip(counts).enumerate() {
            let held = everywhere + tokens.len();
            if held != *count as usize {
                return Err(Error::request(
                    format!("rank {rank} has {count} {what}, the placement gives it {held}"),
                    "let each rank pass the tokens that the placement gives it",
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Attention, Extents};
    use kyklos_plan::Dtype;

    fn chosen(q_counts: [u32; 4], kv_counts: [u32; 4], execution: Execution) -> Result<(Strategy, Mesh)> {
        let extents = Extents {
            batch: 1,
            q_len: q_counts.iter().sum(),
            kv_len: kv_counts.iter().sum(),
            q_heads: 4,
            kv_heads: 4,
            head_dim: 16,
            dtype: Dtype::F32,
        };
        let agreed = Agreed {
            extents,
            q_counts: q_counts.to_vec(),
            kv_counts: kv_counts.to_vec(),
            bias_bytes: vec![0; 4],
            bias_axes: vec![None; 4],
            most_state_bytes: Vec::new(),
            cache_rows: None,
        };
        let plans = plans(&Attention::new().execution(execution).options, &agreed)?;
        Ok((plans.set().strategy, plans.set().mesh))
    }

    #[test]
    fn queries_travel_where_they_are_few_and_keys_where_they_are_many() {
        let (strategy, mesh) = chosen([1, 0, 0, 0], [64; 4], Execution::new()).unwrap();
        assert!(strategy.moves_queries(), "{strategy} on {mesh}");
        let (strategy, _) = chosen([64; 4], [64; 4], Execution::new()).unwrap();
        assert!(!strategy.moves_queries(), "{strategy}");
        let ring = Execution::new().strategy(Strategy::Ring);
        assert_eq!(chosen([1, 0, 0, 0], [64; 4], ring).unwrap(), (Strategy::Ring, Mesh::new(1, 4).unwrap()));
    }

    #[test]
    fn counts_that_are_not_those_of_the_owners_are_refused() {
        let place = |counts: Vec<u32>| {
            let mesh = Mesh::new(1, 4).unwrap();
            Placement::new(PlacementKind::Contiguous, mesh, 16, &Split::Tokens(counts)).unwrap()
        };
        let owners = Execution::new().owners(place(vec![4, 4, 4, 4]), place(vec![8, 0, 4, 4]));
        assert!(chosen([4; 4], [8, 0, 4, 4], owners.clone()).is_ok());
        let error = chosen([4; 4], [4; 4], owners).unwrap_err().to_string();
        assert!(error.contains("rank 0 has 4 keys, the placement gives it 8"), "{error}");
        let two = Mesh::new(1, 2).unwrap();
        let two = Placement::new(PlacementKind::Contiguous, two, 16, &Split::Even).unwrap();
        let error = chosen([8, 8, 0, 0], [8, 8, 0, 0], Execution::new().owners(two.clone(), two));
        assert!(error.unwrap_err().to_string().contains("for 4 ranks"));
    }
}
