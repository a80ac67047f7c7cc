//! How long attention takes, data resident. Nothing is asserted: a software driver says nothing about hardware.

use bytes::Bytes;
use kyklos::backend::wgpu::WgpuBackend;
use kyklos::backend::{Attend, Backend, Control, Layout, Operand, StateMut, StateShape};
use kyklos::{AttentionProblem, BlockWork, Clock, Dtype, SystemClock, TokenRuns};
use kyklos_oracle::inputs::{TensorId, fill};

use crate::Claim;

pub(crate) const CLAIMS: &[Claim] = &[
    ("attends to 1024 tokens, 8 heads of 64, f32", |backend| Box::pin(headline(backend))),
    ("copies 64 MiB there and back", |backend| Box::pin(copies(backend))),
];

const ROUNDS: usize = 3;

async fn headline(backend: &WgpuBackend) -> String {
    let mut told = Vec::new();
    for mask in ["full", "causal"] {
        let problem = AttentionProblem::new([1, 1024, 8, 8, 64], Dtype::F32, mask.parse().unwrap()).unwrap();
        let mut times_ms = timed(backend, &problem).await;
        times_ms.sort_by(f64::total_cmp);
        let (least, middle, most) = (times_ms[0], times_ms[ROUNDS / 2], times_ms[ROUNDS - 1]);
        told.push(format!("{mask} {middle:.0} ms ({least:.0} to {most:.0})"));
    }
    format!("median of {ROUNDS}: {}", told.join(", "))
}

/// What the page's thread is held up by an upload, and how long a download takes until the bytes are there.
async fn copies(backend: &WgpuBackend) -> String {
    let data = Bytes::from((0..1_u32 << 24).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
    let clock = SystemClock::new();
    let (mut up_ms, mut down_ms) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start_ns = clock.now_ns();
        let mut buffer = backend.upload("data", data.clone()).unwrap();
        up_ms.push((clock.now_ns() - start_ns) as f64 / 1e6);
        backend.wait().await.unwrap();
        let start_ns = clock.now_ns();
        assert!(backend.download(&mut buffer, 0..data.len()).await.unwrap() == data);
        down_ms.push((clock.now_ns() - start_ns) as f64 / 1e6);
    }
    let told = [up_ms, down_ms].map(|mut times_ms| {
        times_ms.sort_by(f64::total_cmp);
        format!("{:.0} ms ({:.0} to {:.0})", times_ms[ROUNDS / 2], times_ms[0], times_ms[ROUNDS - 1])
    });
    format!("median of {ROUNDS}: upload {}, download {}", told[0], told[1])
}

async fn timed(backend: &WgpuBackend, problem: &AttentionProblem) -> Vec<f64> {
    let tensor = |id| {
        let mut values = vec![0f32; 1024 * 8 * 64];
        fill(1, id, 0..values.len() as u64, &mut values);
        backend.upload("tensor", Bytes::copy_from_slice(bytemuck::cast_slice(&values))).unwrap()
    };
    let [q, k, v] = [TensorId::Q, TensorId::K, TensorId::V].map(tensor);
    let shape = StateShape { batch: 1, rows: 1024, heads: 8, dim: 64 };
    let mut a = backend.alloc("a", shape.a_bytes()).unwrap();
    let mut ml = backend.alloc("ml", shape.ml_bytes()).unwrap();
    let tokens = TokenRuns::contiguous(0..1024);
    let work = &BlockWork::layers(problem, &tokens, &tokens, backend.tile_shape(problem, shape))[0];
    let layout = Layout { offset: 0, batch_stride: 1024 * 512, row_stride: 512, head_stride: 64 };
    let clock = SystemClock::new();
    let mut times_ms = Vec::new();
    // The first compiles.
    for round in 0..=ROUNDS {
        let mut state = StateMut { a: &mut a, ml: &mut ml, shape };
        backend.reset_state(&mut state).unwrap();
        backend.wait().await.unwrap();
        let start_ns = clock.now_ns();
        let attend = Attend {
            dtype: problem.dtype,
            scale: problem.scale,
            softcap: None,
            q: Operand { buffer: &q, layout },
            k: Operand { buffer: &k, layout },
            v: Operand { buffer: &v, layout },
            kv_head_of: &[0, 1, 2, 3, 4, 5, 6, 7],
            work,
            bias: None,
            fixed_order: false,
            inference: true,
            state,
        };
        backend.attend(attend, &Control::default()).await.unwrap();
        backend.wait().await.unwrap();
        if round > 0 {
            times_ms.push((clock.now_ns() - start_ns) as f64 / 1e6);
        }
    }
    times_ms
}
