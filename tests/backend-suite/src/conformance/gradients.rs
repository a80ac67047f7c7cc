//! The backward pass. A backend may refuse it, with an error of the request.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use kyklos::backend::{AttendBackward, Backend, Control, DeviceClass, Extent, Layout, Operand, RowStats};
use kyklos::{BlockWork, Dtype, Error, Result, TokenRuns};

use super::states::{floats, read};
use crate::{GradientCase, Whole, chosen_cases, dense_set, run_alone};

/// The tensors of a case on a device, and its sums.
struct OnDevice<'a, B: Backend> {
    backend: &'a B,
    case: &'a GradientCase,
    /// q, k, v, do.
    inputs: [B::Buffer; 4],
    stats: B::Buffer,
    /// dq, dk, dv.
    sums: [B::Buffer; 3],
}

/// Of `[batch, tokens, heads, dim]`, from token `first` on.
fn layout(tokens: u32, heads: u32, dim: u32, first: u32) -> Layout {
    let row = (heads * dim) as usize;
    Layout {
        offset: first as usize * row,
        batch_stride: tokens as usize * row,
        row_stride: row,
        head_stride: dim as usize,
    }
}

impl<'a, B: Backend> OnDevice<'a, B> {
    /// With row statistics from the output `whole` of the forward pass. The sums are cleared.
    fn new(backend: &'a B, case: &'a GradientCase, whole: &Whole) -> Result<Self> {
        let problem = &case.prepared.problem;
        let tensors = &case.prepared.tensors;
        let upload = |label, bytes: &Bytes| backend.upload(label, bytes.clone());
        let shape = kyklos::backend::StateShape {
            batch: problem.batch as usize,
            rows: problem.q_len as usize,
            heads: problem.q_heads as usize,
            dim: problem.head_dim as usize,
        };
        let d_o = upload("do", &case.d_o)?;
        let o = upload("o", &whole.o.clone().into())?;
        // The oracle has [batch, heads, rows].
        let by_head = |index: usize| {
            let (head, row, batch) =
                (index % shape.heads, index / shape.heads % shape.rows, index / shape.heads / shape.rows);
            (batch * shape.heads + head) * shape.rows + row
        };
        let pair = |index: usize| [whole.lse[by_head(index)], whole.rest[by_head(index)]];
        let lse: Vec<f32> = (0..whole.lse.len()).flat_map(pair).collect();
        let lse = upload("lse", &Bytes::copy_from_slice(bytemuck::cast_slice(&lse)))?;
        let d_lse = upload("dlse", &case.d_lse)?;
        let poison = |bytes: usize| upload("poison", &vec![0xFF; bytes].into());
        let mut stats = poison(shape.stats_bytes())?;
        let dtype = problem.dtype;
        let args =
            RowStats { dtype, shape, o: &o, d_o: &d_o, lse: &lse, d_lse: Some(&d_lse), stats: &mut stats };
        backend.row_stats(args)?;
        let kv_bytes = 4 * (problem.batch * problem.kv_len * problem.kv_heads * problem.head_dim) as usize;
        let mut sums = [poison(shape.a_bytes())?, poison(kv_bytes)?, poison(kv_bytes)?];
        sums.iter_mut().try_for_each(|sum| backend.clear(sum))?;
        let inputs = [upload("q", &tensors.q)?, upload("k", &tensors.k)?, upload("v", &tensors.v)?, d_o];
        Ok(Self { backend, case, inputs, stats, sums })
    }

    /// Adds the gradients of all pairs with the keys `keys`, whose sums are rows of dk and dv.
    async fn attend(&mut self, keys: std::ops::Range<u32>, control: &Control) -> Result<()> {
        let problem = &self.case.prepared.problem;
        let first = keys.start;
        let shape = kyklos::backend::StateShape {
            batch: problem.batch as usize,
            rows: problem.q_len as usize,
            heads: problem.q_heads as usize,
            dim: problem.head_dim as usize,
        };
        let queries = TokenRuns::contiguous(0..problem.q_len);
        let tile = self.backend.backward_tile_shape(problem, shape);
        let kv_head_of: Vec<u32> = (0..problem.q_heads).map(|head| head / problem.group()).collect();
        let of_q = layout(problem.q_len, problem.q_heads, problem.head_dim, 0);
        let of_kv = layout(problem.kv_len, problem.kv_heads, problem.head_dim, first);
        let of_stats = layout(problem.q_len, problem.q_heads, 4, 0);
        for work in &BlockWork::layers(problem, &queries, &TokenRuns::contiguous(keys), tile) {
            let [q, k, v, d_o] = &self.inputs;
            let [dq, dk, dv] = &mut self.sums;
            let args = AttendBackward {
                dtype: problem.dtype,
                scale: problem.scale,
                softcap: problem.softcap,
                q: Operand { buffer: q, layout: of_q },
                d_o: Operand { buffer: d_o, layout: of_q },
                stats: Operand { buffer: &self.stats, layout: of_stats },
                k: Operand { buffer: k, layout: of_kv },
                v: Operand { buffer: v, layout: of_kv },
                kv_head_of: &kv_head_of,
                work,
                bias: None,
                shape,
                dq,
                dk,
                dv,
                kv_layout: of_kv,
                d_bias: None,
            };
            self.backend.attend_backward(args, control).await?;
        }
        Ok(())
    }

    /// dq, dk and dv.
    async fn sums(&mut self) -> [Vec<f32>; 3] {
        let right = &self.case.right;
        let lengths = [right.dq.len(), right.dk.len(), right.dv.len()];
        let mut found = [const { Vec::new() }; 3];
        for ((found, sum), len) in found.iter_mut().zip(&mut self.sums).zip(lengths) {
            *found = floats(self.backend, sum, len * 4).await;
        }
        found
    }
}

/// Whether the backend takes the backward pass of a case. Otherwise the error is one of the
/// request.
fn takes<B: Backend>(backend: &B, case: &GradientCase, who: &str) -> bool {
    let problem = &case.prepared.problem;
    match backend.supports_backward(problem.dtype, problem.head_dim as usize) {
        Ok(()) => true,
        Err(error) => {
            assert!(error.is_request(), "{who}: {error}");
            false
        }
    }
}

/// The gradients of a case, with the keys in one block or in two.
async fn gradients_of<B: Backend>(backend: &B, case: &GradientCase, halves: bool) -> [Vec<f32>; 3] {
    let problem = &case.prepared.problem;
    let whole = run_alone(backend, &dense_set(problem), &case.prepared).await;
    let mut device = OnDevice::new(backend, case, &whole).unwrap();
    let middle = if halves { problem.kv_len / 2 } else { 0 };
    for keys in [0..middle, middle..problem.kv_len] {
        if !keys.is_empty() {
            device.attend(keys, &Control::default()).await.unwrap();
        }
    }
    device.sums().await
}

/// The cases without a tensor of biases: sessions have them in tests of their own.
pub(super) async fn every_case<B: Backend>(backend: &B, who: &str, dtype: Dtype) {
    // As for the output: a software driver needs a second to compile a kernel.
    let sparse = backend.info().class == DeviceClass::SoftwareGpu;
    let (offset, step) = match (sparse, dtype) {
        (false, _) => (0, 1),
        (true, Dtype::F32) => (0, 3),
        (true, _) => (dtype as usize, 9),
    };
    let plain = chosen_cases(backend.info()).filter(|case| case.bias.is_none());
    for (index, case) in plain.enumerate().skip(offset).step_by(step) {
        let case = GradientCase::new(case, dtype);
        if !takes(backend, &case, who) {
            continue;
        }
        let [dq, dk, dv] = gradients_of(backend, &case, index % 3 == 1).await.map(wide);
        // Sinks are no work of a backend.
        let errors = case.judge(&[dq, dk, dv, case.right.d_sinks.clone()]);
        let of_gradients = backend.accuracy(dtype).of_gradients;
        for (error, limit) in errors.iter().zip(case.dense_limits()) {
            let limit = limit.with_rounded_blocks(of_gradients, error.max_abs);
            if let Err(fault) = error.within(&limit) {
                panic!("{who} {} in {dtype}: {fault}\n  {}", case.prepared.case.name, case.prepared.oracle);
            }
        }
    }
}

fn wide(narrow: Vec<f32>) -> Vec<f64> {
    narrow.into_iter().map(f64::from).collect()
}

fn named(name: &str) -> GradientCase {
    let case = kyklos_oracle::inputs::cases().into_iter().find(|case| case.name == name).unwrap();
    GradientCase::new(case, Dtype::F32)
}

pub(super) async fn same_bytes<B: Backend>(backend: &B, who: &str) {
    let case = named("two rows beyond four tiles");
    if !takes(backend, &case, who) {
        return;
    }
    let bits = |sums: [Vec<f32>; 3]| sums.map(|sum| sum.into_iter().map(f32::to_bits).collect::<Vec<_>>());
    let first = bits(gradients_of(backend, &case, true).await);
    for _ in 0..3 {
        assert!(first == bits(gradients_of(backend, &case, true).await), "{who}");
    }
}

pub(super) async fn cancel<B: Backend>(backend: &B, who: &str) {
    let case = named("two rows beyond four tiles");
    if !takes(backend, &case, who) {
        return;
    }
    let whole = run_alone(backend, &dense_set(&case.prepared.problem), &case.prepared).await;
    let mut device = OnDevice::new(backend, &case, &whole).unwrap();
    let control = Control::new(Arc::new(AtomicBool::new(true)));
    let result = device.attend(0..case.prepared.problem.kv_len, &control).await;
    assert_eq!(result, Err(Error::Cancelled), "{who}");
    assert!(control.pieces_done() > 0, "{who}");
}

/// Adds a 2 x 5 x 3 window of rows of 6 numbers to one of another layout; everything else stays.
pub(super) async fn accumulate_is_exact<B: Backend>(backend: &B, who: &str) {
    if !takes(backend, &named("two rows beyond four tiles"), who) {
        return;
    }
    let extent = Extent { batch: 2, rows: 5, heads: 3, row_bytes: 24 };
    let from = Layout { offset: 48, batch_stride: 1200, row_stride: 120, head_stride: 24 };
    let into = Layout { offset: 24, batch_stride: 1440, row_stride: 240, head_stride: 48 };
    let source: Vec<f32> = (0..600_u16).map(|index| f32::from(index) * 0.25).collect();
    let mut expected: Vec<f32> = (0..720_u16).map(|index| 7.0 - f32::from(index)).collect();
    let upload = |numbers: &[f32]| {
        backend.upload("numbers", Bytes::copy_from_slice(bytemuck::cast_slice(numbers))).unwrap()
    };
    let (buffer, mut target) = (upload(&source), upload(&expected));
    for batch in 0..2 {
        for row in 0..5 {
            for head in 0..3 {
                let at = |layout: Layout| {
                    let Layout { offset, batch_stride, row_stride, head_stride } = layout;
                    (offset + batch * batch_stride + row * row_stride + head * head_stride) / 4
                };
                for number in 0..6 {
                    expected[at(into) + number] += source[at(from) + number];
                }
            }
        }
    }
    backend.accumulate((&buffer, from), (&mut target, into), extent).unwrap();
    let found = read(backend, &mut target, 0..2880).await;
    assert!(bytemuck::pod_collect_to_vec::<u8, f32>(&found) == expected, "{who}");
    backend.clear(&mut target).unwrap();
    assert!(read(backend, &mut target, 0..2880).await.iter().all(|byte| *byte == 0), "{who}");
}
