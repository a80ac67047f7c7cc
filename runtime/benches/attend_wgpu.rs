//! Time of one `attend` on a wgpu device, as CSV.
//!
//! `--short` runs one shape a few times, `--decode` the shapes of few query rows; `--device N`
//! picks a device; `--portable` and `--cooperative` force those kernels. Wall time wobbles on a
//! shared machine; processor seconds of this process (all threads; on a software driver that is the
//! whole computation) do not.

use std::time::Instant;

use bytes::Bytes;
use kyklos::backend::wgpu::{KernelChoice, WgpuBackend, WgpuOptions};
use kyklos::backend::{Attend, Backend, Control, Layout, Operand, StateMut, StateShape};
use kyklos::{AttentionProblem, BlockWork, Dtype, Error, TokenRuns};
use pollster::block_on;

/// Batch, keys, query heads, kv heads, head dim; dtype; mask; query rows, the last of the sequence.
type Shape = ([u32; 5], Dtype, &'static str, u32);

const SHAPES: &[Shape] = &[
    ([1, 1024, 8, 8, 64], Dtype::F32, "full", 1024),
    ([1, 1024, 8, 8, 64], Dtype::F32, "causal", 1024),
    ([1, 1024, 8, 8, 64], Dtype::F16, "full", 1024),
    ([1, 1024, 8, 8, 64], Dtype::Bf16, "causal", 1024),
    ([1, 1024, 8, 2, 128], Dtype::F32, "full", 1024),
    ([1, 1024, 8, 2, 128], Dtype::F16, "causal", 1024),
    ([1, 1024, 8, 8, 96], Dtype::F32, "full", 1024),
    ([1, 1024, 8, 8, 32], Dtype::F32, "full", 1024),
    ([1, 512, 8, 8, 256], Dtype::F32, "full", 512),
    ([1, 4096, 8, 8, 64], Dtype::F32, "causal", 4096),
    ([1, 4096, 8, 2, 64], Dtype::F32, "causal", 1),
    ([1, 4096, 8, 2, 64], Dtype::F16, "causal", 1),
    ([1, 4096, 8, 8, 64], Dtype::F32, "causal", 1),
    ([1, 4096, 8, 2, 128], Dtype::Bf16, "causal", 1),
    ([1, 4096, 8, 2, 64], Dtype::F32, "causal", 4),
    ([1, 32768, 8, 2, 64], Dtype::F16, "causal", 1),
];

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let device = arguments
        .iter()
        .position(|argument| argument == "--device")
        .and_then(|at| arguments.get(at + 1)?.parse().ok())
        .unwrap_or(0);
    if WgpuBackend::enumerate().is_empty() {
        println!("# no wgpu device");
        return Ok(());
    }
    let options = WgpuOptions {
        kernel: match () {
            () if has("--portable") => KernelChoice::Portable,
            () if has("--cooperative") => KernelChoice::Cooperative,
            () => KernelChoice::Auto,
        },
        ..WgpuOptions::default()
    };
    let backend = WgpuBackend::with_options(device, &options)?;
    let info = backend.info();
    println!("# {} ({}), kernel {}", info.name, info.driver, info.kernel);
    println!(
        "batch,rows,keys,q_heads,kv_heads,dim,dtype,mask,first_ms,median_ms,min_ms,max_ms,gflops_median,gflops_best,cpu_median_ms,cpu_min_ms"
    );
    let (shapes, repeats) = if has("--short") { (&SHAPES[..1], 7) } else { (SHAPES, 15) };
    for shape in shapes {
        let [_, keys, ..] = shape.0;
        if !has("--decode") || shape.3 < keys {
            measure(&backend, shape, repeats)?;
        }
    }
    Ok(())
}

fn measure(backend: &WgpuBackend, (shape, dtype, mask, rows): &Shape, repeats: usize) -> Result<(), Error> {
    let [batch, seq, q_heads, kv_heads, dim] = *shape;
    let problem = AttentionProblem::new(*shape, *dtype, mask.parse()?)?.with_queries(*rows, seq - *rows)?;
    let dense = |heads: u32, tokens: u32| Layout {
        offset: 0,
        batch_stride: (tokens * heads * dim) as usize,
        row_stride: (heads * dim) as usize,
        head_stride: dim as usize,
    };
    let fill = |label: &str, heads: u32, tokens: u32| {
        let elements = (batch * tokens * heads * dim) as usize;
        backend.upload(label, Bytes::from(made_up(*dtype, elements)))
    };
    let (q, k, v) = (fill("q", q_heads, *rows)?, fill("k", kv_heads, seq)?, fill("v", kv_heads, seq)?);
    let state_shape = StateShape {
        batch: batch as usize,
        rows: *rows as usize,
        heads: q_heads as usize,
        dim: dim as usize,
    };
    let mut a = backend.alloc("a", state_shape.a_bytes())?;
    let mut ml = backend.alloc("ml", state_shape.ml_bytes())?;
    // Query tokens are counted from the first row.
    let (queries, keys) = (TokenRuns::contiguous(0..*rows), TokenRuns::contiguous(0..seq));
    let work = &BlockWork::layers(&problem, &queries, &keys, backend.tile_shape(&problem, state_shape))[0];
    let kv_head_of: Vec<u32> = (0..q_heads).map(|head| head / problem.group()).collect();
    let control = Control::default();
    let mut call = || -> Result<(f64, f64), Error> {
        let mut state = StateMut { a: &mut a, ml: &mut ml, shape: state_shape };
        backend.reset_state(&mut state)?;
        block_on(backend.wait())?;
        let (start, start_cpu_s) = (Instant::now(), cpu_s());
        let args = Attend {
            dtype: *dtype,
            scale: problem.scale,
            softcap: None,
            q: Operand { buffer: &q, layout: dense(q_heads, *rows) },
            k: Operand { buffer: &k, layout: dense(kv_heads, seq) },
            v: Operand { buffer: &v, layout: dense(kv_heads, seq) },
            kv_head_of: &kv_head_of,
            work,
            bias: None,
            fixed_order: false,
            inference: true,
            state,
        };
        block_on(backend.attend(args, &control))?;
        block_on(backend.wait())?;
        Ok((start.elapsed().as_secs_f64(), cpu_s() - start_cpu_s))
    };
    let (first_s, _) = call()?;
    let mut samples = (0..repeats).map(|_| call()).collect::<Result<Vec<_>, _>>()?;
    samples.sort_by(|x, y| x.0.total_cmp(&y.0));
    let mut cpu: Vec<f64> = samples.iter().map(|sample| sample.1).collect();
    cpu.sort_by(f64::total_cmp);
    let (min, median, max) = (samples[0].0, samples[repeats / 2].0, samples[repeats - 1].0);
    // A causal mask counts half of the square; a few rows at the end see all keys.
    let share = if *mask == "causal" && *rows == seq { 0.5 } else { 1.0 };
    let gflop = 4e-9
        * share
        * f64::from(batch)
        * f64::from(q_heads)
        * f64::from(*rows)
        * f64::from(seq)
        * f64::from(dim);
    println!(
        "{batch},{rows},{seq},{q_heads},{kv_heads},{dim},{dtype},{mask},{:.1},{:.2},{:.2},{:.2},{:.1},{:.1},{:.1},{:.1}",
        first_s * 1e3,
        median * 1e3,
        min * 1e3,
        max * 1e3,
        gflop / median,
        gflop / min,
        cpu[repeats / 2] * 1e3,
        cpu[0] * 1e3
    );
    Ok(())
}

/// Values in -0.5..0.5; speed does not depend on them.
fn made_up(dtype: Dtype, elements: usize) -> Vec<u8> {
    let values = (0..elements).map(|i| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5);
    match dtype {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Dtype::F16 => values.flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect(),
        Dtype::Bf16 => values.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// Processor seconds of this process so far; 0 if /proc does not have them.
fn cpu_s() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0.0;
    };
    // Nanoseconds on a processor, thread by thread: finer than the clock ticks of /proc/self/stat.
    tasks
        .filter_map(|task| {
            let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<f64>().ok()
        })
        .sum::<f64>()
        / 1e9
}
