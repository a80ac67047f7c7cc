//! Calls whose future is dropped before its end: the peers get an error at once.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::host::shard;
use kyklos::local::on_threads;
use kyklos::plan::ProvedPlans;
use kyklos::{
    Attention, Dtype, Mesh, Observer, PlacementKind, RunOptions, Session, SessionOptions, Split, Strategy,
    plan_forward,
};
use kyklos_oracle::inputs::cases;
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Group, Rank, in_process_group};

use super::made_up;
use kyklos_backend_suite::{Prepared, attend_planned};

/// Far below the deadline of a session, which is 60 s.
const SOON: Duration = Duration::from_secs(20);

/// Polls `future` up to `polls` times, with time for the peers in between; then drops it. `Some` if
/// it has ended.
fn poll_and_drop<T>(future: impl Future<Output = T>, polls: usize) -> Option<T> {
    let mut future = pin!(future);
    for _ in 0..polls {
        if let std::task::Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return Some(value);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

fn groups(ranks: u32) -> [Vec<Group>; 2] {
    [in_process_group(ranks), quic_loopback_group(ranks).unwrap()]
}

#[test]
fn a_dropped_call_ends_the_group_for_all_ranks_at_once_and_an_unpolled_one_does_nothing() {
    let drops = AtomicU32::new(0);
    for polls in 0..4 {
        for group in groups(2) {
            on_threads(group, |transport| {
                let mut session = Session::new(transport, Device::cpu());
                let x = made_up(40, 2, 0.1);
                let call = Attention::new();
                let first = match session.rank() {
                    Rank(1) => poll_and_drop(session.attend_async(&call, &x, &x, &x), polls),
                    _ if polls == 0 => None,
                    // A rank that has all messages can end the call although a peer drops it then.
                    _ => Some(session.attend(&call, &x, &x, &x)),
                };
                let dropped = polls > 0 && first.is_none();
                let started = Instant::now();
                let next = session.attend(&call, &x, &x, &x);
                assert!(started.elapsed() < SOON);
                match next {
                    Ok(_) => assert!(!dropped),
                    Err(error) => {
                        let error = error.to_string();
                        assert!(
                            polls > 0 && error.contains("rank 1 failed: the call was dropped"),
                            "{error}"
                        );
                        drops.fetch_add(u32::from(dropped), Ordering::Relaxed);
                    }
                }
            });
        }
    }
    assert!(drops.into_inner() > 0);
}

#[test]
fn a_panic_during_a_call_ends_the_group_although_the_transport_lives_on() {
    #[derive(Debug)]
    struct Panics;
    impl Observer for Panics {
        fn step(&self, rank: Rank, _: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
            assert!((rank, step) != (Rank(1), 0), "planted");
        }
    }
    on_threads(in_process_group(2), |transport| {
        let run = RunOptions { observer: Arc::new(Panics), ..Default::default() };
        let options = SessionOptions { run, ..SessionOptions::default() };
        let mut session = Session::with_options(transport.clone(), Device::cpu(), options);
        let x = made_up(40, 2, 0.1);
        let attend = || session.attend(&Attention::new(), &x, &x, &x).map(|_| ());
        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(attend)) {
            Err(_) => assert_eq!(transport.rank(), Rank(1)),
            Ok(ended) => assert!(ended.unwrap_err().to_string().contains("rank 1 failed: the rank panicked")),
        }
    });
}

/// Keeps rank 0 in its first step until rank 2 has dropped its run: all ranks but rank 0 need the
/// keys of rank 0.
#[derive(Debug, Default)]
struct Holds(AtomicBool);

impl Observer for Holds {
    fn step(&self, rank: Rank, _: u64, _: usize, _: usize, _: &dyn Fn() -> String) {
        while rank == Rank(0) && !self.0.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Three ranks; rank 2 drops its call of given plans. All ranks can make it again in another group.
#[test]
fn a_dropped_call_of_given_plans_is_told_and_can_be_made_again() {
    let case = cases().into_iter().find(|case| case.name == "two rows beyond four tiles").unwrap();
    let prepared = Prepared::new(case, Dtype::F32);
    let mesh = Mesh::new(1, 3).unwrap();
    let set = plan_forward(&prepared.problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring)
        .unwrap();
    let plans = Arc::new(ProvedPlans::new(set).unwrap());
    let device = Device::cpu();
    for polls in 1..4 {
        for group in groups(3) {
            let (again, holds) = (in_process_group(3), Arc::new(Holds::default()));
            on_threads(group, |transport| {
                let rank = transport.rank();
                let run = RunOptions { observer: holds.clone(), ..RunOptions::default() };
                let options = SessionOptions { run, ..SessionOptions::default() };
                let mut session = Session::with_options(transport, device.clone(), options);
                let part = shard(plans.set(), rank, &prepared.tensors).unwrap();
                let started = Instant::now();
                let first = match rank {
                    Rank(2) => {
                        let ended = poll_and_drop(attend_planned(&mut session, &plans, &part), polls);
                        holds.0.store(true, Ordering::Release);
                        ended
                    }
                    _ => Some(pollster::block_on(attend_planned(&mut session, &plans, &part))),
                };
                assert!(started.elapsed() < SOON);
                assert_eq!(first.is_none(), rank == Rank(2));
                if let Some(first) = first {
                    let error = first.unwrap_err().to_string();
                    assert!(error.contains("rank 2 failed: the call was dropped"), "{error}");
                }
                let mut fresh = Session::new(again[rank.0 as usize].clone(), device.clone());
                pollster::block_on(attend_planned(&mut fresh, &plans, &part)).unwrap();
                fresh.close(SOON).unwrap();
            });
        }
    }
}
