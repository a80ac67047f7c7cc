//! Owners of memory, reuse of memory, refusals, and the current context of a thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos::backend::{Backend, Device, StateMut, StateShape};
use kyklos::{Dtype, Result, Tensor};
use kyklos_cuda::{
    CallerMemory, CallerStream, CudaBackend, CudaOptions, CudaTensor, Written, availability, devices,
};
use pollster::block_on;

use super::driver::{Context, Memory, Stream, copied};
use super::{Busy, ordered};
use crate::faults::is_right;
use crate::scenario::HANGS_AFTER;

const SHAPE: [usize; 4] = [1, 4, 4, 64];
const BYTES: usize = 4 * 4 * 64 * 4;

/// Memory that says when it is dropped.
struct Noticed(#[expect(dead_code, reason = "freed by its drop")] (Memory, Memory, Busy), Arc<AtomicBool>);

impl Drop for Noticed {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

/// A tensor whose elements `stream` writes after other work, and whether its owner was dropped.
fn noticed(device: &Device, context: &Arc<Context>, stream: &Stream) -> (Tensor, Arc<AtomicBool>) {
    let busy = Busy::new(context, stream);
    let data: Vec<f32> = (0..BYTES / 4).map(|index| index as f32).collect();
    let (from, memory) =
        (Memory::on_host(context, bytemuck::cast_slice(&data)), Memory::on_device(context, BYTES));
    stream.upload(&from, &memory);
    let at = CallerMemory { address: memory.address, bytes: BYTES };
    let dropped = Arc::new(AtomicBool::new(false));
    let owner = Noticed((memory, from, busy), dropped.clone());
    let written = ordered(stream);
    let tensor = from_cuda(device, at, [1024, 256, 64, 1], Written::By(&written), owner);
    (tensor.unwrap(), dropped)
}

fn from_cuda(
    device: &Device,
    memory: CallerMemory,
    strides: [usize; 4],
    written: Written<'_>,
    owner: impl Send + Sync + 'static,
) -> Result<Tensor> {
    // SAFETY: all callers give an owner that keeps the memory, or memory that is refused; nothing else
    // writes to it.
    unsafe { Tensor::from_cuda(SHAPE, strides, Dtype::F32, device, memory, written, owner) }
}

pub(super) fn owner() {
    let device = Device::from(CudaBackend::new(0).unwrap());
    let context = Context::primary(0);
    let stream = Stream::new(&context);
    let (tensor, dropped) = noticed(&device, &context, &stream);
    let shared = tensor.to_device(&device).unwrap();
    assert_eq!(shared.cuda_address(), tensor.cuda_address(), "dense tensors are not copied");
    // Copied by a kernel that waits for the stream.
    let copy = tensor.clone().swap_tokens_and_heads().to_device(&device).unwrap();
    assert!(copy.cuda_address() != tensor.cuda_address() && copy.cuda_address().is_some());
    drop(tensor);
    drop(shared);
    block_on(device.wait()).unwrap();
    within_seconds(&dropped);
    let swapped: Vec<f32> =
        (0..1024).map(|index| (index / 64 % 4 * 256 + index / 256 * 64 + index % 64) as f32).collect();
    assert_eq!(copy.to_vec::<f32>().unwrap(), swapped);
    // A tensor that the device does not read.
    let (unread, dropped) = noticed(&device, &context, &stream);
    drop(unread);
    within_seconds(&dropped);
    // A tensor that outlives its device.
    let (last, dropped) = noticed(&device, &context, &stream);
    let copy = last.clone().swap_tokens_and_heads().to_device(&device).unwrap();
    drop((copy, device));
    drop(last);
    within_seconds(&dropped);
}

/// An owner whose destructor takes long, and one whose destructor panics.
pub(super) fn bad_owners() {
    let device = Device::from(CudaBackend::new(0).unwrap());
    let context = Context::primary(0);
    let stream = Stream::new(&context);
    let (sender, receiver) = mpsc::channel::<()>();
    let is_let_go = Arc::new(AtomicBool::new(false));
    // Each is read by a kernel that is not done when the last handle of the memory is dropped.
    let read = |owner: Box<dyn Send + Sync>| {
        let memory = Memory::on_device(&context, BYTES);
        let at = CallerMemory { address: memory.address, bytes: BYTES };
        let busy = Busy::new(&context, &stream);
        let written = ordered(&stream);
        let owner = (owner, memory, busy);
        let tensor = from_cuda(&device, at, [1024, 256, 64, 1], Written::By(&written), owner).unwrap();
        drop(tensor.swap_tokens_and_heads().to_device(&device).unwrap());
    };
    read(Box::new(OnDrop(Some(|| panic!("this is expected")))));
    let (slow, let_go) = (Mutex::new(receiver), is_let_go.clone());
    read(Box::new(OnDrop(Some(move || {
        let _ = slow.lock().unwrap().recv();
        let_go.store(true, Ordering::SeqCst);
    }))));
    // The device and its own memory go on.
    let (done, is_done) = mpsc::channel();
    let (working, its_context) = (device.clone(), context.clone());
    std::thread::spawn(move || {
        block_on(working.wait()).unwrap();
        let bytes = 24 << 20;
        let large = working.alloc("more than is kept", bytes).unwrap();
        // Memory of the first owner may be freed meanwhile, which is much less.
        let used = its_context.used_bytes();
        drop(large);
        while its_context.used_bytes() > used - bytes {
            std::thread::sleep(Duration::from_millis(1));
        }
        done.send(()).unwrap();
    });
    is_done.recv_timeout(HANGS_AFTER).expect("a device waits for the destructor of a caller");
    assert!(!is_let_go.load(Ordering::SeqCst));
    drop(sender);
    within_seconds(&is_let_go);
    let (tensor, dropped) = noticed(&device, &context, &stream);
    drop(tensor.clone().swap_tokens_and_heads().to_device(&device).unwrap());
    drop(tensor);
    within_seconds(&dropped);
}

/// Does something when it is dropped.
struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        self.0.take().unwrap()();
    }
}

fn within_seconds(dropped: &AtomicBool) {
    let start = Instant::now();
    while !dropped.load(Ordering::SeqCst) {
        assert!(start.elapsed() < HANGS_AFTER, "the owner is dropped");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn hanging() {
    let options = CudaOptions { stuck_after: Duration::from_millis(500), ..CudaOptions::default() };
    let device = Device::from(CudaBackend::with_options(0, &options).unwrap());
    let context = Context::primary(0);
    let stream = Stream::new(&context);
    let (tensor, dropped) = noticed(&device, &context, &stream);
    let copy = tensor.clone().swap_tokens_and_heads().to_device(&device).unwrap();
    drop(tensor);
    assert!(block_on(device.wait()).unwrap_err().to_string().contains("hangs"));
    assert!(copy.make_wait(&ordered(&stream)).unwrap_err().to_string().contains("hangs"));
    drop((copy, device));
    std::thread::sleep(Duration::from_millis(100));
    assert!(!dropped.load(Ordering::SeqCst), "the kernel may still read the memory");
}

/// The caller's stream reads tensors late, and the next tensor may get the memory of the one
/// before.
pub(super) fn reuse(keep: bool) {
    let device = Device::from(CudaBackend::new(0).unwrap());
    let context = Context::primary(0);
    let stream = Stream::new(&context);
    let rounds = (0..6_u8).map(|round| {
        let tensor = Tensor::new(SHAPE, vec![f32::from(round); 1024]).unwrap().to_device(&device).unwrap();
        block_on(device.wait()).unwrap();
        let busy = Busy::new(&context, &stream);
        let into = Memory::on_host(&context, &[0; BYTES]);
        tensor.make_wait(&ordered(&stream)).unwrap();
        stream.download(tensor.cuda_address().unwrap(), &into);
        if keep {
            tensor.keep_for(&ordered(&stream)).unwrap();
        }
        (into, busy)
    });
    let rounds: Vec<_> = rounds.collect();
    stream.synchronize();
    for (round, (into, _)) in rounds.iter().enumerate() {
        let got = bytemuck::pod_collect_to_vec::<u8, f32>(&into.contents());
        assert!(got.iter().all(|value| *value == round as f32), "round {round}: {}", got[0]);
    }
}

pub(super) fn refusals() {
    let device = Device::from(CudaBackend::new(0).unwrap());
    let (context, elsewhere, other) = (Context::primary(0), Context::primary(1), Context::other(0));
    let before = copied();
    let memory = Memory::on_device(&context, BYTES);
    let freed = Memory::on_device(&context, BYTES).address;
    let pinned = Memory::on_host(&context, &[0; BYTES]);
    let (of_device_1, of_other) = (Memory::on_device(&elsewhere, BYTES), Memory::on_device(&other, BYTES));
    let plain = vec![0_f32; BYTES / 4];
    let dense = [1024, 256, 64, 1];
    let refused = |device: &Device, at: (u64, usize), strides, words: &str| {
        let memory = CallerMemory { address: at.0, bytes: at.1 };
        let error = from_cuda(device, memory, strides, Written::Already, ()).unwrap_err();
        assert!(error.is_request() && error.to_string().contains(words), "{error}");
    };
    for (at, words) in [
        ((plain.as_ptr() as u64, BYTES), "which the driver does not know"),
        ((freed, BYTES), "which the driver does not know"),
        ((0, BYTES), "which the driver does not know"),
        ((pinned.address, BYTES), "which is memory of the host"),
        ((of_device_1.address, BYTES), "of cuda:1 for cuda:0"),
        ((of_other.address, BYTES), "which belongs to another context"),
        ((memory.address + 8, BYTES - 8), "which is no multiple of 16"),
        ((memory.address + 256, BYTES), "where 3840 are allocated"),
        ((memory.address, usize::MAX), "where 4096 are allocated"),
        ((memory.address, BYTES - 4), "reaches beyond its memory of 1023 elements"),
    ] {
        refused(&device, at, dense, words);
    }
    let whole = (memory.address, BYTES);
    refused(&device, whole, [1024, 256, 64, 2], "the elements of a head are not adjacent");
    refused(&device, whole, [1024, 64, 64, 1], "elements share memory");
    refused(&Device::cpu(), whole, dense, "memory of a CUDA device for");
    let at = CallerMemory { address: memory.address, bytes: BYTES };
    // SAFETY: the memory lives longer than the tensors, and nothing writes to it.
    let half = |shape, strides| unsafe {
        Tensor::from_cuda(shape, strides, Dtype::F16, &device, at, Written::Already, ())
    };
    let odd = half([1, 4, 2, 64], [0, 201, 67, 1]).unwrap_err().to_string();
    assert!(odd.contains("4-byte boundaries"), "{odd}");
    // The stride of the only batch entry has no meaning.
    let tensor = half([1, 4, 2, 64], [7, 200, 66, 1]).unwrap();
    assert_eq!(tensor.cuda_address(), None, "not dense");
    let none = CallerMemory { address: 0, bytes: 0 };
    // SAFETY: there is no memory.
    let none =
        unsafe { Tensor::from_cuda([1, 0, 2, 64], [0; 4], Dtype::F16, &device, none, Written::Already, ()) };
    assert_eq!(none.unwrap().to_vec::<half::f16>().unwrap(), []);
    let (foreign, capturing) = (Stream::new(&other), Stream::new(&context));
    capturing.capture();
    let host = Tensor::new([1, 1, 1, 8], vec![0_f32; 8]).unwrap();
    assert_eq!(host.cuda_address(), None);
    let own = CallerStream::new(&device).unwrap();
    assert!(CallerStream::new(&Device::cpu()).unwrap_err().is_request());
    for (stream, words) in [
        (&foreign, "a stream that is not of the primary context of cuda:0"),
        (&capturing, "a stream that captures a CUDA graph"),
    ] {
        let stream = ordered(stream);
        for result in [
            from_cuda(&device, at, dense, Written::By(&stream), ()).map(|_| ()),
            tensor.make_wait(&stream),
            tensor.keep_for(&stream),
            own.wait_for(&stream, &device),
        ] {
            let error = result.unwrap_err();
            assert!(error.is_request() && error.to_string().contains(words), "{error}");
        }
        assert!(host.make_wait(&stream).unwrap_err().is_request());
    }
    assert_eq!(copied(), before);
}

/// The context of a caller that is no primary one, or none at all, is current before and after
/// every call; also after errors.
pub(super) fn contexts() {
    let (other, primary) = (availability().map(|()| Context::other(1)).unwrap(), Context::primary(1));
    for context in [&other, &primary] {
        context.set_current();
        let same = |what: &str| assert!(context.is_current(), "{what}");
        devices().unwrap();
        same("the list of devices");
        let backend = CudaBackend::new(0).unwrap();
        same("a device");
        assert!(CudaBackend::new(5).is_err());
        same("a device that does not exist");
        let mut buffer = backend.upload("data", Bytes::from_static(&[1; 64])).unwrap();
        same("an upload");
        assert!(backend.alloc("too much", 1 << 40).is_err());
        same("too much memory");
        backend.write(&mut buffer, 0, &[2; 64]).unwrap();
        assert!(backend.write(&mut buffer, 60, &[0; 8]).is_err());
        same("a write");
        block_on(backend.download(&mut buffer, 0..64)).unwrap();
        assert!(block_on(backend.download(&mut buffer, 60..65)).is_err());
        same("a download");
        is_right(&backend);
        same("kernels");
        block_on(backend.wait()).unwrap();
        backend.release_idle();
        same("a wait");
        drop(buffer);
        drop(backend);
        same("the end of a device");
    }
    let unknown = CallerMemory { address: 16, bytes: BYTES };
    let device = Device::from(CudaBackend::new(0).unwrap());
    assert!(from_cuda(&device, unknown, [1024, 256, 64, 1], Written::Already, ()).is_err());
    assert!(primary.is_current());
}

/// As [`contexts`], with a context of Kyklos that is destroyed.
pub(super) fn destroyed() {
    let backend = CudaBackend::new(0).unwrap();
    let context = Context::other(1);
    context.set_current();
    let shape = StateShape { batch: 1, rows: 20, heads: 2, dim: 64 };
    let [mut a, mut ml] =
        [shape.a_bytes(), shape.ml_bytes()].map(|bytes| backend.alloc("a state", bytes).unwrap());
    for _ in 0..3 {
        // The call that gets the first error depends on timing.
        let _ = backend.reset_state(&mut StateMut { a: &mut a, ml: &mut ml, shape });
    }
    assert!(block_on(backend.wait()).is_err() && context.is_current());
    assert!(backend.alloc("more", 64).is_err() && context.is_current());
    assert!(backend.write(&mut a, 0, &[0; 4]).is_err() && context.is_current());
    assert!(block_on(backend.download(&mut ml, 0..4)).is_err() && context.is_current());
    drop((a, ml, backend));
    assert!(context.is_current());
}
