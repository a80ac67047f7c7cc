//! Faults of NCCL: every rank ends with an error that names the cause, in time, and the group can
//! form again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::host::shard;
use kyklos::local::on_threads;
use kyklos::plan::ProvedPlans;
use kyklos::{
    Dtype, Error, Mesh, Observer, Output, Result, RunOptions, Saved, Session, Strategy, plan_backward_placed,
};
use kyklos_backend_suite::{Prepared, RankOutput, attend_planned, planned};
use kyklos_cuda::{CudaBackend, CudaOptions, NcclOptions};
use kyklos_transport::{Group, Rank, Regroup, in_process_group};
use pollster::block_on;

use super::{DEADLINE, plans, plans_on, run, session};
use crate::scenario::{HANGS_AFTER, Scenario};

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    // The settings of the fault, and what some rank must say.
    let faults: [(&str, &str, &[&str]); 6] = [
        ("a group that hangs", "hang_at=1", &["no rank is known to have died"]),
        (
            "an error that NCCL finds later",
            "async_at=1,code=6",
            &[
                "cuda:1",
                "ncclCommGetAsyncError: remote process exited or there was a network error (6): told to fail",
            ],
        ),
        (
            "an error that NCCL finds between two calls",
            "use_at=1,code=6",
            &[
                "cuda:1",
                "ncclCommGetAsyncError: remote process exited or there was a network error (6): told to fail",
            ],
        ),
        ("a group that is refused", "refuse_at=1,code=4", &["ncclGroupEnd: invalid argument (4)"]),
        (
            "a group that fails while it is launched",
            "launch_fails_at=1,code=1",
            &["unhandled cuda error (1)"],
        ),
        (
            "a group that takes longer than the deadline",
            "slow_at=1,slow_ms=3500",
            &["no rank is known to have died"],
        ),
    ];
    for ranks in [2, 3, 8] {
        for (name, fault, says) in faults {
            let nccl = format!("fault_rank=1,{fault}");
            all.push(super::scenario(&format!("{name}, {ranks} ranks"), ranks, &nccl, move || {
                fails(ranks, says)
            }));
        }
    }
    // The second exchange: attention waits for it on the device.
    let later: [(&str, &str, &[&str]); 2] = [
        ("a second group that hangs", "hang_at=2", &["no rank is known to have died"]),
        ("a second group that fails", "async_at=2", &["internal error (3)"]),
    ];
    for (name, fault, says) in later {
        let nccl = format!("fault_rank=1,{fault}");
        all.push(super::scenario(name, 4, &nccl, move || fails(4, says)));
    }
    for (ulysses, ring, strategy, case) in
        [(4, 1, Strategy::Ulysses, "groups of eight"), (2, 2, Strategy::Unified, CASE)]
    {
        for (name, fault, says) in [later[0], ("a first group that fails", "async_at=1", later[1].2)] {
            let ranks = ulysses * ring;
            let name = format!("{name}, {strategy} on {ulysses}x{ring}");
            all.push(super::scenario(&name, ranks, &format!("fault_rank=1,{fault}"), move || {
                let plans = plans_on(case, Dtype::Bf16, Mesh::new(ulysses, ring).unwrap(), strategy);
                let deadline = deadline(says);
                judge(&failures(&plans, deadline), deadline, says);
            }));
        }
    }
    // In the third and last one a rank may already have all that it needs.
    for at in 1..=2 {
        let name = format!("group {at} that hangs on rank 2 of 4 names all whom a rank waits for");
        all.push(super::scenario(&name, 4, &format!("fault_rank=2,hang_at={at}"), late));
    }
    // The forward pass of a ring of 3 has 2 groups.
    all.push(super::scenario("a backward pass that hangs", 3, "fault_rank=1,hang_at=4", backward));
    all.push(super::scenario("a delay within the deadline", 3, "fault_rank=1,slow_at=1,slow_ms=700", || {
        let (plans, prepared) = plans(CASE, Dtype::F32, 3);
        super::on_devices(3, |session| run(session, &plans, &prepared).unwrap());
    }));
    all.push(super::scenario("every group takes a while to be launched", 3, "launch_ms=60", || {
        let (plans, prepared) = plans(CASE, Dtype::F32, 3);
        super::on_devices(3, |session| run(session, &plans, &prepared).unwrap());
    }));
    let mut slow = super::scenario(
        "an abort that takes long does not keep a rank",
        2,
        "fault_rank=1,hang_at=1,abort_ms=4500",
        || {
            let (plans, deadline) = (plans(CASE, Dtype::F32, 2), Duration::from_secs(1));
            let errors = failures(&plans, deadline);
            assert_eq!(errors.len(), 2);
            // Two aborts of 4.5 s go on in their threads. A rank that waits for its own ends after them.
            for (took, error) in errors {
                assert!(took < deadline + Duration::from_millis(4500), "{took:?}: {error}");
            }
        },
    );
    slow.says = &[];
    all.push(slow);
    all.push(super::scenario(
        "a communicator that does not end is aborted",
        2,
        "fault_rank=1,finalize_hangs=1",
        || {
            let (plans, prepared) = plans(CASE, Dtype::F32, 2);
            let start = Instant::now();
            super::on_devices(2, |session| run(session, &plans, &prepared).unwrap());
            // The thread of the communicator goes on.
            assert!(start.elapsed() < Duration::from_secs(9), "{:?}", start.elapsed());
            std::thread::sleep(Duration::from_secs(11));
        },
    ));
    all.push(super::scenario("a call that is dropped ends the messages of all", 3, "", dropped));
    let long = "fault_rank=1,slow_at=1,slow_ms=4000";
    all.push(super::scenario(
        "a message that is under way for longer than a kernel may hang",
        2,
        long,
        patient,
    ));
    let once = "fault_rank=1,faulty_communicators=1,hang_at=2";
    all.push(super::scenario("after a fault the group forms again, and so does NCCL", 3, once, again));
    all
}

const CASE: &str = "two rows beyond four tiles";

fn on_own_device(transport: &Group, deadline: Duration, run: RunOptions) -> Session {
    let device = Device::from(CudaBackend::new(transport.rank().0 as usize).unwrap());
    session(transport.clone(), device, NcclOptions { deadline, ..NcclOptions::default() }, run)
}

/// The errors of all ranks of a group with a fault, and how long each took.
fn failures((plans, prepared): &(Arc<ProvedPlans>, Prepared), deadline: Duration) -> Vec<(Duration, Error)> {
    on_threads(in_process_group(plans.set().mesh.size()), |transport| {
        let session = on_own_device(&transport, deadline, RunOptions::default());
        let start = Instant::now();
        let ended: Result<RankOutput> = run(session, plans, prepared);
        (start.elapsed(), ended.unwrap_err())
    })
}

/// Some rank says each of `says`, and every rank has ended soon after the deadline.
fn judge(errors: &[(Duration, Error)], deadline: Duration, says: &[&str]) {
    let texts: Vec<String> = errors.iter().map(|(_, error)| error.to_string()).collect();
    for words in says {
        assert!(texts.iter().any(|text| text.contains(words)), "{words}: {texts:#?}");
    }
    for (took, error) in errors {
        assert!(!error.is_request(), "{error}");
        assert!(*took < deadline + HANGS_AFTER, "{took:?}: {error}");
    }
}

/// Of exchanges: short where one must be late, and else so long that none of them is late on a
/// loaded machine.
fn deadline(says: &[&str]) -> Duration {
    let hangs = says.contains(&"no rank is known to have died");
    Duration::from_secs(if hangs { 2 } else { 60 })
}

fn fails(ranks: u32, says: &[&str]) {
    let deadline = deadline(says);
    judge(&failures(&plans(CASE, Dtype::F32, ranks), deadline), deadline, says);
}

/// In a ring all wait for each other, so the first one to notice may be any. Its error names both
/// its neighbours.
fn late() {
    let deadline = Duration::from_secs(2);
    let errors = failures(&plans(CASE, Dtype::F32, 4), deadline);
    judge(&errors, deadline, &[]);
    let neighbours = ["with ranks 1, 3 had not ended", "with ranks 0, 2 had not ended"];
    for (_, error) in &errors {
        let text = error.to_string();
        assert!(neighbours.iter().any(|words| text.contains(words)), "{text}");
        assert!(text.contains("which of these ranks is the cause is not known"), "{text}");
        assert!(!text.contains("receive from"), "{text}");
    }
}

/// The forward pass is right; the backward pass ends with an error on every rank.
fn backward() {
    let deadline = Duration::from_secs(8);
    let (forward, prepared) = plans(CASE, Dtype::F32, 3);
    let set = forward.set();
    let backward = plan_backward_placed(
        &set.problem,
        set.mesh,
        set.q_placement.clone(),
        set.kv_placement.clone(),
        Strategy::Ring,
    );
    let backward = Arc::new(ProvedPlans::new(backward.unwrap()).unwrap());
    let errors = on_threads(in_process_group(3), |transport| {
        let mut session = on_own_device(&transport, deadline, RunOptions::default());
        let part = shard(set, transport.rank(), &prepared.tensors).unwrap();
        let [q, k, v] = part.qkv(&set.problem).unwrap();
        let Output { o, lse, .. } = session.attend(&planned(&forward, &part), &q, &k, &v).unwrap();
        let (d_o, saved) = (o.clone(), Saved { q, k, v, o, lse });
        let start = Instant::now();
        let ended = session.backward(&planned(&backward, &part), &saved, &d_o, None);
        (start.elapsed(), ended.unwrap_err())
    });
    judge(&errors, deadline, &["no rank is known to have died"]);
}

/// The devices complete nothing for 4 s, and would count as lost after 1.5 s without messages under
/// way.
fn patient() {
    let (plans, prepared) = plans(CASE, Dtype::F32, 2);
    on_threads(in_process_group(2), |transport| {
        let options = CudaOptions { stuck_after: Duration::from_millis(1500), ..CudaOptions::default() };
        let ordinal = transport.rank().0 as usize;
        let device = Device::from(CudaBackend::with_options(ordinal, &options).unwrap());
        let options = NcclOptions { deadline: DEADLINE, ..NcclOptions::default() };
        run(session(transport, device, options, RunOptions::default()), &plans, &prepared).unwrap();
    });
}

/// Rank 1 drops its call after it has posted its first exchange.
fn dropped() {
    let start = Instant::now();
    let (plans, prepared) = plans(CASE, Dtype::F32, 3);
    let observer = Arc::new(Steps::default());
    let errors = on_threads(in_process_group(3), |transport| {
        let run_options = RunOptions { observer: observer.clone(), ..RunOptions::default() };
        let mut session = on_own_device(&transport, DEADLINE, run_options);
        if transport.rank().0 != 1 {
            return Some(run(session, &plans, &prepared).unwrap_err());
        }
        let part = shard(plans.set(), Rank(1), &prepared.tensors).unwrap();
        let mut call = Box::pin(attend_planned(&mut session, &plans, &part));
        let mut context = Context::from_waker(Waker::noop());
        while !observer.0.load(Ordering::Relaxed) {
            assert!(call.as_mut().poll(&mut context).is_pending(), "the call has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    });
    for error in [&errors[0], &errors[2]] {
        let text = error.as_ref().unwrap().to_string();
        assert!(text.contains("rank 1 failed: the call was dropped before its end"), "{text}");
    }
    assert!(start.elapsed() < HANGS_AFTER, "{:?}", start.elapsed());
}

/// Whether rank 1 has come to its second step.
#[derive(Debug, Default)]
struct Steps(AtomicBool);

impl Observer for Steps {
    fn step(&self, rank: Rank, _: u64, step: usize, _: usize, _: &dyn Fn() -> String) {
        if (rank, step) == (Rank(1), 1) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// The second group of rank 1 hangs. The next group of the same ranks gets a communicator of its
/// own.
fn again() {
    let (plans, prepared) = plans(CASE, Dtype::F32, 3);
    on_threads(in_process_group(3), |transport| {
        let first = on_own_device(&transport, Duration::from_secs(2), RunOptions::default());
        let error = run(first, &plans, &prepared).unwrap_err();
        assert!(matches!(error, Error::Group { .. }), "{error:?}");
        let next = block_on(transport.reform(Regroup::Survivors, DEADLINE)).unwrap();
        assert_eq!((next.members.len(), next.epoch), (3, 1));
        run(on_own_device(&next, DEADLINE, RunOptions::default()), &plans, &prepared).unwrap();
        let _ = block_on(next.close(DEADLINE));
    });
}
