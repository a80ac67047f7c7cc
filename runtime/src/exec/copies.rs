//! Steps that copy: between layouts, and between forms of the same elements.

use super::run::Run;
use crate::backend::{Backend, Elements, Extent, Scales};
use crate::collective::Collective;
use crate::error::Result;
use kyklos_plan::plan::{BufferId, Content, Slice};
use kyklos_plan::{AttentionProblem, Dtype, WireFormat};

impl<B: Backend, C: Collective<B> + ?Sized> Run<'_, '_, B, C> {
    pub(super) fn repack(&mut self, from: &Slice, into: &Slice) -> Result<()> {
        let problem = &self.executor.set.problem;
        self.ensure_sum(from.buffer)?;
        if !self.memory.is_alive(into.buffer) {
            let fresh = self.allocate(into.buffer)?;
            self.memory.put(into.buffer, fresh);
        }
        let mut target = self.memory.take(into.buffer).expect("it is alive now");
        for (index, tensor) in self.content(from.buffer).tensors(problem).enumerate() {
            let extent = Extent {
                batch: self.content(from.buffer).batch(problem) as usize,
                rows: from.tokens.len(),
                heads: (from.heads.end - from.heads.start) as usize,
                row_bytes: tensor.row_bytes,
            };
            let source = (self.memory.view(from.buffer, index), self.layout(from, tensor.row_bytes));
            let target = (&mut target[index], self.layout(into, tensor.row_bytes));
            self.executor.backend.repack(source, target, extent)?;
        }
        self.memory.put(into.buffer, target);
        Ok(())
    }

    pub(super) fn convert(&mut self, from: &Slice, into: BufferId) -> Result<()> {
        let problem = &self.executor.set.problem;
        self.ensure_sum(from.buffer)?;
        if !self.rounds(from.buffer) {
            return self.repack(from, &self.executor.plan.whole(into));
        }
        let heads = self.executor.plan.buffer(into).head_count() as usize;
        let batch = problem.batch as usize;
        let shape = [batch, from.tokens.len(), heads, problem.head_dim as usize];
        let first = from.tokens.start * heads * shape[3];
        let mut fresh = self.allocate(into)?;
        let mut overflow = self.overflow_of(into)?;
        let tensors = self.tensor_bytes(from.buffer).len();
        let source = (0..tensors).map(|tensor| self.memory.view(from.buffer, tensor)).collect();
        let source = key_value(problem, self.content(from.buffer), source, first);
        let target = key_value(problem, self.content(into), fresh.iter_mut().collect(), 0);
        for (source, target) in source.into_iter().zip(target) {
            self.executor.backend.convert(source, target, shape, overflow.as_mut())?;
        }
        self.overflow = overflow.or(self.overflow.take());
        self.memory.put(into, fresh);
        Ok(())
    }
}

/// Keys, then values, of a buffer with these tensors. Stored elements are taken from element
/// `first` on. Coded elements are taken from the beginning, because their tokens share scales.
fn key_value<Buffer>(
    problem: &AttentionProblem,
    content: Content,
    tensors: Vec<Buffer>,
    first: usize,
) -> Vec<Elements<Buffer>> {
    let stored = |dtype| move |buffer| Elements::Stored { buffer, first, dtype };
    match (content, problem.wire) {
        (Content::WireKeyValue, WireFormat::Int8) => {
            let mut tensors = tensors.into_iter();
            let codes: Vec<Buffer> = tensors.by_ref().take(2).collect();
            let parts = codes.into_iter().zip(tensors).zip([Scales::Channels, Scales::Rows]);
            parts.map(|((codes, scales), of)| Elements::Coded { codes, scales, of }).collect()
        }
        (Content::WireKeyValue, WireFormat::F16) => tensors.into_iter().map(stored(Dtype::F16)).collect(),
        _ => tensors.into_iter().map(stored(content.stored_dtype(problem))).collect(),
    }
}
