//! The first steps on a GPU, in the order in which later ones need earlier ones:
//! `tests/gpu/round.sh` runs each in a process of its own. On the fake driver they are smaller.

use std::time::Duration;

use bytes::Bytes;
use half::{bf16, f16};
use kyklos::backend::{Attend, Backend, Control, Layout, Operand, State, StateMut, StateShape};
use kyklos::{AttentionProblem, BlockWork, Dtype, Mask, TokenRuns};
use kyklos_backend_suite::fixed_order::case;
use kyklos_backend_suite::{Prepared, dense_set, run_alone};
use kyklos_cuda::{AttendKernel, CudaBackend, CudaBuffer, CudaOptions};
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::{OracleMask, OracleTerm};
use pollster::block_on;

use crate::scenario::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let steps: [(&str, fn()); 8] = [
        ("step 1: every kernel is loaded", every_kernel),
        ("step 2: one tile on Hopper", one_tile),
        ("step 3: seven tiles, then two full ones", several_tiles),
        ("step 4: causal, with small and odd head dims, and NaN in hidden values", causal),
        ("step 5: the same bytes in every run", same_bytes),
        ("step 6: fixed order and bias tensors", without_wgmma),
        ("step 7: decoding, with and without graphs", decoding),
        ("step 8: gradients by wgmma", gradients_by_wgmma),
    ];
    let mut all = steps.map(|(name, run)| Scenario::new(name, "seed=91,delay_us=20,capability=90", run));
    all[7].says = &["launched hopper_queries_f16_128 ", "launched hopper_keys_f16_128 "];
    all.into()
}

/// Whether the driver is the fake one, which computes slowly.
fn is_fake() -> bool {
    std::env::var_os("KYKLOS_FAKE_CUDA").is_some()
}

/// With the switches of the environment: a step that goes wrong is repeated without wgmma, or with
/// another kernel. A kernel that hangs is named before the round ends the step.
fn options() -> CudaOptions {
    let options = CudaOptions::from_environment().unwrap();
    if is_fake() { options } else { CudaOptions { stuck_after: Duration::from_secs(10), ..options } }
}

fn open() -> CudaBackend {
    CudaBackend::with_options(0, &options()).unwrap()
}

fn every_kernel() {
    let backend = open();
    println!("{:?}: {} kernels", backend.info(), backend.load_kernels().unwrap());
}

/// Each row sees one key only, because the others are far less similar. So the output shows where
/// rows, keys and elements are in the matrices of wgmma. Values are 1 plus the number of the key,
/// then 1 plus the number of the element.
fn one_tile() {
    let backend = open();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for (kernel, dim, mask) in hopper_kernels(dtype) {
            let keys = kernel.tile.kv_cols;
            let problem = AttentionProblem::new([1, keys, 1, 1, dim], dtype, mask).unwrap();
            // Behind all keys: under a causal mask they see all of them.
            let problem = problem.with_queries(128, keys).unwrap();
            // Element n of a key is bit n % 8 of its number, as 1 or -1.
            let code = |key: u32, n: u32| if key >> (n % 8) & 1 == 1 { 1.0 } else { -1.0 };
            let elements = |rows: u32, of: &dyn Fn(u32, u32) -> f32| -> Vec<u8> {
                let values =
                    (0..rows).flat_map(|row| (0..dim).map(move |n| (row, n))).map(|(row, n)| of(row, n));
                values.flat_map(|value| stored(dtype, value)).collect()
            };
            let q = elements(128, &|row, n| 16.0 * code(row * 7 % keys, n));
            let k = elements(keys, &code);
            for (what, value) in [
                ("key", (|key, _| 1.0 + key as f32) as fn(u32, u32) -> f32),
                ("element", |_, n| 1.0 + n as f32),
            ] {
                let mut call = Call::new(&backend, &problem, [&q, &k, &elements(keys, &value)]);
                let got = call.run(&backend);
                let right = elements(128, &|row, n| value(row * 7 % keys, n));
                let wrong = got.chunks(2).zip(right.chunks(2)).position(|(got, right)| got != right);
                let at = wrong.map(|n| (n / dim as usize, n % dim as usize));
                assert_eq!(at, None, "{dtype}, head dim {dim}, by the {what}: row and element");
            }
            println!("{}: right", kernel.name);
        }
    }
}

/// The attention kernels for Hopper, with a head dim and a mask of calls that get them: the wide
/// one is for calls without a mask.
fn hopper_kernels(dtype: Dtype) -> Vec<(AttendKernel, u32, Mask)> {
    let narrow =
        [64, 128, 192, 256].map(|dim| (AttendKernel::hopper(dtype, dim).unwrap(), dim, Mask::causal()));
    let wide = (AttendKernel::hopper_wide(dtype, 128).unwrap(), 128, Mask::full());
    narrow.into_iter().chain([wide]).collect()
}

fn several_tiles() {
    let backend = open();
    for (kernel, dim, mask) in hopper_kernels(Dtype::Bf16) {
        for tiles in [7, 2] {
            let keys = tiles * kernel.tile.kv_cols as usize;
            let mask = if mask.is_full() { OracleMask::full() } else { OracleMask::causal() };
            is_right(
                &backend,
                case("full tiles", keys, mask, |case| {
                    let problem = &mut case.problem;
                    (problem.q_len, problem.q_heads, problem.kv_heads) = (128, 1, 1);
                    problem.q_offset = keys as u64;
                    of_dim(case, dim as usize);
                }),
                Dtype::Bf16,
            );
        }
    }
}

fn causal() {
    let backend = open();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for dim in [8, 72, 128, 200] {
            is_right(
                &backend,
                case("300 causal tokens", 300, OracleMask::causal(), |case| of_dim(case, dim)),
                dtype,
            );
        }
    }
    for dim in [64, 128, 256] {
        let mut hidden = cases().into_iter().find(|case| case.name == "NaN in padding").unwrap();
        of_dim(&mut hidden, dim);
        is_right(&backend, hidden, Dtype::Bf16);
    }
}

/// More query tiles than a GPU computes at a time, again and again.
fn same_bytes() {
    let (tokens, heads, runs) = if is_fake() { (300, 3, 2) } else { (2048, 32, 50) };
    let backend = open();
    for dim in [64, 128] {
        let problem = AttentionProblem::new([1, tokens, heads, 1, dim], Dtype::Bf16, Mask::causal()).unwrap();
        let made_up = |count: u32, shift: u32| -> Vec<u8> {
            let number =
                |n: u32| (n.wrapping_add(shift).wrapping_mul(2_654_435_761) >> 16) as f32 / 16_384.0 - 2.0;
            (0..count).flat_map(|n| stored(Dtype::Bf16, number(n))).collect()
        };
        let (q, kv) = (tokens * heads * dim, tokens * dim);
        let mut call = Call::new(&backend, &problem, [&made_up(q, 0), &made_up(kv, 7), &made_up(kv, 9)]);
        let first = call.run(&backend);
        for run in 1..runs {
            assert!(call.run(&backend) == first, "head dim {dim}: other bytes in run {run}");
        }
        println!("head dim {dim}: the same bytes in {runs} runs");
    }
}

/// What Hopper computes by the kernels for older GPUs.
fn without_wgmma() {
    let backend = open();
    for dtype in Dtype::ALL {
        let tokens = if is_fake() { 96 } else { 350 };
        let fixed = case("in a fixed order", tokens, OracleMask::causal(), |_| {});
        let prepared = Prepared::new(fixed, dtype);
        let problem = prepared.problem.clone().with_fixed_order(true).unwrap();
        let whole = block_on(run_alone(&backend, &dense_set(&problem), &prepared));
        prepared.judge(&whole, "cuda").assert_within(&prepared.dense_limit());
        for biased in cases().into_iter().filter(|case| case.bias.is_some()) {
            is_right(&backend, biased, dtype);
        }
    }
}

fn decoding() {
    let keys = if is_fake() { 900 } else { 33 * 64 * 4 };
    let prepared = |heads, rows, dtype| {
        let mask = OracleMask::causal().and(OracleTerm::Valid(vec![keys as u64]));
        let case = case("a few rows", keys, mask, |case| {
            let problem = &mut case.problem;
            (problem.q_len, problem.q_offset) = (rows, (keys - rows) as u64);
            (problem.q_heads, problem.kv_heads) = heads;
            of_dim(case, 128);
        });
        Prepared::new(case, dtype)
    };
    let backends = [true, false]
        .map(|graphs| CudaBackend::with_options(0, &CudaOptions { graphs, ..options() }).unwrap());
    for dtype in Dtype::ALL {
        for (heads, rows) in [((8, 8), 1), ((8, 2), 3)] {
            let prepared = prepared(heads, rows, dtype);
            for backend in &backends {
                // A sequence of launches that comes again is a graph.
                for _ in 0..3 {
                    is_right_as(backend, &prepared);
                }
            }
        }
    }
}

/// Full and partial tiles, and blocks whose second consumer has few rows or keys.
fn gradients_by_wgmma() {
    let tokens = if is_fake() { 140 } else { 330 };
    for (dim, dtype) in [(64, Dtype::Bf16), (64, Dtype::F16), (128, Dtype::Bf16), (128, Dtype::F16)] {
        crate::gradients::alone(
            open(),
            case("gradients", tokens, OracleMask::causal(), |case| of_dim(case, dim)),
            dtype,
        );
    }
}

fn is_right(backend: &CudaBackend, case: Case, dtype: Dtype) {
    is_right_as(backend, &Prepared::new(case, dtype));
}

fn is_right_as(backend: &CudaBackend, prepared: &Prepared) {
    let problem = &prepared.problem;
    let whole = block_on(run_alone(backend, &dense_set(problem), prepared));
    prepared.judge(&whole, "cuda").assert_within(&prepared.dense_limit());
    println!("{}, {} of {} elements: right", problem.dtype, prepared.case.name, problem.head_dim);
}

fn of_dim(case: &mut Case, dim: usize) {
    (case.problem.head_dim, case.problem.scale) = (dim, (dim as f64).sqrt().recip());
}

fn stored(dtype: Dtype, value: f32) -> [u8; 2] {
    match dtype {
        Dtype::F16 => f16::from_f32(value).to_le_bytes(),
        _ => bf16::from_f32(value).to_le_bytes(),
    }
}

/// A call of one batch entry on tensors that are on the device.
struct Call {
    problem: AttentionProblem,
    work: BlockWork,
    kv_head_of: Vec<u32>,
    tensors: [CudaBuffer; 3],
    state: [CudaBuffer; 2],
    output: [CudaBuffer; 2],
    shape: StateShape,
}

impl Call {
    fn new(backend: &CudaBackend, problem: &AttentionProblem, tensors: [&[u8]; 3]) -> Self {
        let shape = StateShape {
            batch: 1,
            rows: problem.q_len as usize,
            heads: problem.q_heads as usize,
            dim: problem.head_dim as usize,
        };
        let [queries, keys] = [problem.q_len, problem.kv_len].map(|tokens| TokenRuns::contiguous(0..tokens));
        let tile = backend.tile_shape(problem, shape);
        let alloc = |bytes| backend.alloc("a result", bytes).unwrap();
        Self {
            work: BlockWork::layers(problem, &queries, &keys, tile).swap_remove(0),
            kv_head_of: (0..problem.q_heads).map(|head| head / problem.group()).collect(),
            tensors: tensors.map(|bytes| backend.upload("a tensor", Bytes::copy_from_slice(bytes)).unwrap()),
            state: [alloc(shape.a_bytes()), alloc(shape.ml_bytes())],
            output: [alloc(shape.a_bytes() / 2), alloc(shape.lse_bytes())],
            problem: problem.clone(),
            shape,
        }
    }

    /// The bytes of the output.
    fn run(&mut self, backend: &CudaBackend) -> Bytes {
        let Self { problem, shape, .. } = self;
        let [q, k, v] = &self.tensors;
        let operand = |buffer, heads: u32, tokens: u32| {
            let (dim, heads) = (problem.head_dim as usize, heads as usize);
            let batch_stride = tokens as usize * heads * dim;
            Operand {
                buffer,
                layout: Layout { offset: 0, batch_stride, row_stride: heads * dim, head_stride: dim },
            }
        };
        let [a, ml] = &mut self.state;
        backend.reset_state(&mut StateMut { a, ml, shape: *shape }).unwrap();
        let args = Attend {
            dtype: problem.dtype,
            scale: problem.scale,
            softcap: None,
            q: operand(q, problem.q_heads, problem.q_len),
            k: operand(k, problem.kv_heads, problem.kv_len),
            v: operand(v, problem.kv_heads, problem.kv_len),
            kv_head_of: &self.kv_head_of,
            work: &self.work,
            bias: None,
            fixed_order: false,
            inference: true,
            state: StateMut { a, ml, shape: *shape },
        };
        block_on(backend.attend(args, &Control::default())).unwrap();
        let [o, lse] = &mut self.output;
        let state = State { a: &self.state[0], ml: &self.state[1], shape: *shape };
        backend.finalize(&state, &[], problem.dtype, o, lse).unwrap();
        block_on(backend.download(o, 0..shape.a_bytes() / 2)).unwrap()
    }
}
