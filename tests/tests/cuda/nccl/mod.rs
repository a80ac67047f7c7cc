//! Ranks with a device each that exchange their messages by NCCL: the fake NCCL on the fake driver.

mod ahead;
mod faults;
mod islands;
mod wishes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::host::shard;
use kyklos::local::on_threads;
use kyklos::plan::{PlanSet, ProvedPlans};
use kyklos::{
    Dtype, Execution, Mesh, Placement, PlacementKind, Result, RunOptions, Session, SessionOptions, Split,
    Strategy, WireFormat, plan_forward,
};
use kyklos_backend_suite::{GradientCase, Prepared, RankOutput, Whole, attend_planned, dense_set, run_alone};
use kyklos_cuda::{CudaBackend, NcclCollective, NcclDecision, NcclOptions, NcclRefusal};
use kyklos_oracle::inputs::cases;
use kyklos_transport::{Group, in_process_group};
use pollster::block_on;

use crate::gradients::prepared::{OnSessions, Sharing};
use crate::scenario::{Ends, HANGS_AFTER, Scenario};

/// Long enough for a loaded machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn scenarios() -> Vec<Scenario> {
    [
        right(),
        planted(),
        decisions(),
        ahead::scenarios(),
        islands::scenarios(),
        wishes::scenarios(),
        faults::scenarios(),
    ]
    .concat()
}

/// A scenario on `ranks` devices, with settings of the fake NCCL.
fn scenario(name: &str, ranks: u32, nccl: &str, run: impl Fn() + Send + Sync + 'static) -> Scenario {
    let mut scenario = Scenario::new(
        &format!("NCCL: {name}"),
        &format!("devices={ranks},memory_mb=256,delay_us=1000,seed={ranks}"),
        run,
    );
    scenario.nccl = if nccl.is_empty() { "report=1".to_owned() } else { format!("report=1,{nccl}") };
    scenario.says = &["fake NCCL: "];
    scenario
}

fn right() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (ulysses, ring, strategy, dtype) in [
        (1, 2, Strategy::Ring, Dtype::F32),
        (1, 8, Strategy::Ring, Dtype::Bf16),
        (4, 1, Strategy::Ulysses, Dtype::F32),
        (2, 3, Strategy::Unified, Dtype::Bf16),
        (1, 3, Strategy::TwoWay, Dtype::F16),
        (1, 3, Strategy::Pipelined, Dtype::Bf16),
        (1, 4, Strategy::PassQ, Dtype::F32),
        (1, 4, Strategy::Tree, Dtype::F32),
    ] {
        let ranks = ulysses * ring;
        let name =
            format!("{strategy} on {ulysses}x{ring} in {dtype}, the bytes of messages through the host");
        let nccl = format!("seed={ranks},delay_us=2000");
        all.push(scenario(&name, ranks, &nccl, move || {
            let mesh = Mesh::new(ulysses, ring).unwrap();
            let long = if ulysses > 2 { "groups of eight" } else { "two rows beyond four tiles" };
            for case in [long, "bias, softcap and sinks"] {
                same_as_through_the_host(case, dtype, mesh, strategy, WireFormat::Same);
            }
        }));
    }
    all.push(scenario("int8 on the wire", 3, "seed=4", || {
        let mesh = Mesh::new(1, 3).unwrap();
        let case = "two rows beyond four tiles";
        same_as_through_the_host(case, Dtype::Bf16, mesh, Strategy::Ring, WireFormat::Int8);
    }));
    for (ulysses, ring, strategy) in [(1, 4, Strategy::Ring), (2, 2, Strategy::Unified)] {
        let name = format!("gradients by {strategy} on {ulysses}x{ring}");
        all.push(scenario(&name, ulysses * ring, "seed=6", move || gradients(ulysses, ring, strategy)));
    }
    all.push(scenario("many calls after another, by one communicator", 3, "delay_us=100", || {
        let (plans, prepared) = plans("two rows beyond four tiles", Dtype::Bf16, 3);
        let outputs = on_devices(3, |mut session| {
            let part = shard(plans.set(), session.rank(), &prepared.tensors).unwrap();
            let all: Vec<_> = (0..20)
                .map(|_| block_on(attend_planned(&mut session, &plans, &part)).unwrap())
                .map(|output| output.o)
                .collect();
            assert!(all.iter().all(|o| *o == all[0]), "a call has other bytes");
        });
        assert_eq!(outputs.len(), 3);
    }));
    all
}

/// Planted bugs: a stream that does not wait must be found.
fn planted() -> Vec<Scenario> {
    // Messages that move at once find kernels that are not done; kernels find messages that move late.
    let bugs = [
        ("messages that do not wait for kernels", "delay_us=0", 20_000),
        ("kernels that do not wait for messages", "move_ms=20", 5000),
    ];
    let mut all = Vec::new();
    for (bit, (name, nccl, delay_us)) in bugs.into_iter().enumerate() {
        for seed in 1..=2 {
            let mut planted = scenario(&format!("{name} fail the check, seed {seed}"), 4, nccl, || {
                let mesh = Mesh::new(2, 2).unwrap();
                let case = "two rows beyond four tiles";
                same_as_through_the_host(case, Dtype::F32, mesh, Strategy::Unified, WireFormat::Same);
            });
            planted.fake = format!(
                "devices=4,memory_mb=256,delay_us={delay_us},seed={seed},ignore_nccl_waits={}",
                1 << bit
            );
            planted.ends = Ends::Failing;
            planted.says = &[];
            all.push(planted);
        }
    }
    all
}

/// When NCCL is not used, and why.
fn decisions() -> Vec<Scenario> {
    let on = |device: fn(u32) -> Device, options: NcclOptions| {
        let refusals = on_threads(in_process_group(2), |transport| {
            let device = device(transport.rank().0);
            let decision = block_on(NcclCollective::form(&transport, &device, options)).unwrap();
            // The group still works.
            let session = Session::new(transport.clone(), device);
            let vote = block_on(transport.agree(kyklos_transport::Vote::ready([1; 32]), DEADLINE));
            assert_eq!(vote.unwrap().len(), 2);
            drop(session);
            match decision {
                NcclDecision::Leave(refusal) => refusal,
                NcclDecision::Use(nccl) => panic!("{nccl:?}"),
            }
        });
        assert_eq!(refusals[0], refusals[1]);
        refusals[0].clone()
    };
    let cuda = |rank: u32| Device::from(CudaBackend::new(rank as usize).unwrap());
    let refused = move |name: &str,
                        nccl: &str,
                        device: fn(u32) -> Device,
                        options: NcclOptions,
                        rank: Option<u32>,
                        why: &'static str| {
        let mut scenario = scenario(name, 2, nccl, move || {
            let start = Instant::now();
            let NcclRefusal { rank: of, why: text, .. } = on(device, options);
            assert!(rank.is_none_or(|rank| rank == of) && text.contains(why), "rank {of}: {text}");
            // Long before the time to form is over, unless the ranks are to wait for that.
            assert!(start.elapsed() < HANGS_AFTER, "{:?}: {text}", start.elapsed());
        });
        scenario.says = &[];
        scenario
    };
    let options = NcclOptions { deadline: DEADLINE, ..NcclOptions::default() };
    let crossed = NcclOptions { min_blocks: Some(8), max_blocks: Some(4), ..options };
    let hasty = NcclOptions { form_within: Duration::from_secs(2), ..options };
    let mixed =
        |rank: u32| if rank == 1 { Device::cpu() } else { Device::from(CudaBackend::new(0).unwrap()) };
    let one = |_: u32| Device::from(CudaBackend::new(0).unwrap());
    let failing = "fault_rank=1,init_fails=1,code=2,delay_us=900000";
    let mut told =
        scenario("a communicator that fails late on one of three ranks", 3, failing, a_failure_is_told);
    told.says = &["3 communicators aborted"];
    vec![
        refused("a rank on another device", "", mixed, options, Some(1), "not a CUDA device"),
        refused(
            "an old library",
            "version=21703",
            cuda,
            options,
            Some(0),
            "its version is 2.17.3, the oldest that works is 2.18.0",
        ),
        refused(
            "no name for a communicator",
            "id_fails=1",
            cuda,
            options,
            Some(0),
            "ncclGetUniqueId: unhandled system error (2)",
        ),
        refused(
            "fewer blocks than the fewest",
            "",
            cuda,
            crossed,
            None,
            "make a communicator of NCCL failed: ncclCommInitRankConfig: invalid argument (4)",
        ),
        refused("two ranks on a device", "", one, options, None, "invalid usage (5): Duplicate GPU detected"),
        refused(
            "a communicator that fails on rank 1",
            "fault_rank=1,init_fails=1,code=2",
            cuda,
            options,
            Some(1),
            "told to fail during the initialisation",
        ),
        refused(
            "a communicator that is never ready on rank 1",
            "fault_rank=1,init_hangs=1",
            cuda,
            hasty,
            None,
            "the ranks had not met after",
        ),
        told,
    ]
}

/// One of three ranks fails after a while, and nobody waits for the other two, whose communicators
/// are never ready by themselves.
fn a_failure_is_told() {
    let options = NcclOptions { deadline: DEADLINE, ..NcclOptions::default() };
    let start = Instant::now();
    let refusals = on_threads(in_process_group(3), |transport| {
        let device = Device::from(CudaBackend::new(transport.rank().0 as usize).unwrap());
        match block_on(NcclCollective::form(&transport, &device, options)).unwrap() {
            NcclDecision::Leave(refusal) => refusal,
            NcclDecision::Use(nccl) => panic!("{nccl:?}"),
        }
    });
    for refusal in &refusals {
        assert!(refusal.rank == 1 && refusal.why.contains("unhandled system error (2)"), "{refusal}");
    }
    assert!(start.elapsed() < HANGS_AFTER, "{:?}", start.elapsed());
}

/// Plans of a ring, with uneven shares.
fn plans(case: &str, dtype: Dtype, ranks: u32) -> (Arc<ProvedPlans>, Prepared) {
    plans_on(case, dtype, Mesh::new(1, ranks).unwrap(), Strategy::Ring)
}

/// Plans with uneven shares.
pub(crate) fn plans_on(
    case: &str,
    dtype: Dtype,
    mesh: Mesh,
    strategy: Strategy,
) -> (Arc<ProvedPlans>, Prepared) {
    let prepared = Prepared::new(cases().into_iter().find(|one| one.name == case).unwrap(), dtype);
    let set = set(&prepared, mesh, strategy, WireFormat::Same);
    (Arc::new(ProvedPlans::new(set).unwrap()), prepared)
}

fn set(prepared: &Prepared, mesh: Mesh, strategy: Strategy, wire: WireFormat) -> PlanSet {
    // For both passes.
    let problem = prepared.problem.clone().with_inference(false).with_wire(wire).unwrap();
    // The last rank has the most tokens.
    let weights = (0..mesh.size()).map(|rank| f64::from(rank % 3 + 1)).collect();
    plan_forward(&problem, mesh, PlacementKind::Zigzag, &Split::Weights(weights), strategy).unwrap()
}

/// A session of a rank with a device of its own, which uses NCCL.
fn session(transport: Group, device: Device, options: NcclOptions, run: RunOptions) -> Session {
    match block_on(NcclCollective::form(&transport, &device, options)).unwrap() {
        NcclDecision::Use(nccl) => {
            let NcclOptions { deadline, .. } = options;
            let options = SessionOptions { deadline, run, ..SessionOptions::default() };
            Session::with_collective(transport, device, nccl, options)
        }
        NcclDecision::Leave(refusal) => panic!("{refusal}"),
    }
}

/// Runs ranks, each on a thread with a device of its own, by NCCL.
fn on_devices<T: Send>(ranks: u32, run: impl Fn(Session) -> T + Sync) -> Vec<T> {
    on_threads(in_process_group(ranks), |transport| {
        let device = Device::from(CudaBackend::new(transport.rank().0 as usize).unwrap());
        run(session(
            transport,
            device,
            NcclOptions { deadline: DEADLINE, ..NcclOptions::default() },
            RunOptions::default(),
        ))
    })
}

fn run(mut session: Session, plans: &Arc<ProvedPlans>, prepared: &Prepared) -> Result<RankOutput> {
    let part = shard(plans.set(), session.rank(), &prepared.tensors)?;
    let output = block_on(attend_planned(&mut session, plans, &part))?;
    // The recorder of a rank has its messages, in whichever way they went.
    let peers = session.group().recorder().peers();
    let [sent, messages] = [
        peers.iter().map(|peer| peer.bytes_sent).sum(),
        peers.iter().map(|peer| peer.messages_sent).sum::<u64>(),
    ];
    assert_eq!((sent, messages), (output.report.bytes_sent, output.report.messages_sent));
    assert!(peers.iter().map(|peer| peer.messages_received).sum::<u64>() > 0);
    Ok(output)
}

/// The result by NCCL is right, and has the bytes of the result whose messages went through the
/// host.
fn same_as_through_the_host(case: &str, dtype: Dtype, mesh: Mesh, strategy: Strategy, wire: WireFormat) {
    let prepared = Prepared::new(cases().into_iter().find(|one| one.name == case).unwrap(), dtype);
    let set = set(&prepared, mesh, strategy, wire);
    let plans = Arc::new(ProvedPlans::new(set.clone()).unwrap());
    let by_nccl = on_devices(mesh.size(), |session| run(session, &plans, &prepared).unwrap());
    let through_host = on_threads(in_process_group(mesh.size()), |transport| {
        let device = Device::from(CudaBackend::new(transport.rank().0 as usize).unwrap());
        run(Session::new(transport, device), &plans, &prepared).unwrap()
    });
    let [mut whole, mut other] = [Whole::new(&set), Whole::new(&set)];
    for (rank, outputs) in by_nccl.iter().zip(&through_host).enumerate() {
        whole.add(&set, rank, outputs.0);
        other.add(&set, rank, outputs.1);
        let counted = |output: &RankOutput| (output.report.bytes_sent, output.report.messages_sent);
        assert_eq!(counted(outputs.0), counted(outputs.1));
    }
    if wire == WireFormat::Same {
        let backend = CudaBackend::new(0).unwrap();
        let alone = block_on(run_alone(&backend, &dense_set(&prepared.problem), &prepared));
        let limit = prepared.parallel_limit(&prepared.judge(&alone, "fake cuda"));
        prepared.judge(&whole, "fake cuda, NCCL").assert_within(&limit);
    }
    assert!(whole.o == other.o, "{case}: other bytes than through the host");
    let bits = |lse: &[f32]| lse.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&whole.lse), bits(&other.lse));
}

fn gradients(ulysses: u32, ring: u32, strategy: Strategy) {
    let mesh = Mesh::new(ulysses, ring).unwrap();
    gradients_on(in_process_group(mesh.size()), mesh, strategy, |transport| {
        let device = Device::from(CudaBackend::new(transport.rank().0 as usize).unwrap());
        let options = NcclOptions { deadline: DEADLINE, ..NcclOptions::default() };
        session(transport, device, options, RunOptions::default())
    });
}

/// The gradients of sessions are right, and have the bytes of those whose messages go through the
/// host.
pub(crate) fn gradients_on(
    group: Vec<Group>,
    mesh: Mesh,
    strategy: Strategy,
    session: impl Fn(Group) -> Session + Sync,
) {
    let case = cases().into_iter().find(|case| case.name == "two rows beyond four tiles").unwrap();
    let case = GradientCase::new(case, Dtype::F32);
    let problem = &case.prepared.problem;
    let sharing = |mesh: Mesh, strategy| {
        let place = |total| Placement::new(PlacementKind::Zigzag, mesh, total, &Split::Even).unwrap();
        Sharing {
            mesh,
            q: place(problem.q_len),
            kv: place(problem.kv_len),
            forward: strategy,
            execution: Execution::new().strategy(strategy),
            device: Device::from(CudaBackend::new(0).unwrap()),
        }
    };
    let alone = case.run(in_process_group(1), &sharing(Mesh::new(1, 1).unwrap(), Strategy::Dense));
    let shared = sharing(mesh, strategy);
    let found = case.gradients_on(group, &shared, session);
    for (error, limit) in case.judge(&found).iter().zip(case.parallel_limits(&alone)) {
        error.within(&limit).unwrap();
    }
    let through_host = case.gradients(in_process_group(mesh.size()), &shared);
    let bits = |all: &[Vec<f64>]| -> Vec<Vec<u64>> {
        all.iter().map(|gradient| gradient.iter().map(|x| x.to_bits()).collect()).collect()
    };
    assert!(bits(&found) == bits(&through_host), "other bytes than through the host");
}
