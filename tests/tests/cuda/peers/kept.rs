//! Messages that nobody takes are freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use kyklos::backend::{Backend, Device};
use kyklos::host::shard;
use kyklos::{Dtype, Mesh, Observer, RunOptions, Session, SessionOptions, Strategy};
use kyklos_backend_suite::attend_planned;
use kyklos_cuda::{CudaBackend, CudaOptions};
use kyklos_transport::{Rank, in_process_group};
use pollster::block_on;

use super::{CASE, DEADLINE, named, plans_on, scenario};
use crate::scenario::{HANGS_AFTER, Scenario};

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
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
        assert!(start.elapsed() < HANGS_AFTER, "the other rank goes on");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a ring in which a rank drops its call. After its own call, rank 0 runs `check` on the
/// remains of its session.
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
                let part = shard(plans.set(), rank, &prepared.tensors).unwrap();
                let mut call = Box::pin(attend_planned(&mut session, plans, &part));
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

/// All memory of the device can be had again, soon: threads of the other rank may still give it
/// back.
fn is_free(device: &Device) {
    let start = Instant::now();
    while let Err(error) = device.alloc("everything", LIMIT) {
        assert!(start.elapsed() < HANGS_AFTER, "{error}");
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
