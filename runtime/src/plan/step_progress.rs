//! The progress of a rank in its plan: from it, every other rank knows which buffers the rank still holds.

use kyklos_transport::Rank;

use super::step::{BufferId, Plan};
use crate::{Error, Result};

/// The progress of a rank in a plan when its operation was interrupted. Since every rank knows every plan, the progress
/// tells the other ranks which results and buffers the rank holds, see
/// [`remaining_buffers`](super::remaining_buffers()).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepProgress {
    /// The operation. A rank that has not started any operation has done no steps of operation 0.
    pub op: u64,
    /// Completed steps.
    pub steps: usize,
    /// Buffers, ascending, that arrived completely in exchanges on which the rank has not waited in those steps.
    pub arrived: Vec<BufferId>,
}

impl StepProgress {
    /// For ranks that have not started the last operation of any rank: sets their progress to no steps of that
    /// operation.
    pub fn align_operations(all: &mut [Self]) {
        let last = all.iter().map(|reached| reached.op).max().unwrap_or(0);
        for reached in all {
            if reached.op < last {
                *reached = Self { op: last, ..Self::default() };
            }
        }
    }

    /// Length of [`Self::encode`] for a rank with this plan, in bytes: 12, and one bit for each buffer.
    pub fn encoded_bytes(plan: &Plan) -> usize {
        12 + plan.buffers.len().div_ceil(8)
    }

    /// The progress as one message: the operation in 8 bytes, the steps in 4, then a bit for each buffer, little-endian.
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

    /// Decodes the message of a rank with this plan.
    ///
    /// # Errors
    /// [`Error::Plan`] for bytes that no rank with this plan sends. [`remaining_buffers`](super::remaining_buffers()) finds out whether the plan can be
    /// interrupted at that point.
    pub fn decode(bytes: &[u8], plan: &Plan) -> Result<Self> {
        let fault = |fault: String| Err(Error::plan(Rank(plan.rank), None, fault));
        let (buffers, steps) = (plan.buffers.len(), plan.steps.len());
        let parts = bytes.split_first_chunk::<8>();
        let parts = parts.and_then(|(op, rest)| Some((op, rest.split_first_chunk::<4>()?)));
        let (op, (done, bits)) = match parts {
            Some(parts) if bytes.len() == Self::encoded_bytes(plan) => parts,
            _ => {
                let wanted = Self::encoded_bytes(plan);
                return fault(format!("reports its progress in {} bytes, expected {wanted}", bytes.len()));
            }
        };
        let done = u32::from_le_bytes(*done) as usize;
        if done > steps {
            return fault(format!("reports {done} completed steps, the plan has {steps}"));
        }
        let arrived = (0..bits.len() * 8).filter(|id| bits[id / 8] >> (id % 8) & 1 == 1);
        let arrived: Vec<BufferId> = arrived.map(BufferId).collect();
        match arrived.last() {
            Some(BufferId(id)) if *id >= buffers => {
                fault(format!("reports that buffer {id} has arrived, the plan has {buffers} buffers"))
            }
            _ => Ok(Self { op: u64::from_le_bytes(*op), steps: done, arrived }),
        }
    }
}
