//! The results that an interrupted run keeps, so that the survivors can complete the operation.

use futures_util::FutureExt;

use super::background::InFlight;
use super::run::Run;
use crate::Result;
use crate::backend::{Backend, Extent, Layout, StateShape};
use crate::collective::Collective;
use crate::plan::BufferId;

impl<'r, B: Backend, C: Collective<B> + ?Sized> Run<'r, '_, B, C> {
    /// Keeps the messages that had arrived whole in an exchange on which the interrupted run had not waited.
    pub(super) fn keep_arrived(&mut self, mut exchange: InFlight<'r, B::Buffer>) {
        let ended = exchange.ended.take().or_else(|| exchange.arrivals.as_mut().now_or_never());
        let arrived = match ended {
            None => return,
            Some(Ok(arrived)) => arrived.into_iter().map(Some).collect(),
            Some(Err(broken)) => broken.arrived,
        };
        for (recv, tensors) in exchange.recvs.iter().zip(arrived) {
            if let Some(tensors) = tensors {
                self.receive(recv, tensors);
                self.arrived.extend(&recv.parts);
            }
        }
    }

    /// A copy of a running state before an attend step, because the step may be interrupted. `None` if the run is not
    /// resumable or the state is empty.
    pub(super) fn copy_of_state(&self, id: BufferId) -> Result<Option<Vec<B::Buffer>>> {
        if !self.executor.keeps || !self.memory.is_alive(id) {
            return Ok(None);
        }
        let StateShape { batch, rows, heads, dim } = self.shape(id);
        let mut copy = self.allocate(id)?;
        let extents = [
            Extent { batch, rows, heads, row_bytes: dim * 4 },
            Extent { batch, rows: heads, heads: rows, row_bytes: 8 },
        ];
        for (index, (extent, into)) in extents.into_iter().zip(&mut copy).enumerate() {
            let layout = Layout {
                offset: 0,
                batch_stride: extent.rows * extent.heads * extent.row_bytes,
                row_stride: extent.heads * extent.row_bytes,
                head_stride: extent.row_bytes,
            };
            self.executor.backend.repack((self.memory.view(id, index), layout), (into, layout), extent)?;
        }
        Ok(Some(copy))
    }
}
