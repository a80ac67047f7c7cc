//! What the ranks tell each other of their devices: names, and speeds, which they measure where one
//! of them does not know its own.

use bytes::Bytes;
use kyklos_transport::Vote;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Session;
use super::agreement::out_of_step;
use super::probe::{CallClass, Probe, speed_of_call};
use super::speeds::{Measured, active_sets, is_noise, members};
use crate::error::{Error, Result};
#[cfg(not(target_arch = "wasm32"))]
use kyklos_plan::simulate::Capacity;
use kyklos_plan::simulate::work_of;
use kyklos_plan::{AttentionProblem, Mesh};

/// One rank's facts, as they travel.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Facts<T> {
    /// Version of these facts.
    version: u32,
    op: u64,
    /// Digest of what all ranks share.
    problem: String,
    /// Digest of the names of the device, its driver and its kernel.
    device: String,
    pub(super) measured: Option<T>,
}

impl Session {
    /// How fast the device of each rank attends in calls like `problem`, while all ranks compute:
    /// as [`Self::share`] measures it, and later calls correct it. For shares of what is more
    /// than attention. All ranks call it, at the same place in their calls. Blocks.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use kyklos::backend::Device;
    /// use kyklos::{AttentionProblem, Dtype, Mask, Session};
    ///
    /// let mut session = Session::new(kyklos_transport::in_process_group(1).remove(0), Device::cpu());
    /// let problem = AttentionProblem::new([1, 100, 4, 4, 32], Dtype::F32, Mask::full())?;
    /// let capacities = session.capacities(&problem)?;
    /// assert!(capacities.len() == 1 && capacities[0].pairs_per_s > 0);
    /// # }
    /// # Ok::<(), kyklos::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::share`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn capacities(&mut self, problem: &AttentionProblem) -> Result<Vec<Capacity>> {
        pollster::block_on(async {
            let class = CallClass::of(problem);
            self.learn(class);
            let ring = Mesh::new(1, self.group.size());
            let ring = self.or_refuse(ring.map_err(Error::from)).await?;
            let words = format!("speeds: {class:?}");
            let measured = self.speeds_of_all(class, problem, ring, &words, true).await?;
            Ok(measured.unwrap_or_default().iter().map(|rank| rank.in_active_set(0)).collect())
        })
    }

    /// What all ranks know of the speed of their devices, measured first where `by_work` needs it
    /// and some rank does not know it; none if some rank does not.
    pub(super) async fn speeds_of_all(
        &mut self,
        class: CallClass,
        problem: &AttentionProblem,
        mesh: Mesh,
        words: &str,
        by_work: bool,
    ) -> Result<Option<Vec<Measured>>> {
        let mut all = self.exchange(words, self.measured(class)).await?;
        if by_work && all.iter().any(|facts| facts.measured.is_none()) {
            all = self.measure(class, problem, mesh, words).await?;
        }
        Ok(all.into_iter().map(|facts| facts.measured).collect())
    }

    /// Whether the devices of the ranks have different names, drivers or kernels. All ranks call
    /// it, at the same place in their calls.
    ///
    /// # Errors
    /// As [`Self::attend`].
    pub async fn devices_differ(&mut self) -> Result<bool> {
        let all = self.exchange::<Measured>("devices", None).await?;
        Ok(all.iter().any(|facts| facts.device != all[0].device))
    }

    fn measured(&self, class: CallClass) -> Option<Measured> {
        let known = self.speeds.of(class)?;
        Some(Measured { memory_bytes: self.options.memory_bytes, ..known.clone() })
    }

    /// Takes the last call of this session into account.
    pub(super) fn learn(&mut self, class: CallClass) {
        let Some((lowered, compute_ns)) = self.last_run.take() else { return };
        if CallClass::of(&lowered.plans().set().problem) != class {
            return;
        }
        // What nobody knows is measured: one call may have waited for the cores.
        let Some(known) = self.speeds.now(class) else { return };
        let (pairs, steps) = work_of(lowered.plans().set(), self.rank());
        if let Some(pairs_per_s) = speed_of_call(pairs, steps, compute_ns, known) {
            self.speeds.learn(class, pairs_per_s);
        }
    }

    /// What all ranks have measured. They measure at the same time, because they may share the
    /// cores of a machine; also those that know their speed from another time. Where speeds
    /// differ, the fastest ranks measure again without the others.
    async fn measure(
        &mut self,
        class: CallClass,
        problem: &AttentionProblem,
        mesh: Mesh,
        words: &str,
    ) -> Result<Vec<Facts<Measured>>> {
        let clock = self.options.run.clock.clone();
        let ready = Probe::warm(&self.device, problem, clock).await;
        let mut probe = self.or_refuse(ready).await?;
        let own = self.rank().0 as usize;
        let mut measured = Measured { pairs_per_s: Vec::new(), step_ns: 0, memory_bytes: None };
        let mut together: Vec<u64> = Vec::new();
        for size in active_sets(mesh.ring() as usize) {
            // All ranks have ended what was before.
            self.exchange::<Measured>(words, None).await?;
            let mut speed = 0;
            if together.is_empty() || members(mesh, &together, size)[own] {
                let seen = probe.measure().await;
                let seen = self.or_refuse(seen).await?;
                (speed, measured.step_ns) = (seen.pairs_per_s, seen.step_ns);
            }
            measured.pairs_per_s.push(speed);
            if together.is_empty() {
                let all = self.exchange(words, Some(measured.clone())).await?;
                together =
                    all.iter().filter_map(|facts| Some(facts.measured.as_ref()?.pairs_per_s[0])).collect();
                if is_noise(&together) {
                    break;
                }
            }
        }
        self.speeds.set(class, measured);
        self.exchange(words, self.measured(class)).await
    }

    /// Tells the other ranks of an error.
    pub(super) async fn or_refuse<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.refuse(error).await?;
        }
        result
    }

    /// The facts of all ranks.
    pub(super) async fn exchange<T: Serialize + DeserializeOwned>(
        &mut self,
        problem: &str,
        measured: Option<T>,
    ) -> Result<Vec<Facts<T>>> {
        let info = self.device.info();
        let device = format!("{} {} {} {}", info.backend, info.name, info.driver, info.kernel);
        // A vote has little room for words.
        let [problem, device] =
            [problem, &device].map(|words| blake3::hash(words.as_bytes()).to_hex().to_string());
        let facts = Facts { version: VERSION, op: self.op, problem, device, measured };
        let note =
            Bytes::from(serde_json::to_vec(&facts).expect("plain data without maps always serialises"));
        let notes = self.vote(Vote::Ready { plan_hash: SHARES, note }).await?;
        self.op += 1;
        let mut all: Vec<Facts<T>> = Vec::with_capacity(notes.len());
        for (rank, note) in notes.iter().enumerate() {
            let facts: Option<Facts<T>> = serde_json::from_slice(note).ok();
            let facts = facts.filter(|facts| facts.version == VERSION).ok_or_else(|| {
                Error::request(
                    format!("rank {rank} describes its device in a form that this release does not know"),
                    "use the same release on all ranks",
                )
            })?;
            let first = all.first().unwrap_or(&facts);
            if facts.op != first.op {
                return Err(out_of_step(rank, facts.op, first.op));
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

/// Increased when the meaning of facts changes.
const VERSION: u32 = 2;
/// The hash under which ranks vote on shares.
const SHARES: [u8; 32] = *b"kyklos: shares of the tokens, 2.";
