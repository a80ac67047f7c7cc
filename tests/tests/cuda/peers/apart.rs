//! A device that hangs or is lost touches no rank that copies from it or to it, and memory under
//! copy is no shortage.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::try_join;
use kyklos::backend::{Backend, Device, DeviceBuffer, Extent, Layout};
use kyklos::collective::{Collective, Incoming, Memory, Outgoing, Piece};
use kyklos::plan::BufferId;
use kyklos::{Error, Meter, SystemClock};
use kyklos_cuda::{CudaBackend, CudaOptions, CudaPeers};
use kyklos_transport::{Rank, Tag, in_process_group};
use pollster::block_on;

use super::{named, scenario};
use crate::scenario::{Ends, HANGS_AFTER, Scenario};

pub(super) fn scenarios() -> Vec<Scenario> {
    let one = |name: &str, fake: &str, run: fn()| {
        // The threads of a device that hangs never end.
        let mut one = scenario(name, 2, move || that_ends(run));
        one.fake = format!("devices=2,delay_us=0,{fake}");
        one
    };
    // A device that is lost, or never ends, says so.
    let noisy = |mut one: Scenario| {
        one.says_not = &[];
        one
    };
    let endless = |one: Scenario| Scenario { ends: Ends::LeavingSomething, ..noisy(one) };
    let for_ever = endless(one(
        "an allocation does not wait for ever for a copy to another device",
        "memory_mb=64,copy_ms=3600000",
        copied_for_ever,
    ));
    let lost = noisy(one(
        "a device that is lost with a copy to it does not take the other one along",
        "memory_mb=256,copy_ms=500,sticky_at=1",
        lost_receiver,
    ));
    let written_after = noisy(one(
        "memory that a lost device has copied can be written",
        "memory_mb=256,sticky_at=1",
        written_after_a_loss,
    ));
    let written_under = endless(one(
        "a write waits for a copy to another device, and names that device if it hangs",
        "memory_mb=256,copy_ms=3600000",
        written_under_copy,
    ));
    let from_lost = noisy(one(
        "the error of a copy from a device that is lost names that device",
        "memory_mb=256,sticky_at=1",
        lost_sender,
    ));
    vec![
        one(
            "a receiver goes on while the memory that it copied cannot be freed",
            "memory_mb=64,copy_ms=400,copy_to=1,hang_at=1",
            hanging_sender,
        ),
        one(
            "a receiver goes on while the sender waits in a call of its driver",
            "memory_mb=256,hang_at=1,most_queued=8",
            blocked_sender,
        ),
        lost,
        written_after,
        written_under,
        from_lost,
        one("memory under copy does not count against the limit", "memory_mb=256,copy_ms=5000", limit),
        one("memory of a message counts only while its rank has it", "memory_mb=256", not_taken),
        one("an allocation waits for a copy to another device", "memory_mb=64,copy_ms=500", shortage),
        for_ever,
    ]
}

pub(super) fn that_ends(run: fn()) {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        run();
        let _ = sender.send(());
    });
    match receiver.recv_timeout(HANGS_AFTER) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        // The thread has ended, perhaps by a check that failed.
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => thread.join().unwrap(),
    }
}

/// Rank r has device r.
pub(super) struct Pair {
    pub(super) devices: [Device; 2],
    peers: Vec<Arc<CudaPeers>>,
    meter: Meter,
}

/// The bytes of a message, a size that the pool does not round up. More than a quarter of the
/// smallest device here, so that the pool does not keep them.
pub(super) const BYTES: usize = 24 << 20;
const TAG: Tag = Tag { op: 0, message: 0 };

impl Pair {
    pub(super) fn new(options: &CudaOptions) -> Self {
        let devices = [0, 1].map(|rank| Device::from(CudaBackend::with_options(rank, options).unwrap()));
        let ranks: Vec<_> = in_process_group(2).into_iter().zip(devices.iter().cloned()).collect();
        Self { devices, peers: named(&ranks), meter: Meter::new(Arc::new(SystemClock::new()), false) }
    }

    /// Sends all of `buffer` from a rank to the other one. When this returns, the copy is
    /// submitted, and nobody has `buffer` any more.
    pub(super) fn send(&self, from: usize, buffer: DeviceBuffer) -> DeviceBuffer {
        let mut memory = Memory::from(vec![vec![buffer]]);
        let sends = [outgoing(from)];
        let (device, peers) = (&self.devices[from], &self.peers[from]);
        let sending = peers.post_exchange(device, &self.meter, TAG, &mut memory, &sends, &[]);
        drop(memory);
        let (device, peers) = (&self.devices[1 - from], &self.peers[1 - from]);
        let recvs = [incoming(from)];
        let receiving = peers.post_exchange(device, &self.meter, TAG, &mut Memory::default(), &[], &recvs);
        let (_, arrived) = block_on(try_join(sending, receiving)).unwrap();
        arrived.into_iter().flatten().next().unwrap()
    }
}

fn outgoing(from: usize) -> Outgoing {
    let piece = Piece { buffer: BufferId(0), tensor: 0, bytes: 0..BYTES, is_whole: true };
    Outgoing { to: Rank(1 - u32::try_from(from).unwrap()), pieces: vec![piece] }
}

fn incoming(from: usize) -> Incoming {
    Incoming { from: Rank(u32::try_from(from).unwrap()), piece_bytes: vec![BYTES] }
}

pub(super) fn message() -> Bytes {
    // Byte by byte takes half a second without the compiler's optimisations.
    let some: Vec<u8> = (0..=250).collect();
    let mut all = some.repeat(BYTES / some.len() + 1);
    all.truncate(BYTES);
    all.into()
}

/// Launches a kernel, and does not wait for it.
fn launch(device: &Device) -> Result<(), Error> {
    write(device, &mut device.alloc("into", 64)?)
}

/// Writes the beginning of a buffer by a kernel, which is not waited for.
pub(super) fn write(device: &Device, into: &mut DeviceBuffer) -> Result<(), Error> {
    let from = device.upload("from", Bytes::from_static(&[1; 64]))?;
    let rows = Layout { offset: 0, batch_stride: 0, row_stride: 64, head_stride: 64 };
    device.repack((&from, rows), (into, rows), Extent { batch: 1, rows: 1, heads: 1, row_bytes: 64 })
}

pub(super) fn is_message(device: &Device, mut buffer: DeviceBuffer) {
    assert!(block_on(device.download(&mut buffer, 0..BYTES)).unwrap() == message());
}

/// The device works: kernels, and copies both ways.
pub(super) fn works(device: &Device) {
    launch(device).unwrap();
    let mut some = device.upload("some", Bytes::from_static(b"sixteen bytes...")).unwrap();
    assert_eq!(&block_on(device.download(&mut some, 0..16)).unwrap()[..], b"sixteen bytes...");
    block_on(device.wait()).unwrap();
}

/// The sender's memory could be freed when the copy is done. Then its device hangs, and freeing
/// waits for it.
fn hanging_sender() {
    let pair = Pair::new(&CudaOptions::default());
    let sent = pair.devices[0].upload("message", message()).unwrap();
    let received = pair.send(0, sent);
    launch(&pair.devices[0]).unwrap();
    is_message(&pair.devices[1], received);
    works(&pair.devices[1]);
}

/// The sender's rank is in a launch that waits for the device, when the receiver takes the message.
fn blocked_sender() {
    let pair = Pair::new(&CudaOptions::default());
    let [sender, receiver] = &pair.devices;
    let sent = sender.upload("message", message()).unwrap();
    let receives = [incoming(0)];
    let receiving =
        pair.peers[1].post_exchange(receiver, &pair.meter, TAG, &mut Memory::default(), &[], &receives);
    let mut memory = Memory::from(vec![vec![sent]]);
    let sending = pair.peers[0].post_exchange(sender, &pair.meter, TAG, &mut memory, &[outgoing(0)], &[]);
    drop(memory);
    assert!(block_on(sending).unwrap().is_empty());
    let launched = Arc::new(AtomicUsize::new(0));
    let (device, count) = (sender.clone(), launched.clone());
    std::thread::spawn(move || {
        while launch(&device).is_ok() {
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    let mut before = usize::MAX;
    while before != launched.load(Ordering::SeqCst) || before == 0 {
        before = launched.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(300));
    }
    let arrived = block_on(receiving).unwrap();
    is_message(receiver, arrived.into_iter().flatten().next().unwrap());
    works(receiver);
}

/// The receiver's context is destroyed while its copy is under way: the sender's memory is in use
/// for ever, as far as anybody knows.
fn lost_receiver() {
    let pair = Pair::new(&CudaOptions::default());
    let [receiver, sender] = &pair.devices;
    let sent = sender.upload("message", message()).unwrap();
    let _received = pair.send(1, sent);
    // The context may be gone before the launch has returned.
    let _ = launch(receiver);
    let error = block_on(receiver.wait()).unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    let mut again: Vec<_> = (0..3).map(|_| sender.upload("again", message()).unwrap()).collect();
    std::thread::sleep(Duration::from_millis(600));
    is_message(sender, again.remove(0));
    drop(again);
    is_message(sender, sender.upload("again", message()).unwrap());
    works(sender);
}

/// The sender still has the memory, as it has that of a cache.
fn written_after_a_loss() {
    let pair = Pair::new(&CudaOptions::default());
    let [receiver, sender] = &pair.devices;
    let mut held = sender.upload("message", message()).unwrap();
    let received = pair.send(1, sender.share(&mut held));
    is_message(receiver, received);
    let _ = launch(receiver);
    assert!(block_on(receiver.wait()).is_err());
    write(sender, &mut held).unwrap();
    assert_eq!(&block_on(sender.download(&mut held, 0..64)).unwrap()[..], [1; 64]);
    works(sender);
}

/// The same, and the copy is never done.
fn written_under_copy() {
    let stuck_after = Duration::from_secs(2);
    let pair = Pair::new(&CudaOptions { stuck_after, ..CudaOptions::default() });
    let sender = &pair.devices[1];
    let mut held = sender.upload("message", message()).unwrap();
    std::mem::forget(pair.send(1, sender.share(&mut held)));
    let error = write(sender, &mut held).unwrap_err().to_string();
    assert!(error.contains("cuda:0") && !error.contains("cuda:1"), "{error}");
    std::thread::sleep(2 * stuck_after);
    works(sender);
    // To close the receiver would wait for its copy, in the driver.
    std::mem::forget(pair);
}

/// The sender's context is destroyed between the message and the copy.
fn lost_sender() {
    let pair = Pair::new(&CudaOptions::default());
    let [sender, receiver] = &pair.devices;
    let sent = sender.upload("message", message()).unwrap();
    let receives = [incoming(0)];
    let receiving =
        pair.peers[1].post_exchange(receiver, &pair.meter, TAG, &mut Memory::default(), &[], &receives);
    let mut memory = Memory::from(vec![vec![sent]]);
    let sending = pair.peers[0].post_exchange(sender, &pair.meter, TAG, &mut memory, &[outgoing(0)], &[]);
    drop(memory);
    block_on(sending).unwrap();
    let _ = launch(sender);
    assert!(block_on(sender.wait()).is_err());
    let broken = block_on(receiving).unwrap_err();
    let error = format!("{:?}", broken);
    assert!(error.contains("cuda:0") && !error.contains("cuda:1"), "{error}");
    works(receiver);
}

fn limited(bytes: usize) -> CudaOptions {
    CudaOptions { max_memory_bytes: Some(bytes as u64), ..CudaOptions::default() }
}

/// The sender has given its memory back, and allocates as much again before the copy is done.
fn limit() {
    let pair = Pair::new(&limited(BYTES + BYTES / 2));
    let sent = pair.devices[1].upload("message", message()).unwrap();
    let start = Instant::now();
    let received = pair.send(1, sent);
    let next = pair.devices[1].upload("next", Bytes::from(vec![0; BYTES])).unwrap();
    assert!(
        start.elapsed() < Duration::from_millis(4500),
        "the copy is still under way: {:?}",
        start.elapsed()
    );
    let full = pair.devices[1].alloc("one more", BYTES);
    assert!(matches!(full, Err(Error::OutOfMemory { .. })), "{full:?}");
    is_message(&pair.devices[0], received);
    drop(next);
    works(&pair.devices[1]);
}

/// The receiver has been told of a message, and has not taken it yet.
fn not_taken() {
    let pair = Pair::new(&limited(BYTES + BYTES / 2));
    let [sender, receiver] = &pair.devices;
    let receives = [incoming(0)];
    let receiving =
        pair.peers[1].post_exchange(receiver, &pair.meter, TAG, &mut Memory::default(), &[], &receives);
    let mut memory = Memory::from(vec![vec![sender.upload("message", message()).unwrap()]]);
    let sending = pair.peers[0].post_exchange(sender, &pair.meter, TAG, &mut memory, &[outgoing(0)], &[]);
    block_on(sending).unwrap();
    let full = sender.alloc("one more", BYTES);
    assert!(matches!(full, Err(Error::OutOfMemory { .. })), "the rank still has it: {full:?}");
    drop(memory);
    let next = sender.upload("next", Bytes::from(vec![0; BYTES])).unwrap();
    let arrived = block_on(receiving).unwrap();
    is_message(receiver, arrived.into_iter().flatten().next().unwrap());
    drop(next);
    works(sender);
}

/// Fills the smallest device, together with a message, up to a few small buffers.
const REST: usize = 36 << 20;

/// The device has no memory left but that which is under copy.
fn shortage() {
    let pair = Pair::new(&CudaOptions::default());
    let rest = pair.devices[1].alloc("the rest", REST).unwrap();
    let sent = pair.devices[1].upload("message", message()).unwrap();
    let received = pair.send(1, sent);
    // Of another size: memory has to be freed for it.
    drop(pair.devices[1].upload("next", Bytes::from(vec![0; BYTES - BYTES / 4])).unwrap());
    drop(pair.devices[1].upload("next", Bytes::from(vec![0; BYTES])).unwrap());
    is_message(&pair.devices[0], received);
    drop(rest);
    works(&pair.devices[1]);
}

/// The same, and the copy is never done.
fn copied_for_ever() {
    let stuck_after = Duration::from_secs(2);
    let pair = Pair::new(&CudaOptions { stuck_after, ..CudaOptions::default() });
    let _rest = pair.devices[1].alloc("the rest", REST).unwrap();
    let sent = pair.devices[1].upload("message", message()).unwrap();
    std::mem::forget(pair.send(1, sent));
    // Each refusal takes as long as the first, and others allocate meanwhile.
    for _ in 0..2 {
        let waits = std::thread::spawn({
            let sender = pair.devices[1].clone();
            move || (sender.alloc("next", BYTES), Instant::now())
        });
        std::thread::sleep(stuck_after / 20);
        works(&pair.devices[1]);
        let worked = Instant::now();
        let (next, refused) = waits.join().unwrap();
        assert!(matches!(next, Err(Error::OutOfMemory { .. })), "{next:?}");
        assert!(worked < refused, "an allocation of another size waited");
    }
    // To close the receiver would wait for its copy, in the driver.
    std::mem::forget(pair);
}
