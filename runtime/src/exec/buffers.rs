//! The memory of a plan's buffers: allocation, sizes, and the place of a slice in it.

use bytes::Bytes;

use super::run::Run;
use super::{state_mut, state_shape};
use crate::backend::{Backend, BiasInput, Layout, StateShape};
use crate::collective::{Collective, Piece};
use crate::error::Result;
use kyklos_plan::BiasTensor;
use kyklos_plan::plan::{BufferId, Content, Slice};

impl<'r, B: Backend, C: Collective<B> + ?Sized> Run<'r, '_, B, C> {
    /// The sinks of a state's heads, one each; empty where the problem has none.
    pub(super) fn sinks(&self, state: BufferId) -> &'r [f32] {
        let heads = &self.executor.plan.buffer(state).heads;
        self.executor.set.problem.sinks.get(heads.start as usize..heads.end as usize).unwrap_or_default()
    }

    /// Takes the tensors of a running state out of memory. If the state does not exist yet, creates
    /// an empty one.
    pub(super) fn state(&mut self, id: BufferId) -> Result<Vec<B::Buffer>> {
        if let Some(tensors) = self.memory.take(id) {
            return Ok(tensors);
        }
        let mut tensors = self.allocate(id)?;
        self.executor.backend.reset_state(&mut state_mut(&mut tensors, self.shape(id)))?;
        Ok(tensors)
    }

    pub(super) fn allocate(&self, id: BufferId) -> Result<Vec<B::Buffer>> {
        let name = &self.executor.plan.buffer(id).name.to_string();
        let backend = self.executor.backend;
        self.tensor_bytes(id)
            .into_iter()
            .map(|bytes| {
                if self.executor.options.poison {
                    backend.upload(name, Bytes::from(vec![0xFF; bytes]))
                } else {
                    backend.alloc(name, bytes)
                }
            })
            .collect()
    }

    /// Extents of the running state that a buffer holds.
    pub(super) fn shape(&self, state: BufferId) -> StateShape {
        state_shape(self.executor.set, self.executor.plan, state)
    }

    pub(super) fn content(&self, buffer: BufferId) -> Content {
        self.executor.plan.buffer(buffer).content
    }

    pub(super) fn tensor_bytes(&self, id: BufferId) -> Vec<usize> {
        self.executor.tensor_bytes(id)
    }

    /// The bytes of a slice in each tensor of its buffer, where they are adjacent.
    pub(super) fn pieces(&self, slice: &Slice) -> Vec<Piece> {
        let (plan, problem) = (self.executor.plan, &self.executor.set.problem);
        let heads = plan.buffer(slice.buffer).head_count() as usize;
        let rows = plan.buffer(slice.buffer).rows();
        let whole = slice.tokens == (0..rows);
        let batch = if whole { self.content(slice.buffer).batch(problem) as usize } else { 1 };
        let tensors = plan.buffer(slice.buffer).content.tensors(problem).enumerate();
        let pieces = tensors.map(|(index, tensor)| {
            let bytes = |tokens: usize| tensor.bytes(tokens, heads);
            let start = bytes(slice.tokens.start);
            let end = start + batch * bytes(slice.tokens.len());
            let all = self.content(slice.buffer).batch(problem) as usize * tensor.bytes(rows, heads);
            Piece {
                buffer: slice.buffer,
                tensor: index,
                bytes: start..end,
                is_whole: (start..end) == (0..all),
            }
        });
        pieces.collect()
    }

    /// The attention bias tensor for the queries `q`: `rows` of the plan's buffer, or the rows that
    /// all queries share.
    pub(super) fn bias(&self, q: &Slice, rows: Option<&Slice>) -> Option<BiasInput<'_, B::Buffer>> {
        let problem = &self.executor.set.problem;
        let tensor = problem.bias?;
        let row = tensor.row_elements(problem.dtype, problem.kv_len);
        let buffer = match rows {
            Some(rows) => self.memory.view(rows.buffer, 0),
            None => self.shared_bias.as_ref()?,
        };
        Some(BiasInput { kind: tensor.kind, buffer, layout: self.bias_layout(tensor, q, rows, row) })
    }

    /// Place of the rows of the queries `q` in the attention bias tensor, or in its gradient: in
    /// `rows` of a plan's buffer, or in the whole tensor whose rows all queries share. A row
    /// has `row` elements. Strides of what is shared are 0.
    pub(super) fn bias_layout(
        &self,
        tensor: BiasTensor,
        q: &Slice,
        rows: Option<&Slice>,
        row: usize,
    ) -> Layout {
        let layout = match rows {
            Some(rows) => self.layout(rows, row),
            None => {
                // Its heads are all query heads, or one.
                let first = self.executor.plan.slice_heads(q).start as usize;
                Layout {
                    offset: if tensor.heads == 1 { 0 } else { first * row },
                    batch_stride: tensor.heads as usize * row,
                    row_stride: 0,
                    head_stride: row,
                }
            }
        };
        let shared = |stride, shared| if shared { 0 } else { stride };
        Layout {
            batch_stride: shared(layout.batch_stride, tensor.batch == 1),
            head_stride: shared(layout.head_stride, tensor.heads == 1),
            ..layout
        }
    }

    /// Offset and strides of a slice in its tensors. Unit: one head of one token has `row` units.
    pub(super) fn layout(&self, slice: &Slice, row: usize) -> Layout {
        let buffer = self.executor.plan.buffer(slice.buffer);
        let row_stride = buffer.head_count() as usize * row;
        Layout {
            offset: slice.tokens.start * row_stride + slice.heads.start as usize * row,
            batch_stride: buffer.rows() * row_stride,
            row_stride,
            head_stride: row,
        }
    }
}
