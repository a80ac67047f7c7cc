//! Attention of a few queries over many keys on the CPU, as in decoding, against a loop that only
//! reads the same keys and values.
//!
//! Such a call reads each key and value once and does little else, so the floor of its time is the
//! time to read them. The loop adds all numbers up, with the same threads, in turns with the calls.
//!
//! `cargo bench -p kyklos --no-default-features --features cpu --bench decode_cpu -- [--runs N]
//! [--threads N] [--case ROWS,KEYS,HQ,HKV,D,dtype]...`. Times are medians of reset + attend +
//! finalize.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::{Attend, Backend, Control, Layout, Operand, State, StateMut, StateShape};
use kyklos::{AttentionProblem, BlockWork, Dtype, Mask, TokenRuns};
use pulp::Simd;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let values = |name: &str| -> Vec<String> {
        arguments.windows(2).filter(|pair| pair[0] == name).map(|pair| pair[1].clone()).collect()
    };
    let number = |text: &String| text.parse::<usize>().expect("a whole number");
    let runs = values("--runs").last().map_or(25, number);
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = values("--threads").last().map_or(all, number);
    let mut cases = values("--case");
    if cases.is_empty() {
        cases = CASES.iter().map(|case| (*case).to_owned()).collect();
    }
    let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool"));
    let backend = CpuBackend::with_pool(Arc::clone(&pool));
    println!("rows,keys,hq,hkv,d,dtype,threads,attend_us,read_us,attend_gb_per_s,read_gb_per_s,of_the_loop");
    for case in cases {
        let (mut attend, mut read, bytes) = time(&case, &backend, &pool, runs);
        attend.sort_by(f64::total_cmp);
        read.sort_by(f64::total_cmp);
        let (attend, read) = (attend[runs / 2], read[runs / 2]);
        let speed = |us: f64| bytes / us / 1e3;
        println!(
            "{case},{threads},{attend:.1},{read:.1},{:.2},{:.2},{:.2}",
            speed(attend),
            speed(read),
            read / attend
        );
    }
}

/// Microseconds of the calls and of the reads, and the bytes of keys and values.
fn time(
    case: &str,
    backend: &CpuBackend,
    pool: &rayon::ThreadPool,
    runs: usize,
) -> (Vec<f64>, Vec<f64>, f64) {
    let parts: Vec<&str> = case.split(',').collect();
    let n = |i: usize| parts[i].parse::<u32>().expect("a whole number");
    let [rows, keys, q_heads, kv_heads, dim] = [n(0), n(1), n(2), n(3), n(4)];
    let dtype: Dtype = parts[5].parse().expect("f32, f16 or bf16");
    let problem = AttentionProblem::new([1, keys, q_heads, kv_heads, dim], dtype, Mask::causal())
        .and_then(|problem| problem.with_queries(rows, keys - rows))
        .expect("a problem");
    let tensor = |label, rows: u32, heads: u32| {
        let elements = (rows * heads * dim) as usize;
        // Small numbers of every type: 0x2c2c is 0.065 as f16 and 2.4e-12 as bf16, and 0x2c2c2c2c is
        // 2.4e-12 as f32.
        let bytes = Bytes::from(vec![0x2c_u8; elements * dtype.bytes()]);
        (backend.upload(label, bytes.clone()).expect("memory"), bytes)
    };
    let ((q, _), (k, k_bytes), (v, v_bytes)) =
        (tensor("q", rows, q_heads), tensor("k", keys, kv_heads), tensor("v", keys, kv_heads));
    let shape = StateShape { batch: 1, rows: rows as usize, heads: q_heads as usize, dim: dim as usize };
    let alloc = |label, bytes| backend.alloc(label, bytes).expect("memory");
    let (mut a, mut ml) = (alloc("a", shape.a_bytes()), alloc("ml", shape.ml_bytes()));
    let mut o = alloc("o", shape.a_bytes() / 4 * dtype.bytes());
    let mut lse = alloc("lse", shape.lse_bytes());
    let (queries, all) = (TokenRuns::contiguous(0..rows), TokenRuns::contiguous(0..keys));
    let work = &BlockWork::layers(&problem, &queries, &all, backend.tile_shape(&problem, shape))[0];
    let kv_head_of: Vec<u32> = (0..q_heads).map(|head| head / problem.group()).collect();
    let layout = |rows: u32, heads: u32| Layout {
        offset: 0,
        batch_stride: (rows * heads * dim) as usize,
        row_stride: (heads * dim) as usize,
        head_stride: dim as usize,
    };
    let mut attend = || {
        let start = Instant::now();
        let mut state = StateMut { a: &mut a, ml: &mut ml, shape };
        backend.reset_state(&mut state).expect("reset");
        let args = Attend {
            dtype,
            scale: problem.scale,
            softcap: problem.softcap,
            q: Operand { buffer: &q, layout: layout(rows, q_heads) },
            k: Operand { buffer: &k, layout: layout(keys, kv_heads) },
            v: Operand { buffer: &v, layout: layout(keys, kv_heads) },
            kv_head_of: &kv_head_of,
            work,
            bias: None,
            fixed_order: false,
            inference: true,
            state,
        };
        pollster::block_on(backend.attend(args, &Control::default())).expect("attend");
        let state = State { a: &a, ml: &ml, shape };
        backend.finalize(&state, &[], dtype, &mut o, &mut lse).expect("finalize");
        start.elapsed().as_secs_f64() * 1e6
    };
    let read = || {
        let start = Instant::now();
        for bytes in [&k_bytes, &v_bytes] {
            let sums = pool.broadcast(|context| {
                let share = bytes.len() / context.num_threads() / 64 * 64;
                let part = &bytes[context.index() * share..][..share];
                pulp::Arch::new().dispatch(Sum(bytemuck::cast_slice(part)))
            });
            black_box(sums);
        }
        start.elapsed().as_secs_f64() * 1e6
    };
    attend();
    read();
    let times = (0..runs).map(|_| (attend(), read())).unzip();
    let (attends, reads): (Vec<f64>, Vec<f64>) = times;
    #[expect(clippy::cast_precision_loss, reason = "a number of bytes")]
    let bytes = (k_bytes.len() + v_bytes.len()) as f64;
    (attends, reads, bytes)
}

/// The sum of some numbers, whatever they mean.
struct Sum<'a>(&'a [f32]);

impl pulp::WithSimd for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let vectors = S::as_simd_f32s(self.0).0;
        let mut sums = [simd.splat_f32s(0.0); 8];
        for eight in vectors.as_chunks::<8>().0 {
            for (sum, vector) in sums.iter_mut().zip(eight) {
                *sum = simd.add_f32s(*sum, *vector);
            }
        }
        sums.iter().map(|sum| simd.reduce_sum_f32s(*sum)).sum()
    }
}

const CASES: &[&str] = &[
    "1,4096,8,8,64,f32",
    "1,16384,8,8,64,f32",
    "1,131072,8,8,64,f32",
    "1,131072,8,8,128,f32",
    "1,131072,8,2,128,f32",
    "4,131072,8,8,128,f32",
    "8,131072,8,8,128,f32",
    "1,131072,8,8,128,bf16",
    "1,131072,8,2,128,bf16",
    "1,65536,32,8,128,bf16",
    "8,131072,8,8,128,bf16",
    "1,131072,8,8,128,f16",
    "8,131072,8,8,128,f16",
];
