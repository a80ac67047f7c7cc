//! What is kept of messages after a failure: those that have arrived, and none that nobody takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos::backend::{Backend, Device, DeviceBuffer};
use kyklos::collective::{Broken, Collective, ExchangeError, Incoming, Memory};
use kyklos::host::shard;
use kyklos::{Dtype, Mesh, Meter, Observer, RunOptions, Session, SessionOptions, Strategy, SystemClock};
use kyklos_cuda::{CudaBackend, CudaOptions};
use kyklos_transport::{Rank, Tag, TransportError, in_process_group};
use pollster::block_on;

use super::{CASE, DEADLINE, device, named, plans_on, scenario};
use crate::scenario::Scenario;

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut arrived =
        scenario("what has arrived from other processes is kept after a failure here", 2, arrived);
    arrived.says_not = &[];
    let mut all = vec![arrived];
    for (name, ranks, run) in [
        ("of a receiver that drops its call", 3, not_taken as fn()),
        ("of a receiver that is not there yet", 3, not_asked_for),
        ("of a sender that drops its call and leaves", 2, withdrawn),
    ] {
        let mut freed = scenario(&format!("memory {name} is freed"), ranks, run);
        freed.says_not = &[];
        all.push(freed);
    }
    all
}

/// Rank 1 gets a message from a rank elsewhere, and word of one from its own process that is not there.
fn arrived() {
    let group = in_process_group(3);
    let ranks: Vec<_> = group[..2].iter().cloned().zip((0..).map(device)).collect();
    let peers = named(&ranks);
    let tag = Tag { op: 0, message: 0 };
    let from = |rank, bytes: usize| Incoming { from: Rank(rank), piece_bytes: vec![bytes] };
    for recvs in [[from(0, 8), from(2, 4)], [from(2, 4), from(0, 8)]] {
        let tag = Tag { message: tag.message + u32::from(recvs[0].from == Rank(2)), ..tag };
        let send = |from: usize, bytes| {
            block_on(group[from].post_send(Rank(1), tag, vec![Bytes::from_static(bytes)], DEADLINE)).unwrap();
        };
        let meter = Meter::new(Arc::new(SystemClock::new()), false);
        let mut memory = Memory::<DeviceBuffer>::default();
        let exchange = peers[1].post_exchange(&ranks[1].1, &meter, tag, &mut memory, &[], &recvs);
        send(2, b"here");
        send(0, &[1]);
        let Broken { error, mut arrived } = block_on(exchange).unwrap_err();
        let misbehaved = |error: &_| {
            matches!(error, ExchangeError::Transport(TransportError::PeerMisbehaved { peer: Rank(0), .. }))
        };
        assert!(misbehaved(&error), "{error:?}");
        let mut of = |rank| {
            let place = recvs.iter().position(|recv| recv.from == Rank(rank)).unwrap();
            arrived[place].take()
        };
        assert!(of(0).is_none());
        let mut pieces = of(2).expect("the message that has arrived");
        assert_eq!(&block_on(ranks[1].1.download(&mut pieces[0], 0..4)).unwrap()[..], b"here");
    }
}

/// The limit of each device's memory, a size that the pool does not round up.
const LIMIT: usize = 64 << 20;

/// What ranks tell each other, apart from their messages.
#[derive(Debug, Default)]
struct Signs {
    /// The rank that waits before its first step until `checked` is set.
    late: Option<Rank>,
    /// The rank that drops its call after it has posted its first exchange.
    drops: Option<Rank>,
    posted: AtomicBool,
    checked: AtomicBool,
}

impl Observer for Signs {
    fn step(&self, rank: Rank, _: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
        if Some(rank) == self.late && step == 0 {
            until(&self.checked);
        }
        if Some(rank) == self.drops && step == 1 {
            self.posted.store(true, Ordering::SeqCst);
        }
    }
}

fn until(sign: &AtomicBool) {
    let start = Instant::now();
    while !sign.load(Ordering::SeqCst) {
        assert!(start.elapsed() < Duration::from_secs(20), "the other rank goes on");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a ring in which a rank drops its call. After its own call, rank 0 runs `check` on the remains of its session.
fn ring(ranks: u32, signs: Signs, check: impl Fn(Session, Device) + Sync) {
    let (plans, prepared) = plans_on(CASE, Dtype::F32, Mesh::new(1, ranks).unwrap(), Strategy::Ring);
    let limited = |rank| {
        let options = CudaOptions { max_memory_bytes: Some(LIMIT as u64), ..CudaOptions::default() };
        Device::from(CudaBackend::with_options(rank, &options).unwrap())
    };
    let ranks: Vec<_> = in_process_group(ranks).into_iter().zip((0..).map(limited)).collect();
    let signs = Arc::new(signs);
    std::thread::scope(|scope| {
        for ((transport, device), peers) in ranks.iter().cloned().zip(named(&ranks)) {
            let (signs, plans, prepared, check) = (signs.clone(), &plans, &prepared, &check);
            scope.spawn(move || {
                let rank = transport.rank();
                let run = RunOptions { observer: signs.clone(), ..RunOptions::default() };
                let options = SessionOptions { deadline: DEADLINE, run, ..SessionOptions::default() };
                let mut session = Session::with_collective(transport, device.clone(), peers, options);
                let part = shard(plans.world(), rank, &prepared.tensors).unwrap();
                let mut inputs = block_on(session.load(plans, part)).unwrap();
                let mut call = Box::pin(session.run(plans, &mut inputs));
                if signs.drops == Some(rank) {
                    let mut context = Context::from_waker(Waker::noop());
                    while !signs.posted.load(Ordering::SeqCst) {
                        assert!(call.as_mut().poll(&mut context).is_pending(), "the call has ended");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    // Long enough for the others to send; whoever polls has sent too.
                    for _ in 0..300 {
                        if rank == Rank(0) {
                            assert!(call.as_mut().poll(&mut context).is_pending(), "the call has ended");
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    drop(call);
                } else {
                    let error = block_on(call).unwrap_err().to_string();
                    assert!(error.contains("the call was dropped before its end"), "{error}");
                }
                drop(inputs);
                if rank == Rank(0) {
                    check(session, device);
                    signs.checked.store(true, Ordering::SeqCst);
                } else {
                    // The collective of this rank lives until all is seen.
                    until(&signs.checked);
                }
            });
        }
    });
}

/// All memory of the device can be had again, soon: threads of the other rank may still give it back.
fn is_free(device: &Device) {
    let start = Instant::now();
    while let Err(error) = device.alloc("everything", LIMIT) {
        assert!(start.elapsed() < Duration::from_secs(5), "{error}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn not_taken() {
    let signs = Signs { drops: Some(Rank(1)), ..Signs::default() };
    ring(3, signs, |session, device| {
        is_free(&device);
        drop(session);
    });
}

fn not_asked_for() {
    let signs = Signs { late: Some(Rank(1)), drops: Some(Rank(2)), ..Signs::default() };
    ring(3, signs, |session, device| {
        is_free(&device);
        drop(session);
    });
}

fn withdrawn() {
    let signs = Signs { late: Some(Rank(1)), drops: Some(Rank(0)), ..Signs::default() };
    ring(2, signs, |session, device| {
        drop(session);
        is_free(&device);
    });
}
