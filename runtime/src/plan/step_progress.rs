//! How far a rank came with its plan: all that others need to know of what it still has.

use kyklos_transport::Rank;

use super::step::{BufferId, Plan};
use crate::{Error, Result};

/// How far a rank came with a plan before its operation was cut off. Since everybody has everybody's plan, this tells what
/// the rank has computed and what it holds, see [`left`](super::left()).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepProgress {
    /// The operation. A rank that has begun none has done no steps of operation 0.
    pub op: u64,
    /// Steps done, each of them whole.
    pub steps: usize,
    /// Buffers, ascending, that had arrived whole with exchanges for which those steps have not waited.
    pub arrived: Vec<BufferId>,
}

impl StepProgress {
    /// Who had not begun the last operation that anybody began has done nothing of it.
    pub fn align_operations(all: &mut [Self]) {
        let last = all.iter().map(|reached| reached.op).max().unwrap_or(0);
        for reached in all {
            if reached.op < last {
                *reached = Self { op: last, ..Self::default() };
            }
        }
    }

    /// Bytes of what [`Self::encode`] makes for a rank with this plan: one bit for each of its buffers, and 12.
    pub fn encoded_bytes(plan: &Plan) -> usize {
        12 + plan.buffers.len().div_ceil(8)
    }

    /// As one message: the operation in 8 bytes, the steps in 4, then a bit for each buffer, little-endian.
    pub fn encode(&self, plan: &Plan) -> Vec<u8> {
        let mut bytes = vec![0; Self::encoded_bytes(plan)];
        bytes[..8].copy_from_slice(&self.op.to_le_bytes());
        let steps = u32::try_from(self.steps).expect("steps are few");
        bytes[8..12].copy_from_slice(&steps.to_le_bytes());
        for BufferId(id) in &self.arrived {
            bytes[12 + id / 8] |= 1 << (id % 8);
        }
        bytes
    }

    /// What a rank with this plan has encoded.
    ///
    /// # Errors
    /// [`Error::Plan`] for bytes that no rank with this plan sends. Whether the plan can be cut off just so,
    /// [`left`](super::left()) finds out.
    pub fn decode(bytes: &[u8], plan: &Plan) -> Result<Self> {
        let fault = |fault: String| Err(Error::plan(Rank(plan.rank), None, fault));
        let (buffers, steps) = (plan.buffers.len(), plan.steps.len());
        let parts = bytes.split_first_chunk::<8>();
        let parts = parts.and_then(|(op, rest)| Some((op, rest.split_first_chunk::<4>()?)));
        let (op, (done, bits)) = match parts {
            Some(parts) if bytes.len() == Self::encoded_bytes(plan) => parts,
            _ => {
                let wanted = Self::encoded_bytes(plan);
                return fault(format!("says in {} bytes how far it came, {wanted} are right", bytes.len()));
            }
        };
        let done = u32::from_le_bytes(*done) as usize;
        if done > steps {
            return fault(format!("says it has done {done} steps, there are {steps}"));
        }
        let arrived = (0..bits.len() * 8).filter(|id| bits[id / 8] >> (id % 8) & 1 == 1);
        let arrived: Vec<BufferId> = arrived.map(BufferId).collect();
        match arrived.last() {
            Some(BufferId(id)) if *id >= buffers => {
                fault(format!("says buffer {id} has arrived, there are {buffers}"))
            }
            _ => Ok(Self { op: u64::from_le_bytes(*op), steps: done, arrived }),
        }
    }
}
