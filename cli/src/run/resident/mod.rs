//! One attention call on tensors that stay on a device, for timing and checks.

mod backward;

use bytes::Bytes;
use half::{bf16, f16};
use kyklos::backend::{Attend, Backend, Control, Layout, Operand, Results, State, StateMut, StateShape};
use kyklos::{AttentionProblem, BlockWork, Dtype, TokenRuns};

use crate::failure::Result;
use crate::tensors::{Source, TensorKind};
pub(crate) use backward::WholeGradients;

/// Tensors and results on a device.
#[derive(Debug)]
pub(crate) struct Resident<Buffer> {
    problem: AttentionProblem,
    layers: Vec<BlockWork>,
    kv_head_of: Vec<u32>,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    a: Buffer,
    ml: Buffer,
    o: Buffer,
    lse: Buffer,
    shape: StateShape,
}

impl<Buffer> Resident<Buffer> {
    /// Random tensors for `problem`.
    pub(crate) fn new<B: Backend<Buffer = Buffer>>(
        backend: &B,
        problem: &AttentionProblem,
        seed: u64,
    ) -> Result<Self> {
        Self::of(backend, problem, |which| whole(problem, seed, which))
    }

    /// The values of [`Self::new`] as f32, so that the computation rounds nothing further.
    pub(crate) fn widened<B: Backend<Buffer = Buffer>>(
        backend: &B,
        problem: &AttentionProblem,
        seed: u64,
    ) -> Result<Self> {
        let wide = problem.clone().with_dtype(Dtype::F32)?;
        Self::of(backend, &wide, |which| Ok(widen(problem.dtype, &whole(problem, seed, which)?)))
    }

    fn of<B: Backend<Buffer = Buffer>>(
        backend: &B,
        problem: &AttentionProblem,
        read: impl Fn(TensorKind) -> Result<Bytes>,
    ) -> Result<Self> {
        let upload = |label, which| -> Result<Buffer> { Ok(backend.upload(label, read(which)?)?) };
        let shape = state_shape(problem);
        let queries = TokenRuns::contiguous(0..problem.q_len);
        let keys = TokenRuns::contiguous(0..problem.kv_len);
        Ok(Self {
            layers: BlockWork::layers(problem, &queries, &keys, backend.tile_shape(problem, shape)),
            kv_head_of: (0..problem.q_heads).map(|head| head / problem.group()).collect(),
            q: upload("q", TensorKind::Q)?,
            k: upload("k", TensorKind::K)?,
            v: upload("v", TensorKind::V)?,
            a: backend.alloc("a", shape.a_bytes())?,
            ml: backend.alloc("ml", shape.ml_bytes())?,
            o: backend.alloc("o", o_bytes(problem))?,
            lse: backend.alloc("lse", shape.lse_bytes())?,
            shape,
            problem: problem.clone(),
        })
    }

    /// Runs reset, attend and finalize, and waits for the device. Cancelling through `control` is
    /// an error.
    pub(crate) fn run<B: Backend<Buffer = Buffer>>(&mut self, backend: &B, control: &Control) -> Result<()> {
        let problem = &self.problem;
        let (q_layout, kv_layout) = self.layouts();
        let mut state = StateMut { a: &mut self.a, ml: &mut self.ml, shape: self.shape };
        backend.reset_state(&mut state)?;
        for (n, work) in self.layers.iter().enumerate() {
            let args = Attend {
                dtype: problem.dtype,
                scale: problem.scale,
                softcap: problem.softcap,
                q: Operand { buffer: &self.q, layout: q_layout },
                k: Operand { buffer: &self.k, layout: kv_layout },
                v: Operand { buffer: &self.v, layout: kv_layout },
                kv_head_of: &self.kv_head_of,
                work,
                bias: None,
                fixed_order: false,
                inference: true,
                state: StateMut { a: &mut self.a, ml: &mut self.ml, shape: self.shape },
            };
            if n + 1 < self.layers.len() {
                pollster::block_on(backend.attend(args, control))?;
                continue;
            }
            let results = Results { sinks: &problem.sinks, o: &mut self.o, lse: &mut self.lse };
            pollster::block_on(backend.attend_and_finalize(args, results, control))?;
        }
        if self.layers.is_empty() {
            let state = State { a: &self.a, ml: &self.ml, shape: self.shape };
            backend.finalize(&state, &problem.sinks, problem.dtype, &mut self.o, &mut self.lse)?;
        }
        Ok(pollster::block_on(backend.wait())?)
    }

    /// Of q and of k.
    fn layouts(&self) -> (Layout, Layout) {
        let (q_len, q_heads, kv_len, kv_heads) =
            (self.problem.q_len, self.problem.q_heads, self.problem.kv_len, self.problem.kv_heads);
        (dense(q_len, q_heads, self.shape.dim), dense(kv_len, kv_heads, self.shape.dim))
    }

    /// o and lse of the last run; lse rounded to f32.
    pub(crate) fn results<B: Backend<Buffer = Buffer>>(&mut self, backend: &B) -> Result<(Bytes, Bytes)> {
        let o = backend.download(&mut self.o, 0..o_bytes(&self.problem));
        let pairs = backend.download(&mut self.lse, 0..self.shape.lse_bytes());
        let (o, pairs) = (pollster::block_on(o)?, pollster::block_on(pairs)?);
        let rounded = |[number, _]: &[[u8; 4]; 2]| *number;
        let lse: Vec<[u8; 4]> = pairs.as_chunks::<4>().0.as_chunks::<2>().0.iter().map(rounded).collect();
        Ok((o, lse.into_flattened().into()))
    }
}

/// `[batch, tokens, heads, dim]` without gaps.
fn dense(tokens: u32, heads: u32, dim: usize) -> Layout {
    let row_stride = heads as usize * dim;
    Layout { offset: 0, batch_stride: tokens as usize * row_stride, row_stride, head_stride: dim }
}

/// Extents of the running state of the whole problem.
pub(crate) fn state_shape(problem: &AttentionProblem) -> StateShape {
    StateShape {
        batch: problem.batch as usize,
        rows: problem.q_len as usize,
        heads: problem.q_heads as usize,
        dim: problem.head_dim as usize,
    }
}

/// All tokens of a random tensor.
fn whole(problem: &AttentionProblem, seed: u64, which: TensorKind) -> Result<Bytes> {
    let tokens = if which == TensorKind::Q { problem.q_len } else { problem.kv_len };
    Source::Random { seed }.read(problem, which, &TokenRuns::contiguous(0..tokens))
}

fn widen(dtype: Dtype, bytes: &Bytes) -> Bytes {
    let wide: Vec<f32> = match dtype {
        Dtype::F32 => return bytes.clone(),
        Dtype::F16 => bytemuck::cast_slice::<u8, f16>(bytes).iter().map(|x| x.to_f32()).collect(),
        Dtype::Bf16 => bytemuck::cast_slice::<u8, bf16>(bytes).iter().map(|x| x.to_f32()).collect(),
    };
    bytemuck::cast_slice::<f32, u8>(&wide).to_vec().into()
}

fn o_bytes(problem: &AttentionProblem) -> usize {
    state_shape(problem).a_bytes() / 4 * problem.dtype.bytes()
}
