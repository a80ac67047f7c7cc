//! Steps of backward plans.

use super::run::Run;
use crate::backend::{AttendBackward, Backend, BiasGradient, Control, Extent, Layout, Operand};
use crate::collective::Collective;
use crate::error::Result;
use kyklos_plan::BlockWork;
use kyklos_plan::plan::{BufferId, GradientStep, Slice};

/// The tensors of the sums of a [`GradientStep`].
pub(super) struct Sums<Buffer> {
    dq: Vec<Buffer>,
    d_kv: Vec<Buffer>,
    /// Of its rows of the bias, or of those that all queries share.
    d_bias: Option<Buffer>,
}

impl<Buffer> Default for Sums<Buffer> {
    fn default() -> Self {
        Self { dq: Vec::new(), d_kv: Vec::new(), d_bias: None }
    }
}

impl<B: Backend, C: Collective<B> + ?Sized> Run<'_, '_, B, C> {
    /// Takes the tensors of a sum of gradients out of memory. If the sum does not exist yet,
    /// creates it with zeros.
    pub(super) fn sum(&mut self, id: BufferId) -> Result<Vec<B::Buffer>> {
        if let Some(tensors) = self.memory.take(id) {
            return Ok(tensors);
        }
        let mut tensors = self.allocate(id)?;
        for tensor in &mut tensors {
            self.executor.backend.clear(tensor)?;
        }
        Ok(tensors)
    }

    /// Takes the sums to which a [`GradientStep`] adds out of memory.
    pub(super) fn take_sums(&mut self, step: &GradientStep) -> Result<Sums<B::Buffer>> {
        let GradientStep { dq, d_kv, d_bias, .. } = step;
        let d_bias = match (d_bias, self.d_shared_bias.take()) {
            (Some(of_rows), _) => self.sum(of_rows.buffer)?.pop(),
            (None, shared) => shared,
        };
        Ok(Sums { dq: self.sum(*dq)?, d_kv: self.sum(d_kv.buffer)?, d_bias })
    }

    /// Puts these sums back.
    pub(super) fn put_sums(&mut self, step: &GradientStep, sums: Sums<B::Buffer>) {
        let GradientStep { dq, d_kv, d_bias, .. } = step;
        self.memory.put(*dq, sums.dq);
        self.memory.put(d_kv.buffer, sums.d_kv);
        match d_bias {
            Some(of_rows) => self.memory.put(of_rows.buffer, sums.d_bias.into_iter().collect()),
            None => self.d_shared_bias = sums.d_bias,
        }
    }

    /// Makes the rank's part of the gradient of a bias whose rows all queries share, if the plan is
    /// to compute it.
    pub(super) fn begin_shared_bias_gradient(&mut self) -> Result<()> {
        let bytes = self.executor.set.problem.shared_bias_gradient_bytes();
        if self.executor.plan.gradients.is_some() && bytes > 0 {
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            let mut sum = self.executor.backend.alloc("dbias", bytes)?;
            self.executor.backend.clear(&mut sum)?;
            self.d_shared_bias = Some(sum);
        }
        Ok(())
    }

    /// One layer of a [`GradientStep`].
    pub(super) async fn attend_backward(
        &self,
        step: &GradientStep,
        work: &BlockWork,
        Sums { dq, d_kv, d_bias }: &mut Sums<B::Buffer>,
        control: &Control,
    ) -> Result<()> {
        let GradientStep { q, d_o, stats, kv, dq: sum, d_kv: keys, bias, d_bias: of_bias } = step;
        let (plan, problem) = (self.executor.plan, &self.executor.set.problem);
        let dim = problem.head_dim as usize;
        let operand = |slice: &Slice, tensor: usize, row: usize| Operand {
            buffer: self.memory.view(slice.buffer, tensor),
            layout: self.layout(slice, row),
        };
        let kv_first = plan.slice_heads(kv).start;
        let kv_head_of: Vec<u32> =
            plan.slice_heads(q).map(|head| head / problem.group() - kv_first).collect();
        let (dk, dv) = d_kv.split_at_mut(1);
        let args = AttendBackward {
            dtype: problem.dtype,
            scale: problem.scale,
            softcap: problem.softcap,
            q: operand(q, 0, dim),
            d_o: operand(d_o, 0, dim),
            stats: operand(stats, 0, 4),
            k: operand(kv, 0, dim),
            v: operand(kv, 1, dim),
            kv_head_of: &kv_head_of,
            work,
            bias: self.bias(q, bias.as_ref()),
            shape: self.shape(*sum),
            dq: &mut dq[0],
            dk: &mut dk[0],
            dv: &mut dv[0],
            kv_layout: self.layout(keys, dim),
            d_bias: d_bias.as_mut().zip(problem.bias).map(|(buffer, tensor)| {
                let columns = problem.kv_len as usize;
                BiasGradient {
                    buffer,
                    layout: self.bias_layout(tensor, q, of_bias.as_ref(), columns),
                    columns,
                }
            }),
        };
        self.executor.backend.attend_backward(args, control).await
    }

    /// Adds the sum `from` to the slice `into`.
    pub(super) fn accumulate(&mut self, from: BufferId, into: &Slice) -> Result<()> {
        let problem = &self.executor.set.problem;
        let (source, mut target) = (self.sum(from)?, self.sum(into.buffer)?);
        let whole = self.executor.plan.whole(from);
        let content = self.content(from);
        let row = content.tensors(problem).map(|tensor| tensor.row_bytes).next().unwrap_or(0);
        let extent = Extent {
            batch: content.batch(problem) as usize,
            rows: into.tokens.len(),
            heads: (into.heads.end - into.heads.start) as usize,
            row_bytes: row,
        };
        let layouts: [Layout; 2] = [self.layout(&whole, row), self.layout(into, row)];
        for (source, target) in source.iter().zip(&mut target) {
            self.executor.backend.accumulate((source, layouts[0]), (target, layouts[1]), extent)?;
        }
        self.memory.put(from, source);
        self.memory.put(into.buffer, target);
        Ok(())
    }

    /// Whether a copy or a conversion reads a sum that no step has added to: it is 0.
    pub(super) fn ensure_sum(&mut self, id: BufferId) -> Result<()> {
        if self.content(id).is_sum() && !self.memory.is_alive(id) {
            let zeros = self.sum(id)?;
            self.memory.put(id, zeros);
        }
        Ok(())
    }

    /// Whether a conversion changes the type of its elements; otherwise it is a copy.
    pub(super) fn rounds(&self, from: BufferId) -> bool {
        !self.content(from).is_sum() || self.executor.set.problem.dtype != kyklos_plan::Dtype::F32
    }
}
