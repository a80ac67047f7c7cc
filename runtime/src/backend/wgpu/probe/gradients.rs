//! The gradients, as a side of a comparison.

use std::time::Instant;

use bytes::Bytes;
use kyklos_plan::{AttentionProblem, BlockWork, TokenRuns};
use pollster::block_on;

use super::side::{HEADS, Run, TOKENS, floats, layout, problem, shape, values};
use crate::backend::wgpu::backend::WgpuBackend;
use crate::backend::wgpu::storage::buffer::WgpuBuffer;
use crate::backend::{AttendBackward, Backend, Control, Layout, Operand};
use crate::error::Result;

/// The gradients of q, k and v.
pub(super) struct Gradients {
    backend: WgpuBackend,
    problem: AttentionProblem,
    work: BlockWork,
    /// q, k, v and the gradient of the output.
    inputs: [WgpuBuffer; 4],
    stats: WgpuBuffer,
    sums: [WgpuBuffer; 3],
}

impl Gradients {
    pub(super) fn new(backend: WgpuBackend, head_dim: u32) -> Result<Self> {
        let problem = problem(head_dim)?;
        let tokens = TokenRuns::contiguous(0..TOKENS);
        let shape = shape(&problem);
        let tile = backend.backward_tile_shape(&problem, shape);
        let work = BlockWork::layers(&problem, &tokens, &tokens, tile).swap_remove(0);
        let upload = |label: &str, grows| backend.upload(label, Bytes::from(values(&problem, grows)));
        let sum = |label: &str| backend.alloc(label, shape.a_bytes());
        // Not those of an output, which would take a forward pass: a row has about as many weights of about
        // the same size as it sees keys.
        let stats: Vec<f32> = (0..TOKENS * HEADS)
            .flat_map(|row_head| [((row_head / HEADS + 1) as f32).ln(), 1.0, 0.25, 0.0])
            .collect();
        Ok(Self {
            inputs: [upload("q", false)?, upload("k", true)?, upload("v", false)?, upload("d_o", true)?],
            stats: backend.upload("row statistics", Bytes::copy_from_slice(bytemuck::cast_slice(&stats)))?,
            sums: [sum("dq")?, sum("dk")?, sum("dv")?],
            backend,
            problem,
            work,
        })
    }
}

impl Run for Gradients {
    const RELATIVE: bool = true;

    fn time(&mut self, calls: u32) -> Result<f64> {
        let layout = layout(&self.problem);
        let row_stride = 4 * HEADS as usize;
        let of_stats =
            Layout { offset: 0, batch_stride: TOKENS as usize * row_stride, row_stride, head_stride: 4 };
        let kv_head_of: Vec<u32> = (0..HEADS).collect();
        self.sums.iter_mut().try_for_each(|sum| self.backend.clear(sum))?;
        block_on(self.backend.wait())?;
        let start = Instant::now();
        for _ in 0..calls {
            let [q, k, v, d_o] = self.inputs.each_ref().map(|buffer| Operand { buffer, layout });
            let [dq, dk, dv] = self.sums.each_mut();
            let args = AttendBackward {
                dtype: self.problem.dtype,
                scale: self.problem.scale,
                softcap: None,
                q,
                d_o,
                stats: Operand { buffer: &self.stats, layout: of_stats },
                k,
                v,
                kv_head_of: &kv_head_of,
                work: &self.work,
                bias: None,
                shape: shape(&self.problem),
                dq,
                dk,
                dv,
                kv_layout: layout,
                d_bias: None,
            };
            block_on(self.backend.attend_backward(args, &Control::default()))?;
        }
        block_on(self.backend.wait())?;
        Ok(start.elapsed().as_secs_f64() / f64::from(calls))
    }

    fn results(&mut self) -> Result<Vec<Vec<f32>>> {
        let bytes = shape(&self.problem).a_bytes();
        self.sums.iter_mut().map(|sum| floats(&self.backend, sum, bytes)).collect()
    }
}
