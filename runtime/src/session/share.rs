//! Which tokens each rank gets, by what the ranks tell of their devices.

use bytes::Bytes;
use kyklos_transport::Vote;
use serde::{Deserialize, Serialize};

use super::Session;
use super::probe::{CallClass, Probe, speed_of_call};
use crate::simulate::{Candidate, Capacity, Shares};
use crate::{AttentionProblem, Error, Execution, Mesh, Placement, Result, Split, Strategy, deal_tokens};

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

/// What a session knows about the speed of its device.
#[derive(Debug, Default)]
pub(super) struct Speeds {
    /// Of each class of calls, the newest class first.
    known: Vec<(CallClass, Capacity)>,
    /// The last shares, and for which problem.
    last: Option<(String, SharedTokens)>,
}

/// One rank's facts, as they travel.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Facts {
    /// Version of these facts.
    version: u32,
    op: u64,
    /// Digest of what all ranks share.
    problem: String,
    /// Digest of the names of the device, its driver and its kernel.
    device: String,
    capacity: Option<Capacity>,
}

impl Session {
    /// Shares the tokens of `problem` among all ranks, so that all of them end at the same time. Each rank measures its device
    /// ([`Capacity::measure`]), once for each class of calls, and from then on by the calls of this session. Shares are even where
    /// the speeds differ by less than a tenth. They change from one call of this function to the next only where the new ones
    /// promise a tenth less time. All ranks call it, at the same place in their calls. Blocks.
    ///
    /// `execution` names the mesh, the strategy and the placement; without a mesh, a ring of all ranks. Shares are by the work of
    /// queries, so they stay even in a fixed order, on a mesh without a ring, and with strategies that move queries.
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
    /// [`Error::Request`] for a problem that does not fit the mesh or the memory of the ranks, or where ranks ask for other
    /// problems: the same on all ranks. A device that fails while it is measured is the error of all ranks. Others as
    /// [`Self::attend`].
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
        let mut all = self.exchange(&words, self.capacity(class)).await?;
        if by_work && all.iter().any(|facts| facts.capacity.is_none()) {
            self.measure(class, problem, &words).await?;
            all = self.exchange(&words, self.capacity(class)).await?;
        }
        let capacities: Option<Vec<Capacity>> = all.iter().map(|facts| facts.capacity).collect();
        let shares = match capacities.filter(|_| by_work) {
            Some(capacities) => {
                let capacities = without_noise(capacities);
                let shares = by_capacity(problem, candidate, &capacities)?;
                if let Some((last, kept)) = &self.speeds.last
                    && *last == words
                {
                    let keeping_ns = kept.shares.compute_ns(problem, candidate.mesh, &capacities)?;
                    if shares.compute_ns > keeping_ns / 10 * 9 && shares.limited == kept.shares.limited {
                        return Ok(kept.clone());
                    }
                }
                shares
            }
            None => Shares::even(),
        };
        let (queries, keys) = deal_tokens(problem, candidate.mesh, candidate.placement, &shares.split)?;
        let shared = SharedTokens { queries, keys, candidate, shares };
        self.speeds.last = Some((words, shared.clone()));
        Ok(shared)
    }

    /// Whether the devices of the ranks have different names, drivers or kernels. All ranks call it, at the same place in their
    /// calls.
    ///
    /// # Errors
    /// As [`Self::attend`].
    pub async fn devices_differ(&mut self) -> Result<bool> {
        let all = self.exchange("devices", None).await?;
        Ok(all.iter().any(|facts| facts.device != all[0].device))
    }

    fn candidate(&self, execution: &Execution) -> Result<Candidate> {
        let ranks = self.transport.world();
        let mesh = match execution.mesh {
            Some(mesh) if mesh.world() != ranks => {
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

    fn capacity(&self, class: CallClass) -> Option<Capacity> {
        let known = self.speeds.known.iter().find(|(known, _)| *known == class);
        known.map(|(_, capacity)| Capacity { memory_bytes: self.options.memory_bytes, ..*capacity })
    }

    /// Keeps what is known of a class of calls.
    fn know(&mut self, class: CallClass, capacity: Capacity) {
        self.speeds.known.truncate(MOST_CLASSES - 1);
        self.speeds.known.insert(0, (class, capacity));
    }

    /// Takes the last call of this session into account.
    fn learn(&mut self, class: CallClass) {
        let Some((lowered, compute_ns)) = self.last_run.take() else { return };
        let rank = self.rank();
        let known = self.speeds.known.iter_mut().find(|(known, _)| *known == class);
        if CallClass::of(&lowered.plans().world().problem) != class {
            return;
        }
        let step_ns = known.as_ref().map_or(0, |(_, capacity)| capacity.step_ns);
        let Some(pairs_per_s) = speed_of_call(&lowered, rank, compute_ns, step_ns) else { return };
        match known {
            // Half of the way, in factors: one slow call does not count for much, and the speed of a device that becomes 50 times
            // slower is known within a third after 4 calls. Half of the difference would take 8.
            Some((_, capacity)) => {
                capacity.pairs_per_s = geometric_mean(capacity.pairs_per_s, pairs_per_s);
            }
            None => self.know(class, Capacity { pairs_per_s, step_ns: 0, memory_bytes: None }),
        }
    }

    /// All ranks measure at the same time, because they may share the cores of a machine; also those that know their speed from
    /// another time.
    async fn measure(&mut self, class: CallClass, problem: &AttentionProblem, words: &str) -> Result<()> {
        let clock = self.options.run.clock.clone();
        let ready = Probe::warm(&self.device, problem, clock).await;
        let probe = self.or_refuse(ready).await?;
        self.exchange(words, None).await?;
        let measured = probe.measure().await;
        let capacity = self.or_refuse(measured).await?;
        self.speeds.known.retain(|(known, _)| *known != class);
        self.know(class, capacity);
        Ok(())
    }

    /// Tells the other ranks of an error.
    async fn or_refuse<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.refuse(error).await?;
        }
        result
    }

    /// The facts of all ranks.
    async fn exchange(&mut self, problem: &str, capacity: Option<Capacity>) -> Result<Vec<Facts>> {
        let info = self.device.info();
        let device = format!("{} {} {} {}", info.backend, info.name, info.driver, info.kernel);
        // A vote has little room for words.
        let [problem, device] =
            [problem, &device].map(|words| blake3::hash(words.as_bytes()).to_hex().to_string());
        let facts = Facts { version: VERSION, op: self.op, problem, device, capacity };
        let note =
            Bytes::from(serde_json::to_vec(&facts).expect("plain data without maps always serialises"));
        let notes = self.vote(Vote::Ready { plan_hash: SHARES, note }).await?;
        self.op += 1;
        let mut all: Vec<Facts> = Vec::with_capacity(notes.len());
        for (rank, note) in notes.iter().enumerate() {
            let facts: Option<Facts> = serde_json::from_slice(note).ok();
            let facts = facts.filter(|facts| facts.version == VERSION).ok_or_else(|| {
                Error::request(
                    format!("rank {rank} describes its device in a form that this release does not know"),
                    "use the same release on all ranks",
                )
            })?;
            let first = all.first().unwrap_or(&facts);
            if facts.op != first.op {
                return Err(Error::request(
                    format!(
                        "rank {rank} shares tokens as operation {} of its session, rank 0 as operation {}",
                        facts.op, first.op
                    ),
                    "make the same calls on all ranks",
                ));
            }
            if facts.problem != first.problem {
                return Err(Error::request(
                    format!("rank {rank} shares the tokens of another problem than rank 0"),
                    "share the same problem on all ranks",
                ));
            }
            all.push(facts);
        }
        Ok(all)
    }
}

fn geometric_mean(a: u64, b: u64) -> u64 {
    // The root of a product of two u64 fits u64.
    u64::try_from((u128::from(a) * u128::from(b)).isqrt()).unwrap_or(u64::MAX)
}

/// One speed for all where the speeds differ by no more than measurements vary.
fn without_noise(capacities: Vec<Capacity>) -> Vec<Capacity> {
    let speeds = || capacities.iter().map(|capacity| capacity.pairs_per_s);
    let (least, most) = (speeds().min().unwrap_or(0), speeds().max().unwrap_or(0));
    if most - least > least / 10 {
        return capacities;
    }
    capacities.iter().map(|capacity| Capacity { pairs_per_s: least, step_ns: 0, ..*capacity }).collect()
}

/// Even shares for ranks of one speed, unless memory limits one of them.
fn by_capacity(problem: &AttentionProblem, candidate: Candidate, capacities: &[Capacity]) -> Result<Shares> {
    let shares = Shares::level(problem, candidate, capacities, None)?;
    let is_even = shares.limited.is_empty()
        && capacities.iter().all(|capacity| capacity.pairs_per_s == capacities[0].pairs_per_s);
    Ok(if is_even { Shares { compute_ns: shares.compute_ns, ..Shares::even() } } else { shares })
}

impl Shares {
    /// The same for all ranks.
    fn even() -> Self {
        Self { split: Split::Even, left_out: Vec::new(), limited: Vec::new(), compute_ns: 0 }
    }
}

/// Classes of calls whose speed a session keeps.
const MOST_CLASSES: usize = 16;
/// Increased when the meaning of facts changes.
const VERSION: u32 = 1;
/// The hash under which ranks vote on shares.
const SHARES: [u8; 32] = *b"kyklos: shares of the tokens, 1.";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Mask, PlacementKind};

    #[test]
    fn speeds_within_a_tenth_give_even_shares_unless_memory_limits_one() {
        let problem = AttentionProblem::new([1, 3000, 4, 2, 16], Dtype::F32, Mask::causal()).unwrap();
        let mesh = Mesh::new(1, 2).unwrap();
        let ring = Candidate { strategy: Strategy::Ring, mesh, placement: PlacementKind::Zigzag };
        let shares = |speeds: [u64; 2], memory_bytes| {
            let of = |pairs_per_s| Capacity { pairs_per_s, step_ns: 1000, memory_bytes };
            let [first, second] = speeds.map(of);
            let second = Capacity { memory_bytes: memory_bytes.map(|_| 1 << 30), ..second };
            by_capacity(&problem, ring, &without_noise(vec![first, second])).unwrap()
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
