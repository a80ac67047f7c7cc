//! Chooses the tokens of each rank from the device speeds that the ranks report.

use super::Session;
use super::probe::CallClass;
use super::speeds::{Measured, is_noise};
use crate::call::Execution;
use crate::error::{Error, Result};
use kyklos_plan::simulate::{Candidate, Capacity, Shares};
use kyklos_plan::{AttentionProblem, Mesh, Placement, Split, Strategy, deal_tokens};

/// The tokens of all ranks, for calls of one problem. Made by [`Session::share`].
#[derive(Clone, Debug, PartialEq)]
pub struct SharedTokens {
    /// The tokens whose queries each rank has.
    pub queries: Placement,
    /// The tokens whose keys and values each rank has.
    pub keys: Placement,
    /// How the ranks run the problem.
    pub candidate: Candidate,
    /// The shares, with the ranks that got none.
    pub shares: Shares,
}

impl SharedTokens {
    /// `execution` with the mesh, the strategy and the owners of these tokens.
    #[must_use]
    pub fn execution(&self, execution: Execution) -> Execution {
        let Candidate { mesh, strategy, .. } = self.candidate;
        execution.mesh(mesh).strategy(strategy).owners(self.queries.clone(), self.keys.clone())
    }
}

/// The shares of the last call of [`Session::share`].
#[derive(Debug)]
pub(super) struct LastShares {
    /// The call that the shares are for.
    words: String,
    shared: SharedTokens,
    /// The active set that they are for.
    active_set: usize,
}

impl Session {
    /// Shares the tokens of `problem` among all ranks, so that all of them end at the same time.
    /// Each rank measures its device ([`Device::measure`](crate::backend::Device::measure)),
    /// once for each class of calls, and from then on by the calls of this session. Shares are even
    /// where the speeds differ by less than a tenth. A rank gets none where its device slows
    /// down a faster one, on the same cores, by more than it adds. They change from one call of
    /// this function to the next only where the new ones promise a tenth less time. All ranks
    /// call it, at the same place in their calls. Blocks.
    ///
    /// `execution` names the mesh, the strategy and the placement; without a mesh, a ring of all
    /// ranks. Shares are by the work of queries, so they stay even in a fixed order, on a mesh
    /// without a ring, and with strategies that move queries.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use kyklos::backend::Device;
    /// use kyklos::{Attention, AttentionProblem, Dtype, Execution, Mask, Session, Tensor};
    ///
    /// let mut session = Session::new(kyklos_transport::in_process_group(1).remove(0), Device::cpu());
    /// let problem = AttentionProblem::new([1, 100, 4, 4, 32], Dtype::F32, Mask::causal())?;
    /// let shared = session.share(&problem, &Execution::new())?;
    /// // The tokens of this rank, in the order of its tensors.
    /// let tokens = shared.queries.of_rank(session.rank());
    /// let x = Tensor::new([1, tokens.len(), 4, 32], vec![0.5_f32; tokens.len() * 4 * 32])?;
    /// let call = Attention::new().mask(Mask::causal()).execution(shared.execution(Execution::new()));
    /// session.attend(&call, &x, &x, &x)?;
    /// # }
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Request`] for a problem that does not fit the mesh or the memory of the ranks, or
    /// where ranks ask for other problems: the same on all ranks. A device that fails while it
    /// is measured is the error of all ranks. Others as [`Self::attend`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn share(&mut self, problem: &AttentionProblem, execution: &Execution) -> Result<SharedTokens> {
        pollster::block_on(self.share_async(problem, execution))
    }

    /// [`Self::share`] as a future.
    ///
    /// # Errors
    /// As [`Self::share`].
    pub async fn share_async(
        &mut self,
        problem: &AttentionProblem,
        execution: &Execution,
    ) -> Result<SharedTokens> {
        let candidate = self.candidate(execution);
        let candidate = self.or_refuse(candidate).await?;
        let class = CallClass::of(problem);
        self.learn(class);
        let words = format!("{candidate}: {problem:?}");
        let by_work =
            candidate.mesh.ring() > 1 && !problem.fixed_order && !candidate.strategy.moves_queries();
        let measured = self.speeds_of_all(class, problem, candidate.mesh, &words, by_work).await?;
        let (shares, active_set) = match measured.filter(|_| by_work) {
            Some(measured) => {
                let (shares, active_set) = earliest(problem, candidate, &measured)?;
                if let Some(last) = self.last_shares.as_ref().filter(|last| last.words == words) {
                    let kept = &last.shared.shares;
                    let keeping_ns =
                        kept.compute_ns(problem, candidate.mesh, &capacities(&measured, last.active_set))?;
                    if shares.compute_ns > keeping_ns / 10 * 9 && shares.limited == kept.limited {
                        return Ok(last.shared.clone());
                    }
                }
                (shares, active_set)
            }
            None => (even(), 0),
        };
        self.speeds.run_in(class, active_set);
        let (queries, keys) = deal_tokens(problem, candidate.mesh, candidate.placement, &shares.split)?;
        let shared = SharedTokens { queries, keys, candidate, shares };
        self.last_shares = Some(LastShares { words, shared: shared.clone(), active_set });
        Ok(shared)
    }

    fn candidate(&self, execution: &Execution) -> Result<Candidate> {
        let ranks = self.group.size();
        let mesh = match execution.mesh {
            Some(mesh) if mesh.size() != ranks => {
                return Err(Error::request(
                    format!("mesh {mesh} for {ranks} ranks"),
                    "use a mesh of all ranks of the group, or none",
                ));
            }
            Some(mesh) => mesh,
            None => Mesh::new(1, ranks)?,
        };
        let strategy = execution.strategy.unwrap_or_else(|| Strategy::of_mesh(mesh));
        strategy.accepts(mesh)?;
        Ok(Candidate { strategy, mesh, placement: execution.placement })
    }
}

/// What the ranks can do while active set number `active_set` computes, as if their speeds were
/// equal where they differ by no more than measurements vary.
fn capacities(measured: &[Measured], active_set: usize) -> Vec<Capacity> {
    let capacities = measured.iter().map(|rank| rank.in_active_set(active_set));
    let speeds: Vec<u64> = capacities.clone().map(|capacity| capacity.pairs_per_s).collect();
    let least = speeds.iter().copied().min().unwrap_or(0);
    if !is_noise(&speeds) {
        return capacities.collect();
    }
    capacities.map(|capacity| Capacity { pairs_per_s: least, step_ns: 0, ..capacity }).collect()
}

/// The shares with the earliest end, and the active set that they are for. Fewer ranks than all are
/// worth it only for a tenth of the time: less is within what measurements vary, and more ranks
/// have more memory.
fn earliest(
    problem: &AttentionProblem,
    candidate: Candidate,
    measured: &[Measured],
) -> Result<(Shares, usize)> {
    let mut best = (by_capacity(problem, candidate, &capacities(measured, 0))?, 0);
    let mut limit_ns = best.0.compute_ns / 10 * 9;
    let known = measured.iter().map(|rank| rank.pairs_per_s.len()).min().unwrap_or(0);
    for active_set in 1..known {
        // A few ranks may have too little memory for all tokens.
        let shares = by_capacity(problem, candidate, &capacities(measured, active_set)).ok();
        if let Some(shares) = shares.filter(|shares| shares.compute_ns < limit_ns) {
            limit_ns = shares.compute_ns;
            best = (shares, active_set);
        }
    }
    Ok(best)
}

/// Even shares for ranks of one speed, unless memory limits one of them.
fn by_capacity(problem: &AttentionProblem, candidate: Candidate, capacities: &[Capacity]) -> Result<Shares> {
    let shares = Shares::level(problem, candidate, capacities, None)?;
    let is_even = shares.limited.is_empty()
        && capacities.iter().all(|capacity| capacity.pairs_per_s == capacities[0].pairs_per_s);
    Ok(if is_even { Shares { compute_ns: shares.compute_ns, ..even() } } else { shares })
}

/// The same for all ranks.
fn even() -> Shares {
    Shares { split: Split::Even, left_out: Vec::new(), limited: Vec::new(), compute_ns: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kyklos_plan::{Dtype, Mask, PlacementKind};

    /// Ranks that take each speed from the active set of that number.
    fn in_active_sets<const N: usize>(speeds: [&[u64]; N]) -> [Measured; N] {
        speeds.map(|speeds| Measured { pairs_per_s: speeds.to_vec(), step_ns: 1000, memory_bytes: None })
    }

    fn ring_of(ranks: u32) -> Candidate {
        let mesh = Mesh::new(1, ranks).unwrap();
        Candidate { strategy: Strategy::Ring, mesh, placement: PlacementKind::Contiguous }
    }

    #[test]
    fn devices_that_slow_down_a_faster_one_are_left_out() {
        let problem = AttentionProblem::new([1, 3000, 4, 2, 16], Dtype::F32, Mask::full()).unwrap();
        // Active sets of 3, 1 and 2 ranks. Three devices that do not disturb each other.
        let speeds: [&[u64]; 3] = [&[600_000, 600_000, 600_000], &[300_000, 0, 300_000], &[30_000, 0, 0]];
        let (shares, active_set) = earliest(&problem, ring_of(3), &in_active_sets(speeds)).unwrap();
        assert_eq!((active_set, shares.left_out), (0, Vec::new()));

        // Three drivers on the cores of one machine.
        let speeds: [&[u64]; 3] = [&[200_000, 0, 0], &[333_000, 1_000_000, 500_000], &[30_000, 0, 50_000]];
        let (shares, active_set) = earliest(&problem, ring_of(3), &in_active_sets(speeds)).unwrap();
        assert_eq!(
            (active_set, shares.left_out),
            (1, vec![kyklos_transport::Rank(0), kyklos_transport::Rank(2)])
        );

        // The fastest is on a machine of its own; the others share one.
        let speeds: [&[u64]; 3] =
            [&[1_000_000, 1_000_000, 1_000_000], &[200_000, 0, 900_000], &[190_000, 0, 0]];
        let (shares, active_set) = earliest(&problem, ring_of(3), &in_active_sets(speeds)).unwrap();
        assert_eq!((active_set, shares.left_out), (2, vec![kyklos_transport::Rank(2)]));
    }

    #[test]
    fn all_ranks_take_part_where_fewer_promise_less_than_a_tenth() {
        let problem = AttentionProblem::new([1, 3000, 4, 2, 16], Dtype::F32, Mask::full()).unwrap();
        let speeds: [&[u64]; 2] = [&[700_000, 1_050_000], &[300_000, 0]];
        let (shares, active_set) = earliest(&problem, ring_of(2), &in_active_sets(speeds)).unwrap();
        assert_eq!((active_set, shares.left_out), (0, Vec::new()));
    }

    #[test]
    fn speeds_within_a_tenth_give_even_shares_unless_memory_limits_one() {
        let problem = AttentionProblem::new([1, 3000, 4, 2, 16], Dtype::F32, Mask::causal()).unwrap();
        let mesh = Mesh::new(1, 2).unwrap();
        let ring = Candidate { strategy: Strategy::Ring, mesh, placement: PlacementKind::Zigzag };
        let shares = |speeds: [u64; 2], memory_bytes| {
            let of = |pairs_per_s| Capacity { pairs_per_s, step_ns: 1000, memory_bytes };
            let [first, second] = speeds.map(of);
            let second = Capacity { memory_bytes: memory_bytes.map(|_| 1 << 30), ..second };
            let of = |capacity: Capacity| Measured {
                pairs_per_s: vec![capacity.pairs_per_s],
                step_ns: capacity.step_ns,
                memory_bytes: capacity.memory_bytes,
            };
            earliest(&problem, ring, &[first, second].map(of)).unwrap().0
        };
        for memory in [None, Some(1 << 30)] {
            assert_eq!(shares([1_000_000, 1_090_000], memory).split, Split::Even);
            assert_ne!(shares([1_000_000, 1_200_000], memory).split, Split::Even);
        }
        let limited = shares([1_000_000, 1_090_000], Some(1_450_000));
        assert_eq!(limited.limited, [kyklos_transport::Rank(0)]);
        assert_ne!(limited.split, Split::Even);
    }
}
