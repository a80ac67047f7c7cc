//! Speed of the CPU backend's attend, compared with the multiply-add peak of the same threads in
//! the same minute.
//!
//! `cargo bench -p kyklos --no-default-features --features cpu --bench attend_cpu -- [--short]
//! [--csv] [--runs N] [--threads N,N] [--backward] [--case B,S,HQ,HKV,D,mask,dtype]...`. Times are
//! reset + attend + finalize, in milliseconds; operations are 4 · (visible pairs) · D · heads, a
//! multiply-add being two. With `--backward` times are those of the statistics of the rows and the
//! gradients, with 10 operations instead of 4.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use half::{bf16, f16};
use kyklos::backend::cpu::CpuBackend;
use kyklos::backend::{
    Attend, AttendBackward, Backend, Control, Layout, Operand, RowStats, State, StateMut, StateShape,
};
use kyklos::{AttentionProblem, BlockWork, Dtype, Mask, TokenRuns};
use pulp::Simd;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| arguments.iter().any(|a| a == name);
    let values = |name: &str| -> Vec<String> {
        arguments.windows(2).filter(|pair| pair[0] == name).map(|pair| pair[1].clone()).collect()
    };
    let number = |text: &String| text.parse::<usize>().expect("a whole number");
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let runs = values("--runs").last().map_or(if has("--short") { 5 } else { 15 }, number);
    let threads: Vec<usize> = values("--threads").last().map_or_else(
        || if all > 1 { vec![1, all] } else { vec![1] },
        |list| list.split(',').map(|n| number(&n.to_owned())).collect(),
    );
    let mut cases = values("--case");
    if cases.is_empty() {
        let table = if has("--short") { SHORT } else { LONG };
        cases = table.iter().map(|case| (*case).to_owned()).collect();
    }
    let (csv, backward) = (has("--csv"), has("--backward"));
    if csv {
        println!(
            "shape,mask,dtype,threads,median_ms,min_ms,max_ms,gflop_per_s,peak_gflop_per_s,percent_of_peak"
        );
    } else {
        println!(
            "{:22} {:12} {:5} {:>2} {:>9} {:>9} {:>9} {:>8} {:>8} {:>6}",
            "B,S,HQ,HKV,D", "mask", "type", "t", "median ms", "min ms", "max ms", "GFLOP/s", "peak", "%"
        );
    }
    for threads in threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
        let pool = Arc::new(pool);
        let backend = CpuBackend::with_pool(Arc::clone(&pool));
        for case in &cases {
            let case = Case::parse(case);
            let peak = peak_gflops(&pool, threads);
            let mut ms = case.time(&backend, runs, backward);
            ms.sort_by(f64::total_cmp);
            let median = ms[ms.len() / 2];
            let speed = case.operations(backward) / median / 1e6;
            let peak = peak.max(peak_gflops(&pool, threads));
            let problem = &case.problem;
            let shape = format!(
                "{},{},{},{},{}",
                problem.batch, problem.q_len, problem.q_heads, problem.kv_heads, problem.head_dim
            );
            let (mask, dtype) = (problem.mask.to_string(), problem.dtype.name());
            let (min, max, percent) = (ms[0], ms[ms.len() - 1], 100.0 * speed / peak);
            if csv {
                println!(
                    "\"{shape}\",{mask},{dtype},{threads},{median:.3},{min:.3},{max:.3},{speed:.1},{peak:.1},{percent:.1}"
                );
            } else {
                println!(
                    "{shape:22} {mask:12} {dtype:5} {threads:2} {median:9.2} {min:9.2} {max:9.2} {speed:8.1} {peak:8.1} {percent:6.1}"
                );
            }
        }
    }
}

struct Case {
    problem: AttentionProblem,
}

impl Case {
    fn parse(text: &str) -> Self {
        let parts: Vec<&str> = text.split(',').collect();
        let n = |i: usize| parts[i].parse::<u32>().expect("a whole number");
        // The text of a mask may contain commas.
        let mask: Mask = parts[5..parts.len() - 1].join(",").parse().expect("a mask");
        let dtype: Dtype = parts[parts.len() - 1].parse().expect("f32, f16 or bf16");
        Self {
            problem: AttentionProblem::new([n(0), n(1), n(2), n(3), n(4)], dtype, mask).expect("a problem"),
        }
    }

    fn operations(&self, backward: bool) -> f64 {
        let p = &self.problem;
        let pairs: f64 = (0..p.batch)
            .flat_map(|b| (0..p.q_len).map(move |q| p.mask.visible(b as usize, q, p.kv_len)))
            .map(|spans| spans.keys() as f64)
            .sum();
        let of_pair = if backward { 10.0 } else { 4.0 };
        of_pair * pairs * f64::from(p.head_dim) * f64::from(p.q_heads)
    }

    fn tensor(&self, heads: u32, seed: u32) -> Bytes {
        let p = &self.problem;
        let count = p.batch as usize * p.q_len as usize * heads as usize * p.head_dim as usize;
        let mut state = seed;
        // Sums of four uniform numbers: close enough to normal ones for timing.
        let mut normal = || {
            (0..4)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    f64::from(state) / f64::from(u32::MAX) - 0.5
                })
                .sum::<f64>()
                * 1.7
        };
        #[expect(clippy::cast_possible_truncation, reason = "made-up data")]
        let bytes: Vec<u8> = match p.dtype {
            Dtype::F32 => (0..count).flat_map(|_| (normal() as f32).to_ne_bytes()).collect(),
            Dtype::F16 => (0..count).flat_map(|_| f16::from_f64(normal()).to_ne_bytes()).collect(),
            Dtype::Bf16 => (0..count).flat_map(|_| bf16::from_f64(normal()).to_ne_bytes()).collect(),
        };
        bytes.into()
    }

    fn time(&self, backend: &CpuBackend, runs: usize, backward: bool) -> Vec<f64> {
        let p = &self.problem;
        let shape = StateShape {
            batch: p.batch as usize,
            rows: p.q_len as usize,
            heads: p.q_heads as usize,
            dim: p.head_dim as usize,
        };
        let upload = |label, heads, seed| backend.upload(label, self.tensor(heads, seed)).expect("memory");
        let q = upload("q", p.q_heads, 1);
        let k = upload("k", p.kv_heads, 2);
        let v = upload("v", p.kv_heads, 3);
        let alloc = |label, bytes| backend.alloc(label, bytes).expect("memory");
        let (mut a, mut ml) = (alloc("a", shape.a_bytes()), alloc("ml", shape.ml_bytes()));
        let mut o = alloc("o", shape.a_bytes() / 4 * p.dtype.bytes());
        let mut lse = alloc("lse", shape.lse_bytes());
        let tokens = TokenRuns::contiguous(0..p.q_len);
        let work = &BlockWork::layers(p, &tokens, &tokens, backend.tile_shape(p, shape))[0];
        let kv_head_of: Vec<u32> = (0..p.q_heads).map(|h| h / p.group()).collect();
        let layout = |heads: u32| Layout {
            offset: 0,
            batch_stride: shape.rows * heads as usize * shape.dim,
            row_stride: heads as usize * shape.dim,
            head_stride: shape.dim,
        };
        let operand = |buffer, heads| Operand { buffer, layout: layout(heads) };
        let mut once = || {
            let start = Instant::now();
            let mut state = StateMut { a: &mut a, ml: &mut ml, shape };
            backend.reset_state(&mut state).expect("reset");
            let args = Attend {
                dtype: p.dtype,
                scale: p.scale,
                softcap: p.softcap,
                q: operand(&q, p.q_heads),
                k: operand(&k, p.kv_heads),
                v: operand(&v, p.kv_heads),
                kv_head_of: &kv_head_of,
                work,
                bias: None,
                fixed_order: false,
                inference: true,
                state,
            };
            pollster::block_on(backend.attend(args, &Control::default())).expect("attend");
            let state = State { a: &a, ml: &ml, shape };
            backend.finalize(&state, &[], p.dtype, &mut o, &mut lse).expect("finalize");
            start.elapsed().as_secs_f64() * 1e3
        };
        once();
        if !backward {
            return (0..runs).map(|_| once()).collect();
        }
        // Each run adds to the same sums: gradients of no meaning after the first, but finite ones.
        let d_o = upload("d_o", p.q_heads, 4);
        let mut stats = alloc("stats", shape.stats_bytes());
        let mut dq = alloc("dq", shape.a_bytes());
        let kv_bytes = shape.a_bytes() / p.q_heads as usize * p.kv_heads as usize;
        let (mut dk, mut dv) = (alloc("dk", kv_bytes), alloc("dv", kv_bytes));
        let work = &BlockWork::layers(p, &tokens, &tokens, backend.backward_tile_shape(p, shape))[0];
        let row_stats = Layout {
            offset: 0,
            batch_stride: shape.rows * shape.heads * 4,
            row_stride: shape.heads * 4,
            head_stride: 4,
        };
        let mut once = || {
            let start = Instant::now();
            let args = RowStats {
                dtype: p.dtype,
                shape,
                o: &o,
                d_o: &d_o,
                lse: &lse,
                d_lse: None,
                stats: &mut stats,
            };
            backend.row_stats(args).expect("statistics");
            let args = AttendBackward {
                dtype: p.dtype,
                scale: p.scale,
                softcap: p.softcap,
                q: operand(&q, p.q_heads),
                d_o: operand(&d_o, p.q_heads),
                stats: Operand { buffer: &stats, layout: row_stats },
                k: operand(&k, p.kv_heads),
                v: operand(&v, p.kv_heads),
                kv_head_of: &kv_head_of,
                work,
                bias: None,
                shape,
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
                kv_layout: layout(p.kv_heads),
                d_bias: None,
            };
            pollster::block_on(backend.attend_backward(args, &Control::default())).expect("gradients");
            start.elapsed().as_secs_f64() * 1e3
        };
        once();
        (0..runs).map(|_| once()).collect()
    }
}

/// Multiply-adds on registers only, as operations per second of all threads together. This peak
/// sets the lower limit of the time.
fn peak_gflops(pool: &rayon::ThreadPool, threads: usize) -> f64 {
    struct Peak;
    impl pulp::WithSimd for Peak {
        type Output = f64;
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> f64 {
            let (x, y) = (simd.splat_f32s(black_box(0.999)), simd.splat_f32s(black_box(1e-3)));
            let mut c = [simd.splat_f32s(1.0); 12];
            let start = Instant::now();
            for _ in 0..PEAK_STEPS {
                for c in &mut c {
                    *c = simd.mul_add_e_f32s(*c, x, y);
                }
            }
            let seconds = start.elapsed().as_secs_f64();
            black_box(c);
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let operations = (PEAK_STEPS * 12 * 2 * S::F32_LANES) as f64;
            operations / seconds / 1e9
        }
    }
    (0..3)
        .map(|_| pool.broadcast(|_| pulp::Arch::new().dispatch(Peak)).into_iter().take(threads).sum::<f64>())
        .fold(0.0, f64::max)
}

const PEAK_STEPS: usize = 3_000_000;
const SHORT: &[&str] = &["1,1024,8,8,64,full,f32", "1,1024,8,8,64,causal,f32", "1,1024,8,2,128,full,bf16"];
const LONG: &[&str] = &[
    "1,1024,8,8,64,full,f32",
    "1,1024,8,8,64,causal,f32",
    "1,1024,8,8,128,full,f32",
    "1,1024,8,8,128,causal,f32",
    "1,4096,8,8,64,full,f32",
    "1,4096,8,8,64,causal,f32",
    "1,4096,8,8,128,full,f32",
    "1,4096,8,8,128,causal,f32",
    "1,4096,8,2,64,full,f32",
    "1,1024,8,8,64,full,f16",
    "1,1024,8,8,64,causal,f16",
    "1,1024,8,8,64,full,bf16",
    "1,1024,8,8,64,causal,bf16",
    "1,4096,8,8,64,window:256,0,f32",
];
