//! Tensors in memory of a caller, streams of a caller, and the context that is current on its
//! threads.
#![expect(unsafe_code, reason = "tensors of a caller's memory are unsafe to make")]

use std::sync::{Arc, Barrier, Mutex};

use half::bf16;
use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{Attention, Dtype, Element, Execution, Mask, Mesh, Session, SessionOptions, Strategy, Tensor};
use kyklos_cuda::{CallerMemory, CallerStream, CudaBackend, CudaTensor, Written};
use kyklos_oracle::oracle::{Oracle, OracleMask, OracleProblem, Values};
use kyklos_transport::in_process_group;
use pollster::block_on;

use crate::scenario::{Ends, Scenario};
use checks::{bad_owners, contexts, destroyed, hanging, owner, refusals, reuse};
use driver::{Context, Memory, Stream, copied};

mod checks;
pub(crate) mod driver;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = vec![
        Scenario::new("reads a caller's f32 tensors behind its stream", "seed=81,delay_us=3000", || {
            two_ranks(&SINES, Layout::Dense, Stream::new);
        }),
        Scenario::new("reads a caller's bf16 tensors behind its stream", "seed=82,delay_us=3000", || {
            two_ranks(&SINES.map(bf16::from_f32), Layout::Dense, Stream::new);
        }),
        Scenario::new(
            "reads a caller's tensors with heads before tokens behind its default stream",
            "seed=83",
            || {
                two_ranks(&SINES, Layout::HeadsFirst, Stream::default_of);
            },
        ),
        Scenario::new("drops the owner of memory after the last read", "seed=84,delay_us=3000", owner),
        Scenario::new(
            "a destructor of a caller that blocks or panics stops nothing else",
            "seed=90,delay_us=3000,memory_mb=64",
            bad_owners,
        ),
        Scenario::new("drops no owner of memory that a hanging kernel reads", "seed=85,hang_at=1", hanging),
        Scenario::new("keeps the memory of a result for a caller's stream", "seed=86,delay_us=3000", || {
            reuse(true);
        }),
        Scenario::new("refuses pointers and streams that it cannot use", "seed=87,devices=2", refusals),
        Scenario::new("leaves a caller's current context alone", "seed=88,devices=2", contexts),
        Scenario::new(
            "leaves a caller's current context alone after an illegal address",
            "seed=89,devices=2,sticky_at=2",
            destroyed,
        ),
    ];
    for seed in 1..=3 {
        for (bit, name) in [
            (1, "a device that does not wait for a caller's stream"),
            (2, "a caller's stream that does not wait"),
        ] {
            let mut scenario = Scenario::new(
                &format!("{name} fails the check, seed {seed}"),
                &format!("ignore_caller_waits={bit},delay_us=3000,seed={seed}"),
                || two_ranks(&SINES, Layout::Dense, Stream::new),
            );
            scenario.ends = Ends::Failing;
            all.push(scenario);
        }
    }
    let mut early =
        Scenario::new("a result that is not kept fails the check", "seed=86,delay_us=3000", || {
            reuse(false);
        });
    early.ends = Ends::Failing;
    all.push(early);
    all
}

const TOKENS: [usize; 2] = [20, 13];
const HEADS: [usize; 3] = [4, 2, 2];
const DIM: usize = 64;
const LAYERS: usize = 4;
const SINES: Sines = Sines(|value| value);

/// Elements from positions: a function of the token, so that each rank makes its own.
struct Sines<T = f32>(fn(f32) -> T);

impl Sines {
    fn map<T>(&self, convert: fn(f32) -> T) -> Sines<T> {
        Sines(convert)
    }
}

impl<T> Sines<T> {
    /// Tensor 0, 1 or 2 of a layer, `[tokens, heads, dim]`.
    fn of(&self, tensor: usize, layer: usize, tokens: std::ops::Range<usize>) -> Vec<T> {
        let row = HEADS[tensor] * DIM;
        let factor = [0.71, 0.37, 0.53][tensor];
        let index = tokens.start * row..tokens.end * row;
        index.map(|index| (self.0)(((index + layer * 7919) as f32 * factor).sin())).collect()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Dense,
    /// `[batch, heads, tokens, dim]` in memory.
    HeadsFirst,
}

/// Two ranks of one process on one device, each with tensors in its own memory that its own stream
/// writes late. Its stream reads the results; the host does not wait in between.
fn two_ranks<T: Element>(values: &Sines<T>, layout: Layout, stream_of: fn(&Arc<Context>) -> Stream) {
    let device = Device::from(CudaBackend::new(0).unwrap());
    let context = Context::primary(0);
    let sessions = || {
        let all = Session::on_one_device(in_process_group(2), &device, &SessionOptions::default());
        let transports = all.iter().map(|session| session.group().clone()).collect();
        (Mutex::new(all.into_iter().map(Some).collect::<Vec<_>>()), transports)
    };
    let take =
        |sessions: &Mutex<Vec<Option<Session>>>, rank: usize| sessions.lock().unwrap()[rank].take().unwrap();
    let barrier = Barrier::new(2);
    let (all, transports) = sessions();
    let before = copied();
    let outputs = on_threads(transports, |transport| {
        let rank = transport.rank().0 as usize;
        let mut session = take(&all, rank);
        context.set_current();
        let stream = stream_of(&context);
        let out = layers(rank, values, |layer, inputs| {
            let [q, k, v] = caller_tensors(&device, &context, &stream, layout, rank, inputs);
            assert!(context.is_current());
            let out = session.attend(&call(layer), &q, &k, &v).unwrap();
            assert!(context.is_current());
            let read =
                [&out.o, &out.lse.copied().unwrap()].map(|tensor| read_back(&context, &stream, tensor));
            drop((q, k, v, out));
            assert!(context.is_current());
            read
        });
        stream.synchronize();
        barrier.wait();
        let after = copied();
        barrier.wait();
        drop(session);
        assert!(context.is_current());
        assert_eq!(after[0], before[0], "bytes to the host");
        assert!(after[1] - before[1] < 8192, "{} bytes to the device", after[1] - before[1]);
        out.into_iter().map(|pair| pair.map(|memory| memory.contents())).collect::<Vec<_>>()
    });
    let (all, transports) = sessions();
    let expected = on_threads(transports, |transport| {
        let rank = transport.rank().0 as usize;
        let mut session = take(&all, rank);
        layers(rank, values, |layer, inputs| {
            let tensor = |index: usize| Tensor::from_slice(shape(rank, index), &inputs[index]).unwrap();
            let out = session.attend(&call(layer), &tensor(0), &tensor(1), &tensor(2)).unwrap();
            [out.o, out.lse].map(|tensor| block_on(tensor.bytes()).unwrap().to_vec())
        })
    });
    assert!(outputs == expected, "the bytes of a call with tensors of the host");
    if T::DTYPE == Dtype::F32 {
        agrees_with_the_oracle(&outputs);
    }
}

/// The tensors of each layer and what `run` makes of them.
fn layers<T, R>(rank: usize, values: &Sines<T>, mut run: impl FnMut(usize, [Vec<T>; 3]) -> R) -> Vec<R> {
    let first: usize = TOKENS[..rank].iter().sum();
    let inputs = |layer| [0, 1, 2].map(|tensor| values.of(tensor, layer, first..first + TOKENS[rank]));
    (0..LAYERS).map(|layer| run(layer, inputs(layer))).collect()
}

fn call(layer: usize) -> Attention {
    let (mesh, strategy) = [((2, 1), Strategy::Ulysses), ((1, 2), Strategy::Ring)][layer % 2];
    let execution = Execution::new().mesh(Mesh::new(mesh.0, mesh.1).unwrap()).strategy(strategy);
    Attention::new().mask(Mask::causal()).execution(execution)
}

fn shape(rank: usize, tensor: usize) -> [usize; 4] {
    [1, TOKENS[rank], HEADS[tensor], DIM]
}

/// Tensors in memory of the caller, which `stream` writes after other work.
fn caller_tensors<T: Element>(
    device: &Device,
    context: &Arc<Context>,
    stream: &Stream,
    layout: Layout,
    rank: usize,
    inputs: [Vec<T>; 3],
) -> [Tensor; 3] {
    let busy = Arc::new(Busy::new(context, stream));
    let (writer, own) = (ordered(stream), CallerStream::new(device).unwrap());
    [0, 1, 2].map(|index| {
        let shape @ [_, tokens, heads, dim] = shape(rank, index);
        let strides = match layout {
            Layout::Dense => [tokens * heads * dim, heads * dim, dim, 1],
            Layout::HeadsFirst => [7, dim, tokens * dim, 1],
        };
        let data: Vec<T> = match layout {
            Layout::Dense => inputs[index].clone(),
            Layout::HeadsFirst => (0..heads * tokens)
                .flat_map(|row| {
                    let (head, token) = (row / tokens, row % tokens);
                    inputs[index][(token * heads + head) * dim..][..dim].to_vec()
                })
                .collect(),
        };
        let bytes = bytemuck::cast_slice(&data);
        let memory = match index {
            0 => Memory::on_device(context, bytes.len()),
            _ => Memory::of_pool(stream, bytes.len()),
        };
        let from = Memory::on_host(context, bytes);
        stream.upload(&from, &memory);
        let written = match layout {
            Layout::Dense => &writer,
            // By a stream that waits for the one that writes.
            Layout::HeadsFirst => {
                own.wait_for(&writer, device).unwrap();
                &own
            }
        };
        let at = CallerMemory { address: memory.address, bytes: bytes.len() };
        // SAFETY: the tensor owns the memory, and nothing else writes to it. What the stream copies from is
        // kept as long: the device has read the memory, which was behind that copy.
        let tensor = unsafe {
            let owner = (memory, from, busy.clone());
            Tensor::from_cuda(shape, strides, T::DTYPE, device, at, Written::By(written), owner)
        };
        tensor.unwrap()
    })
}

/// Work that takes a stream a while. To be kept until the stream has done it.
#[derive(Debug)]
struct Busy(#[expect(dead_code, reason = "freed by its drop")] [Memory; 2]);

impl Busy {
    fn new(context: &Arc<Context>, stream: &Stream) -> Self {
        let (from, into) = (Memory::on_host(context, &[0; 64]), Memory::on_device(context, 64));
        for _ in 0..60 {
            stream.upload(&from, &into);
        }
        Self([from, into])
    }
}

/// The stream as Kyklos takes it.
fn ordered(stream: &Stream) -> CallerStream {
    // SAFETY: all users drop it before the stream.
    unsafe { CallerStream::from_raw(stream.handle()) }
}

/// Lets `stream` read a tensor; the elements are there when the stream is synchronised.
fn read_back(context: &Arc<Context>, stream: &Stream, tensor: &Tensor) -> Memory {
    let ordered = ordered(stream);
    let bytes = tensor.shape().iter().product::<usize>() * tensor.dtype().bytes();
    let into = Memory::on_host(context, &vec![0; bytes]);
    tensor.make_wait(&ordered).unwrap();
    stream.download(tensor.cuda_address().unwrap(), &into);
    tensor.keep_for(&ordered).unwrap();
    into
}

fn agrees_with_the_oracle(outputs: &[Vec<[Vec<u8>; 2]>]) {
    let tokens = TOKENS.iter().sum::<usize>();
    let problem = OracleProblem {
        batch: 1,
        q_len: tokens,
        kv_len: tokens,
        q_heads: HEADS[0],
        kv_heads: HEADS[1],
        head_dim: DIM,
        scale: f64::from(1.0 / (DIM as f32).sqrt()),
        softcap: None,
        mask: OracleMask::causal(),
        q_offset: 0,
        sinks: vec![],
    };
    for layer in 0..LAYERS {
        let [q, k, v] = [0, 1, 2].map(|tensor| SINES.of(tensor, layer, 0..tokens));
        let oracle = Oracle::new(&problem, Values::F32(&q), Values::F32(&k), Values::F32(&v)).unwrap();
        for part in 0..2 {
            let got =
                outputs.iter().flat_map(|rank| bytemuck::pod_collect_to_vec::<u8, f32>(&rank[layer][part]));
            let rows =
                (0..tokens).flat_map(|token| (0..HEADS[0]).map(move |head| oracle.row(0, token, head)));
            let expected: Vec<f64> =
                rows.flat_map(|(o, lse)| if part == 0 { o } else { vec![lse] }).collect();
            let far = got.zip(&expected).map(|(got, wanted)| (f64::from(got) - wanted).abs());
            // Values of size 1 or less, sums of at most 33 of them in f32.
            assert!(far.fold(0.0, f64::max) < 4e-6, "layer {layer}, part {part}");
        }
    }
}
