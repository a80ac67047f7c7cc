//! The backward pass of a resident call.

use bytes::Bytes;
use half::{bf16, f16};
use kyklos::backend::{AttendBackward, Backend, Control, Operand, RowStats};
use kyklos::{BlockWork, Dtype, TokenRuns};
use kyklos_oracle::inputs::{TensorId, fill};
use kyklos_oracle::oracle::Element;

use super::{Resident, dense};
use crate::failure::Result;

/// The gradient of the output of a call, and f32 sums of the gradients of q, k and v.
pub(crate) struct ResidentGradients<Buffer> {
    layers: Vec<BlockWork>,
    d_o: Buffer,
    stats: Buffer,
    dq: Buffer,
    dk: Buffer,
    dv: Buffer,
}

/// The f32 gradients of a whole problem, and the gradient of the output in the problem's type.
#[derive(Debug)]
pub(crate) struct WholeGradients {
    pub(crate) d_o: Bytes,
    pub(crate) dq: Bytes,
    pub(crate) dk: Bytes,
    pub(crate) dv: Bytes,
}

impl<Buffer> Resident<Buffer> {
    /// A random gradient of the output, and room for the gradients.
    pub(crate) fn gradients<B: Backend<Buffer = Buffer>>(
        &self,
        backend: &B,
        seed: u64,
    ) -> Result<ResidentGradients<Buffer>> {
        let problem = &self.problem;
        backend.supports_backward(problem.dtype, problem.head_dim as usize)?;
        let queries = TokenRuns::contiguous(0..problem.q_len);
        let keys = TokenRuns::contiguous(0..problem.kv_len);
        let tile = backend.backward_tile_shape(problem, self.shape);
        let (q_bytes, kv_bytes) = self.sum_bytes();
        Ok(ResidentGradients {
            layers: BlockWork::layers(problem, &queries, &keys, tile),
            d_o: backend.upload("do", output_gradient(problem.dtype, q_bytes / 4, seed))?,
            stats: backend.alloc("row statistics", self.shape.stats_bytes())?,
            dq: backend.alloc("dq", q_bytes)?,
            dk: backend.alloc("dk", kv_bytes)?,
            dv: backend.alloc("dv", kv_bytes)?,
        })
    }

    /// Computes the gradients of the last [`Self::run`], and waits for the device.
    pub(crate) fn run_backward<B: Backend<Buffer = Buffer>>(
        &self,
        backend: &B,
        gradients: &mut ResidentGradients<Buffer>,
        control: &Control,
    ) -> Result<()> {
        let problem = &self.problem;
        let ResidentGradients { layers, d_o, stats, dq, dk, dv } = gradients;
        let (q_layout, kv_layout) = self.layouts();
        backend.row_stats(RowStats {
            dtype: problem.dtype,
            shape: self.shape,
            o: &self.o,
            d_o,
            lse: &self.lse,
            d_lse: None,
            stats,
        })?;
        for sum in [&mut *dq, &mut *dk, &mut *dv] {
            backend.clear(sum)?;
        }
        for work in layers.iter() {
            let operand = |buffer, layout| Operand { buffer, layout };
            let args = AttendBackward {
                dtype: problem.dtype,
                scale: problem.scale,
                softcap: problem.softcap,
                q: operand(&self.q, q_layout),
                d_o: operand(d_o, q_layout),
                stats: operand(stats, dense(problem.q_len, problem.q_heads, 4)),
                k: operand(&self.k, kv_layout),
                v: operand(&self.v, kv_layout),
                kv_head_of: &self.kv_head_of,
                work,
                bias: None,
                shape: self.shape,
                dq,
                dk,
                dv,
                kv_layout,
                d_bias: None,
            };
            pollster::block_on(backend.attend_backward(args, control))?;
        }
        Ok(pollster::block_on(backend.wait())?)
    }

    /// The gradients of the last [`Self::run_backward`].
    pub(crate) fn whole_gradients<B: Backend<Buffer = Buffer>>(
        &self,
        backend: &B,
        gradients: &mut ResidentGradients<Buffer>,
    ) -> Result<WholeGradients> {
        let (q_bytes, kv_bytes) = self.sum_bytes();
        let fetch = |buffer: &mut Buffer, bytes: usize| -> Result<Bytes> {
            Ok(pollster::block_on(backend.download(buffer, 0..bytes))?)
        };
        Ok(WholeGradients {
            d_o: fetch(&mut gradients.d_o, q_bytes / 4 * self.problem.dtype.bytes())?,
            dq: fetch(&mut gradients.dq, q_bytes)?,
            dk: fetch(&mut gradients.dk, kv_bytes)?,
            dv: fetch(&mut gradients.dv, kv_bytes)?,
        })
    }

    /// Bytes of the f32 sums of dq, and of dk or dv.
    fn sum_bytes(&self) -> (usize, usize) {
        let (q, kv) = self.layouts();
        let batch = self.shape.batch * 4;
        (batch * q.batch_stride, batch * kv.batch_stride)
    }
}

fn output_gradient(dtype: Dtype, elements: usize, seed: u64) -> Bytes {
    fn made<E: Element + bytemuck::Pod>(elements: usize, seed: u64, zero: E) -> Bytes {
        let mut values = vec![zero; elements];
        fill(seed, TensorId::OutputGradient, 0..elements as u64, &mut values);
        Bytes::copy_from_slice(bytemuck::cast_slice(&values))
    }
    match dtype {
        Dtype::F32 => made(elements, seed, 0.0_f32),
        Dtype::F16 => made(elements, seed, f16::ZERO),
        Dtype::Bf16 => made(elements, seed, bf16::ZERO),
    }
}
