//! The gradient of the bias of a job: rank 0 collects it.

use bytes::Bytes;
use kyklos::BiasTensor;
use kyklos::collect::RowTensors;
use kyklos_transport::Rank;

use super::gradients::Backward;
use crate::failure::{Failure, Result};
use crate::job::call::Job;
use crate::messages::Messages;
use crate::tensors::output::{OutputTarget, by_head};

impl Job {
    /// On rank 0 the gradient of the bias in the shape of the tensor, `[batch or 1, heads or 1,
    /// queries or 1, keys]`, from the rows or the parts that the other ranks send. `None` on
    /// the other ranks, and where nobody asks for it.
    pub(in crate::job) fn collect_bias_gradient(
        &self,
        messages: &Messages<'_>,
        Backward { gradients, .. }: &Backward,
    ) -> Result<Option<Vec<f32>>> {
        let problem = &self.set().problem;
        let (Some(own), Some(tensor)) = (&gradients.d_bias, problem.bias) else { return Ok(None) };
        if self.sample.is_none() && !matches!(self.outputs.result, Some(OutputTarget::Whole(_))) {
            return Ok(None);
        }
        let rows = match tensor.shared_rows {
            true => self.sum_of_parts(messages, own)?,
            false => self.rows_of_all(messages, own, tensor)?,
        };
        Ok(rows.map(|rows| by_head(&rows, tensor, problem.kv_len)))
    }

    /// Of a bias whose rows all queries share, the sum of the parts of all ranks, in f64.
    fn sum_of_parts(&self, messages: &Messages<'_>, own: &Bytes) -> Result<Option<Bytes>> {
        let transport = messages.transport;
        if transport.rank().0 != 0 {
            messages.send(Rank(0), D_BIAS_PART, own.clone())?;
            return Ok(None);
        }
        let wide = |part: &Bytes| -> Vec<f64> { floats(part).into_iter().map(f64::from).collect() };
        let mut sums = wide(own);
        for rank in (1..transport.size()).map(Rank) {
            let part = messages.recv(rank, D_BIAS_PART, own.len())?;
            sums.iter_mut().zip(wide(&part)).for_each(|(sum, part)| *sum += part);
        }
        #[expect(clippy::cast_possible_truncation, reason = "the file holds f32")]
        let sums: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
        Ok(Some(Bytes::copy_from_slice(bytemuck::cast_slice(&sums))))
    }

    /// The rows of the queries of all ranks, `[its batch, queries, its heads, keys]`.
    fn rows_of_all(&self, messages: &Messages<'_>, own: &Bytes, tensor: BiasTensor) -> Result<Option<Bytes>> {
        let (set, problem) = (self.set(), &self.set().problem);
        let row_bytes = vec![tensor.heads as usize * problem.kv_len as usize * 4];
        let rows = RowTensors { placement: &set.q_placement, batch: tensor.batch, row_bytes };
        if messages.transport.rank().0 != 0 {
            let op = self.operations() + D_BIAS;
            pollster::block_on(rows.send(messages.transport, op, &[own], messages.deadline))?;
            return Ok(None);
        }
        let whole = self.whole(messages, &rows, D_BIAS, (problem.q_len, &[own]))?;
        let [whole] = <[Bytes; 1]>::try_from(whole).map_err(|_| Failure::run("one tensor of a bias"))?;
        Ok(Some(whole))
    }
}

fn floats(bytes: &Bytes) -> Vec<f32> {
    bytemuck::pod_collect_to_vec(bytes)
}

/// A rank's part of the gradient of a bias whose rows all queries share.
const D_BIAS_PART: u32 = 5;
/// The operation after the runs that brings rows of the gradient of a bias.
const D_BIAS: u64 = 7;
