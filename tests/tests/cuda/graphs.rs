//! Launches that are submitted together: deferred launches, and graphs of repeated sequences.

use bytes::Bytes;
use half::bf16;
use kyklos::backend::{Attend, Backend, Control, Extent, Layout, Operand, State, StateMut, StateShape};
use kyklos::{AttentionProblem, BlockWork, Dtype, Mask, Result, TokenRuns};
use kyklos_cuda::{CudaBackend, CudaBuffer, CudaOptions};
use kyklos_oracle::inputs::{TensorId, fill};
use pollster::block_on;

use crate::faults::{is_right, lost_after};
use crate::scenario::{Ends, Scenario};

pub(crate) fn scenarios() -> Vec<Scenario> {
    let says = |mut scenario: Scenario, words: &'static [&'static str]| {
        scenario.says = words;
        scenario
    };
    let graphs = says(
        Scenario::new("submits a repeated sequence as a graph", "seed=71", || again(&open(), 5)),
        &["1 graphs made, 4 launched with 8 kernels", "launched reset_state 5 times"],
    );
    let none = says(
        Scenario::new("makes no graphs if they are disabled", "seed=72", || again(&without_graphs(), 5)),
        &["0 graphs made", "launched reset_state 5 times"],
    );
    // The number of graphs depends on timing: a long call is divided into pieces.
    let mut decoding = Scenario::new("decodes by graphs to the same bytes as without", "seed=73", || {
        let [with, without] = [open(), without_graphs()].map(|backend| decodes(&backend, 6));
        assert_eq!(with, without);
    });
    decoding.says_not = &[" 0 graphs made", " 0 launched with"];
    let devices = says(
        Scenario::new("makes a graph for each device", "seed=73,devices=2", || {
            let both = [0, 1].map(|ordinal| CudaBackend::new(ordinal).unwrap());
            let mut states = both.each_ref().map(Accumulator::new);
            for value in [1.0, 2.0, 3.0] {
                both.iter().zip(&mut states).for_each(|(backend, state)| state.round(backend, value));
            }
        }),
        &["2 graphs made, 4 launched with 8 kernels"],
    );
    let addresses = says(
        Scenario::new("makes a graph for each address", "seed=74", || {
            let backend = open();
            let mut states = [Accumulator::new(&backend), Accumulator::new(&backend)];
            for round in 0..6 {
                let state = &mut states[round % 2];
                state.round(&backend, 1.0 + round as f32);
            }
        }),
        &["2 graphs made, 4 launched with 8 kernels"],
    );
    let forgotten = says(
        Scenario::new("forgets the least recently used sequence", "delay_us=0", || {
            let backend = open();
            let mut sequences = Distinct::new(&backend);
            // The cache has already dropped each sequence when it repeats.
            (0..2 * 257).for_each(|n| sequences.submit(&backend, n % 257));
        }),
        &["0 graphs made"],
    );
    let evicted = says(
        Scenario::new("forgets graphs that still run", "seed=75,delay_us=20", || {
            let backend = open();
            let mut sequences = Distinct::new(&backend);
            (0..2 * 270).for_each(|n| sequences.submit(&backend, n / 2));
        }),
        &["270 graphs made, 270 launched with 540 kernels"],
    );
    let mut all = vec![graphs, none, decoding, devices, addresses, forgotten, evicted];
    all.extend(order());
    all.extend(faults());
    all.extend(deferred());
    all
}

/// The launches of a graph run in their order, and other streams wait for graphs.
fn order() -> Vec<Scenario> {
    let overlaps =
        |name: &str, fake: &str| Scenario::new(name, &format!("delay_us=3000,{fake}"), || overlaps(&open()));
    let mut all = vec![overlaps("orders graphs and copies", "seed=76")];
    let planted = [
        ("a graph without edges fails the check", "ignore_edges=1,seed=77"),
        ("graphs that wait for no copy fail the check", "ignore_waits=1,seed=78"),
        ("copies to the device that do not wait for graphs fail the check", "ignore_waits=2,seed=79"),
        ("copies to the host that do not wait for graphs fail the check", "ignore_waits=4,seed=80"),
    ];
    all.extend(planted.map(|(name, fake)| {
        let mut scenario = overlaps(name, fake);
        scenario.ends = Ends::Failing;
        scenario
    }));
    all
}

/// If the driver refuses a graph, its error is returned. Later operations on the buffers that the
/// graph should write return it too. Everything else still works.
fn faults() -> Vec<Scenario> {
    let refused = [
        (
            "cannot be created",
            "graph_create_at=1",
            "make a graph of reset_state, merge_states",
            "cuGraphCreate",
        ),
        (
            "cannot be instantiated",
            "graph_instantiate_at=1",
            "make a graph of reset_state, merge_states",
            "cuGraphInstantiateWithFlags",
        ),
        (
            "cannot be launched",
            "graph_launch_at=2",
            "launch a graph of reset_state, merge_states",
            "cuGraphLaunch",
        ),
    ];
    let mut all: Vec<_> = refused
        .into_iter()
        .map(|(name, fake, operation, call)| {
            Scenario::new(
                &format!("still works after a graph that {name}"),
                &format!("seed=81,{fake}"),
                move || {
                    let backend = open();
                    let mut state = Accumulator::new(&backend);
                    let error = (0..3).find_map(|_| state.submit(&backend, 1.0).err()).unwrap();
                    let text = error.to_string();
                    for word in ["cuda:0", operation, call, "CUDA_ERROR_OUT_OF_MEMORY (2)"] {
                        assert!(text.contains(word), "{text}");
                    }
                    // The buffer's contents must not count as a result.
                    assert_eq!(block_on(backend.download(&mut state.a, 0..4)).unwrap_err(), error);
                    assert_eq!(state.submit(&backend, 1.0).unwrap_err(), error);
                    drop(state);
                    again(&backend, 3);
                    is_right(&backend);
                },
            )
        })
        .collect();
    let ends = [
        (
            "a graph that destroys the context",
            "graph_launch_at=1,graph_code=719",
            "CUDA_ERROR_LAUNCH_FAILED (719)",
        ),
        ("an illegal address in a graph", "sticky_at=4", "CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
        ("a kernel of a graph that hangs", "hang_at=4", "completed nothing for 0.5 s"),
    ];
    all.extend(ends.map(|(name, fake, words)| {
        Scenario::new(&format!("ends with {name}"), &format!("devices=2,seed=82,{fake}"), move || {
            let options = CudaOptions { stuck_after: lost_after(words), ..CudaOptions::default() };
            let backend = CudaBackend::with_options(0, &options).unwrap();
            let mut state = Accumulator::new(&backend);
            // The call that gets the first error depends on timing.
            let _ = (0..2).try_for_each(|_| state.submit(&backend, 1.0));
            let first = block_on(backend.wait()).unwrap_err();
            assert!(first.to_string().contains(words), "{first}");
            assert_eq!(state.submit(&backend, 1.0).unwrap_err(), first);
            drop((state, backend));
            again(&CudaBackend::new(1).unwrap(), 3);
        })
    }));
    all
}

/// Launches that are deferred, and launches that must not be deferred.
fn deferred() -> Vec<Scenario> {
    // The process ends without another call, so a deferred launch is never submitted.
    let mut reset = Scenario::new("defers the reset of a state", "", || {
        let backend = open();
        let mut state = Accumulator::new(&backend);
        state.reset(&backend);
        std::mem::forget((backend, state));
    });
    reset.says_not = &["launched reset_state"];
    reset.ends = Ends::LeavingSomething;
    let mut others = Scenario::new("defers no launch that may be waited for", "", || {
        let backend = open();
        let (mut token, mut sequences) = (Token::new(&backend), Distinct::new(&backend));
        token.attend(&backend, 1).unwrap();
        let state = State { a: &token.a, ml: &token.ml, shape: DECODED };
        let [mut o, mut lse] = [(); 2].map(|()| backend.alloc("an output", 4096).unwrap());
        backend.finalize(&state, &[], Dtype::Bf16, &mut o, &mut lse).unwrap();
        sequences.submit(&backend, 0);
        std::mem::forget((backend, token, sequences, o, lse));
    });
    others.says = &[
        "launched decode_bf16_64 1 times",
        "launched merge_parts 1 times",
        "launched finalize_bf16 1 times",
        "launched repack 1 times",
    ];
    others.ends = Ends::LeavingSomething;
    let refused = Scenario::new(
        "returns the error of a deferred launch that is refused from every operation that needs its result",
        "refuse_at=1",
        || {
            let backend = open();
            let (mut one, mut other) = (Accumulator::new(&backend), Accumulator::new(&backend));
            one.reset(&backend);
            let error = other.submit(&backend, 1.0).unwrap_err();
            assert!(error.to_string().contains("launch reset_state"), "{error}");
            assert_eq!(block_on(backend.download(&mut one.a, 0..4)).unwrap_err(), error);
            assert_eq!(block_on(backend.download(&mut other.ml, 0..4)).unwrap_err(), error);
            drop((one, other));
            // Their memory is reused.
            Accumulator::new(&backend).round(&backend, 3.0);
        },
    );
    let dropped = Scenario::new("drops deferred launches with their backend", "seed=83", || {
        let backend = open();
        let mut state = Accumulator::new(&backend);
        state.reset(&backend);
        drop(backend);
        drop(state);
    });
    let memory = Scenario::new("waits for memory that a deferred launch will write", "memory_mb=8", || {
        let backend = open();
        let shape = StateShape { batch: 1, rows: 1 << 12, heads: 1, dim: 256 };
        let mut a = backend.alloc("a", shape.a_bytes()).unwrap();
        let mut ml = backend.alloc("ml", shape.ml_bytes()).unwrap();
        backend.reset_state(&mut StateMut { a: &mut a, ml: &mut ml, shape }).unwrap();
        drop((a, ml));
        drop(backend.alloc("all there is", 8 << 20).unwrap());
    });
    vec![reset, others, refused, dropped, memory]
}

fn open() -> CudaBackend {
    CudaBackend::new(0).unwrap()
}

fn without_graphs() -> CudaBackend {
    CudaBackend::with_options(0, &CudaOptions { graphs: false, ..CudaOptions::default() }).unwrap()
}

const ACCUMULATED: StateShape = StateShape { batch: 1, rows: 20, heads: 2, dim: 64 };

/// A state that is reset and merged with another one: two launches.
struct Accumulator {
    a: CudaBuffer,
    ml: CudaBuffer,
    from_a: CudaBuffer,
    from_ml: CudaBuffer,
}

impl Accumulator {
    fn new(backend: &CudaBackend) -> Self {
        let alloc = |bytes| backend.alloc("a state", bytes).unwrap();
        let (a, ml) = (ACCUMULATED.a_bytes(), ACCUMULATED.ml_bytes());
        Self { a: alloc(a), ml: alloc(ml), from_a: alloc(a), from_ml: alloc(ml) }
    }

    fn reset(&mut self, backend: &CudaBackend) {
        let mut state = StateMut { a: &mut self.a, ml: &mut self.ml, shape: ACCUMULATED };
        backend.reset_state(&mut state).unwrap();
    }

    /// The other state has seen one key with this value. Afterwards this state has seen it too.
    fn submit(&mut self, backend: &CudaBackend, value: f32) -> Result<()> {
        let floats =
            |values: Vec<f32>| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        backend.write(&mut self.from_a, 0, &floats(vec![value; ACCUMULATED.a_bytes() / 4]))?;
        backend.write(&mut self.from_ml, 0, &floats([0.0, 1.0].repeat(ACCUMULATED.ml_bytes() / 8)))?;
        let mut state = StateMut { a: &mut self.a, ml: &mut self.ml, shape: ACCUMULATED };
        backend.reset_state(&mut state)?;
        let from = State { a: &self.from_a, ml: &self.from_ml, shape: ACCUMULATED };
        backend.merge(&mut state, &from)
    }

    fn round(&mut self, backend: &CudaBackend, value: f32) {
        self.submit(backend, value).unwrap();
        let got = block_on(backend.download(&mut self.a, 0..ACCUMULATED.a_bytes())).unwrap();
        assert!(all_are(&got, value), "{value}: {:?}", &got[..4]);
    }
}

fn all_are(got: &Bytes, value: f32) -> bool {
    got.chunks_exact(4).all(|bytes| bytes == value.to_le_bytes())
}

fn again(backend: &CudaBackend, times: u8) {
    let mut state = Accumulator::new(backend);
    (0..times).for_each(|round| state.round(backend, f32::from(round) + 0.5));
}

/// Graphs with copies to their inputs and from their outputs, without a wait of the host between
/// them.
fn overlaps(backend: &CudaBackend) {
    let mut state = Accumulator::new(backend);
    let downloads: Vec<_> = (0..12_u8)
        .map(|round| {
            let value = f32::from(round) + 0.5;
            state.submit(backend, value).unwrap();
            (value, backend.download(&mut state.a, 0..ACCUMULATED.a_bytes()))
        })
        .collect();
    for (value, download) in downloads {
        let got = block_on(download).unwrap();
        assert!(all_are(&got, value), "{value}: {:?}", &got[..4]);
    }
}

/// Different sequences of two launches: the reset of a state, and a copy of the row `row`.
struct Distinct {
    a: CudaBuffer,
    ml: CudaBuffer,
    from: CudaBuffer,
    into: CudaBuffer,
}

impl Distinct {
    fn new(backend: &CudaBackend) -> Self {
        let alloc = || backend.alloc("some", 4096).unwrap();
        Self { a: alloc(), ml: alloc(), from: alloc(), into: alloc() }
    }

    fn submit(&mut self, backend: &CudaBackend, row: usize) {
        let shape = StateShape { batch: 1, rows: 1, heads: 1, dim: 8 };
        backend.reset_state(&mut StateMut { a: &mut self.a, ml: &mut self.ml, shape }).unwrap();
        let at = |row: usize| Layout { offset: 4 * row, batch_stride: 4, row_stride: 4, head_stride: 4 };
        let extent = Extent { batch: 1, rows: 1, heads: 1, row_bytes: 4 };
        backend.repack((&self.from, at(row)), (&mut self.into, at(0)), extent).unwrap();
    }
}

const DECODED: StateShape = StateShape { batch: 1, rows: 1, heads: 4, dim: 64 };
const KEYS: usize = 520;

/// One query token over [`KEYS`] keys.
pub(crate) struct Token {
    tensors: [CudaBuffer; 3],
    a: CudaBuffer,
    ml: CudaBuffer,
}

impl Token {
    const ELEMENTS: [usize; 3] = [4 * 64, KEYS * 64, KEYS * 64];

    pub(crate) fn new(backend: &CudaBackend) -> Self {
        let tensors = Self::ELEMENTS.map(|elements| backend.alloc("a tensor", elements * 2).unwrap());
        let alloc = |bytes| backend.alloc("a state", bytes).unwrap();
        Self { tensors, a: alloc(DECODED.a_bytes()), ml: alloc(DECODED.ml_bytes()) }
    }

    /// Resets the state and attends over generated tensors of this seed. Does not wait for the
    /// device.
    pub(crate) fn attend(&mut self, backend: &CudaBackend, seed: u64) -> Result<()> {
        for (index, id) in [TensorId::Q, TensorId::K, TensorId::V].into_iter().enumerate() {
            let mut numbers = vec![bf16::ZERO; Self::ELEMENTS[index]];
            fill(seed, id, 0..numbers.len() as u64, &mut numbers);
            backend.write(&mut self.tensors[index], 0, bytemuck::cast_slice(&numbers)).unwrap();
        }
        let shape = [1, KEYS as u32, 4, 1, 64];
        let problem = AttentionProblem::new(shape, Dtype::Bf16, Mask::causal()).unwrap();
        let problem = problem.with_queries(1, KEYS as u32 - 1).unwrap();
        let (row, keys) = (TokenRuns::contiguous(0..1), TokenRuns::contiguous(0..KEYS as u32));
        let work = &BlockWork::layers(&problem, &row, &keys, backend.tile_shape(&problem, DECODED))[0];
        let [q, k, v] = &self.tensors;
        let tensor = |buffer, rows: usize, heads: usize| {
            let (batch_stride, row_stride) = (rows * heads * 64, heads * 64);
            Operand { buffer, layout: Layout { offset: 0, batch_stride, row_stride, head_stride: 64 } }
        };
        let mut state = StateMut { a: &mut self.a, ml: &mut self.ml, shape: DECODED };
        backend.reset_state(&mut state).unwrap();
        let args = Attend {
            dtype: Dtype::Bf16,
            scale: problem.scale,
            softcap: None,
            q: tensor(q, 1, 4),
            k: tensor(k, KEYS, 1),
            v: tensor(v, KEYS, 1),
            kv_head_of: &[0; 4],
            work,
            bias: None,
            fixed_order: false,
            inference: true,
            state,
        };
        block_on(backend.attend(args, &Control::default()))
    }
}

/// Repeats one call with different tensors. Returns the bytes of each state.
fn decodes(backend: &CudaBackend, times: u64) -> Vec<Bytes> {
    let mut token = Token::new(backend);
    let all = (0..times).map(|seed| {
        token.attend(backend, seed).unwrap();
        block_on(backend.download(&mut token.a, 0..DECODED.a_bytes())).unwrap()
    });
    all.collect()
}
