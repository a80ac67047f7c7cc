//! Memory that a copy to another device reads is kept until the copy is done.
#![expect(unsafe_code, reason = "tensors of a caller's memory are unsafe to make")]

use std::sync::{Barrier, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{Attention, Dtype, Execution, Mesh, Session, SessionOptions, Strategy, Tensor};
use kyklos_cuda::{CallerMemory, CudaTensor, Written};
use kyklos_transport::in_process_group;
use pollster::block_on;

use super::{CASE, device, named, plans_on, scenario};
use crate::caller::driver;
use crate::scenario::{Ends, HANGS_AFTER, Scenario};

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut unknown = scenario("a copy whose end is not known keeps its memory", 2, unknown_end);
    unknown.fake = format!("{},copy_ms=700,refuse_event_at=1", unknown.fake);
    unknown.ends = Ends::LeavingSomething;
    unknown.says = &["left behind: 2 allocations"];
    let mut callers =
        scenario("memory of a caller is kept while another device copies it", 2, memory_of_a_caller);
    callers.fake = format!("{},copy_ms=700", callers.fake);
    vec![unknown, callers]
}

/// The driver records no event behind the copies to device 0. Everything is dropped long before
/// they are done.
fn unknown_end() {
    let (plans, prepared) = plans_on(CASE, Dtype::F32, Mesh::new(1, 2).unwrap(), Strategy::Ring);
    let ended = super::on_peers(&plans, &prepared, 2);
    // Rank 1 may have its keys, and its result, before rank 0 fails.
    assert!(ended[0].1.is_err());
    for error in ended.iter().filter_map(|(_, ended)| ended.as_ref().err()) {
        assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    }
    // The copy to device 0 would meet memory that was freed.
    std::thread::sleep(Duration::from_secs(1));
}

const SHAPE: [usize; 4] = [1, 40, 2, 64];
const BYTES: usize = 40 * 2 * 64 * 4;

/// For each dropped memory of a caller: the rank whose device had it, and the thread that dropped
/// it.
static DROPPED: Mutex<Vec<(u32, ThreadId, String)>> = Mutex::new(Vec::new());

/// Memory of a caller, who may wait for the device when it is dropped.
struct Owner(#[expect(dead_code, reason = "freed by its drop")] driver::Memory, u32);

impl Drop for Owner {
    fn drop(&mut self) {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or_default().to_owned();
        DROPPED.lock().unwrap().push((self.1, thread.id(), name));
    }
}

/// Rank 1 drops its tensors, and so the caller's memory, while device 0 copies from it. No thread
/// of the other rank or of its device drops the memory.
fn memory_of_a_caller() {
    let group = in_process_group(2);
    let ranks: Vec<_> = group.iter().cloned().zip((0..).map(device)).collect();
    let peers = named(&ranks);
    let host = on_threads(in_process_group(2), |transport| {
        let rank = transport.rank().0;
        let mut session = Session::new(transport, ranks[rank as usize].1.clone());
        attend(&mut session, [0, 1, 2].map(|tensor| Tensor::new(SHAPE, values(rank, tensor)).unwrap()))
    });
    let (barrier, threads) = (Barrier::new(2), Mutex::new(Vec::new()));
    let copied = on_threads(group, |transport| {
        let rank = transport.rank().0;
        threads.lock().unwrap().push((rank, std::thread::current().id()));
        let (device, peers) = (&ranks[rank as usize].1, peers[rank as usize].clone());
        let options = SessionOptions::default();
        let mut session = Session::with_collective(transport, device.clone(), peers, options);
        let output = attend(&mut session, [0, 1, 2].map(|tensor| of_caller(device, rank, tensor)));
        // A rank stays in its group until all have ended.
        barrier.wait();
        output
    });
    assert!(copied == host, "other bytes than through the host");
    let start = Instant::now();
    while DROPPED.lock().unwrap().len() < 6 {
        assert!(start.elapsed() < HANGS_AFTER, "all memory of callers is dropped");
        std::thread::sleep(Duration::from_millis(1));
    }
    for (of, thread, name) in &*DROPPED.lock().unwrap() {
        let other = 1 - of;
        assert!(
            !threads.lock().unwrap().contains(&(other, *thread)),
            "rank {other} drops memory of the other rank"
        );
        assert_ne!(*name, format!("kyklos-cuda:{other}"));
    }
}

fn attend(session: &mut Session, [q, k, v]: [Tensor; 3]) -> Vec<u8> {
    let execution = Execution::new().mesh(Mesh::new(1, 2).unwrap()).strategy(Strategy::Ring);
    let output = session.attend(&Attention::new().execution(execution), &q, &k, &v).unwrap();
    drop((q, k, v));
    block_on(output.o.bytes()).unwrap().to_vec()
}

fn values(rank: u32, tensor: u32) -> Vec<f32> {
    let first = (rank * 3 + tensor) * 7919;
    (0..BYTES as u32 / 4).map(|index| (((first + index) as f32) * 0.37).sin()).collect()
}

/// A tensor in memory that the caller frees when its last handle is dropped.
fn of_caller(device: &Device, rank: u32, tensor: u32) -> Tensor {
    let context = driver::Context::primary(rank.cast_signed());
    let stream = driver::Stream::new(&context);
    let from = driver::Memory::on_host(&context, bytemuck::cast_slice(&values(rank, tensor)));
    let owner = driver::Memory::on_device(&context, BYTES);
    stream.upload(&from, &owner);
    stream.synchronize();
    let at = CallerMemory { address: owner.address, bytes: BYTES };
    let [_, tokens, heads, dim] = SHAPE;
    let strides = [tokens * heads * dim, heads * dim, dim, 1];
    // SAFETY: the tensor owns the memory, and nothing writes to it any more.
    unsafe { Tensor::from_cuda(SHAPE, strides, Dtype::F32, device, at, Written::Already, Owner(owner, rank)) }
        .unwrap()
}
