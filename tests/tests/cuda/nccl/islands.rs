//! Groups in which some ranks exchange messages by NCCL, and others through the host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::plan::ProvedPlans;
use kyklos::{Dtype, Mesh, Result, RunOptions, Session, Strategy, WireFormat};
use kyklos_backend_suite::{Prepared, RankOutput, Whole};
use kyklos_cuda::{CudaBackend, NcclCollective, NcclDecision, NcclOptions};
use kyklos_oracle::inputs::cases;
use kyklos_transport::{Group, Rank, in_process_group};
use pollster::block_on;

use super::{DEADLINE, run, scenario, session, set};
use crate::scenario::{Ends, HANGS_AFTER, Scenario};

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (ulysses, ring, strategy, dtype, gpus) in [
        (1, 4, Strategy::Ring, Dtype::F32, &[Some(0), None, Some(1), Some(2)][..]),
        (1, 4, Strategy::Ring, Dtype::Bf16, &[None, Some(0), Some(1), None]),
        (1, 3, Strategy::TwoWay, Dtype::F16, &[Some(0), Some(1), None]),
        (1, 3, Strategy::Pipelined, Dtype::F16, &[Some(0), None, Some(1)]),
        (2, 2, Strategy::Unified, Dtype::Bf16, &[Some(0), Some(1), None, Some(2)]),
        (4, 1, Strategy::Ulysses, Dtype::F32, &[None, Some(0), None, Some(1)]),
        (1, 4, Strategy::PassQ, Dtype::F32, &[Some(0), None, Some(1), Some(2)]),
        (1, 4, Strategy::Tree, Dtype::F32, &[Some(0), Some(1), None, Some(2)]),
    ] {
        let kinds: String = gpus.iter().map(|gpu| if gpu.is_some() { 'G' } else { 'C' }).collect();
        let name = format!("{strategy} on {ulysses}x{ring} in {dtype}, ranks on {kinds}");
        all.push(scenario(&name, 3, "delay_us=2000,seed=3", move || {
            let case = if ulysses > 2 { "groups of eight" } else { "two rows beyond four tiles" };
            let on = Ranks { gpus, clusters: |_| 0 };
            same_as_through_the_host(case, dtype, Mesh::new(ulysses, ring).unwrap(), strategy, &on);
        }));
    }
    all.push(scenario("two clusters in a ring of four", 4, "delay_us=2000,seed=5", || {
        let on = Ranks { gpus: &[Some(0), Some(1), Some(2), Some(3)], clusters: |rank| rank % 2 };
        let mesh = Mesh::new(1, 4).unwrap();
        same_as_through_the_host("two rows beyond four tiles", Dtype::Bf16, mesh, Strategy::Ring, &on);
    }));
    all.push(planted());
    all.push(scenario("islands, and the ranks in none", 3, "", islands));
    let mut none = scenario("two ranks of unlike clusters", 2, "", || {
        on_threads(in_process_group(2), |transport| {
            let rank = transport.rank().0;
            let options = NcclOptions { cluster: rank, partial: true, ..options() };
            let decision = block_on(NcclCollective::form(&transport, &gpu(rank), options)).unwrap();
            let NcclDecision::Leave(refusal) = decision else { panic!("{decision:?}") };
            assert_eq!(
                (refusal.rank, refusal.why.as_str()),
                (1, "it is in cluster 1, and rank 0 in cluster 0")
            );
        });
    });
    none.says = &[];
    all.push(none);
    let mut differ = scenario("ranks that do not agree on a partial use", 2, "", || {
        on_threads(in_process_group(2), |transport| {
            let rank = transport.rank().0;
            let options = NcclOptions { partial: rank == 1, ..options() };
            let error = block_on(NcclCollective::form(&transport, &gpu(rank), options)).unwrap_err();
            assert!(error.to_string().contains("rank 1"), "{error}");
        });
    });
    differ.says = &[];
    all.push(differ);
    for (name, nccl) in [
        ("a hang between two of four ranks", "fault_rank=1,hang_at=1"),
        ("an error between two of four ranks", "fault_rank=0,async_at=1"),
        ("a second hang between two of four ranks", "fault_rank=1,hang_at=2"),
    ] {
        all.push(scenario(name, 2, nccl, || {
            let deadline = Duration::from_secs(2);
            let on = Ranks { gpus: &[None, Some(0), Some(1), None], clusters: |_| 0 };
            let start = Instant::now();
            let errors = on.failures(deadline, |_| true);
            // A rank on cores may have had all that it needs.
            for rank in [1, 2] {
                assert!(errors[rank].is_some(), "rank {rank}");
            }
            for error in errors.iter().flatten() {
                assert!(!error.is_request(), "{error}");
            }
            assert!(start.elapsed() < deadline + HANGS_AFTER, "{:?}", start.elapsed());
        }));
    }
    all.push(scenario("a rank outside an island that leaves", 3, "", || {
        let on = Ranks { gpus: &[Some(0), None, Some(1), Some(2)], clusters: |_| 0 };
        let start = Instant::now();
        let errors = on.failures(DEADLINE, |rank| rank != Rank(1));
        for (rank, error) in errors.iter().enumerate().filter(|(rank, _)| *rank != 1) {
            let text = error.as_ref().map(ToString::to_string).unwrap_or_default();
            assert!(text.contains("rank 1"), "rank {rank}: {text}");
        }
        assert!(start.elapsed() < HANGS_AFTER, "{:?}", start.elapsed());
    }));
    all
}

/// Where each rank of a group computes: on this GPU, or on the cores; and its cluster.
struct Ranks<'a> {
    gpus: &'a [Option<usize>],
    clusters: fn(u32) -> u32,
}

fn options() -> NcclOptions {
    NcclOptions { deadline: DEADLINE, partial: true, ..NcclOptions::default() }
}

fn gpu(rank: u32) -> Device {
    Device::from(CudaBackend::new(rank as usize).unwrap())
}

impl Ranks<'_> {
    fn device(&self, rank: Rank) -> Device {
        match self.gpus[rank.0 as usize] {
            Some(gpu) => Device::from(CudaBackend::new(gpu).unwrap()),
            None => Device::cpu(),
        }
    }

    fn session(&self, transport: Group, deadline: Duration) -> Session {
        let rank = transport.rank();
        let options = NcclOptions { cluster: (self.clusters)(rank.0), deadline, ..options() };
        session(transport, self.device(rank), options, RunOptions::default())
    }

    /// The error of each rank in a call that cannot end well for all; a rank that does not `stay`
    /// leaves before it.
    fn failures(&self, deadline: Duration, stays: fn(Rank) -> bool) -> Vec<Option<kyklos::Error>> {
        let (plans, prepared) = super::plans("two rows beyond four tiles", Dtype::F32, 4);
        on_threads(in_process_group(4), |transport| {
            let rank = transport.rank();
            let session = self.session(transport, deadline);
            if stays(rank) { run(session, &plans, &prepared).err() } else { None }
        })
    }
}

/// A group in which messages go both ways has the bytes of the same devices with all messages
/// through the host.
fn same_as_through_the_host(case: &str, dtype: Dtype, mesh: Mesh, strategy: Strategy, on: &Ranks<'_>) {
    let prepared = Prepared::new(cases().into_iter().find(|one| one.name == case).unwrap(), dtype);
    let set = set(&prepared, mesh, strategy, WireFormat::Same);
    let plans = Arc::new(ProvedPlans::new(set.clone()).unwrap());
    let whole = |outputs: Vec<Result<RankOutput>>| {
        let mut whole = Whole::new(&set);
        outputs.into_iter().enumerate().for_each(|(rank, output)| whole.add(&set, rank, &output.unwrap()));
        whole
    };
    let both_ways = whole(on_threads(in_process_group(mesh.size()), |transport| {
        run(on.session(transport, DEADLINE), &plans, &prepared)
    }));
    let through_host = whole(on_threads(in_process_group(mesh.size()), |transport| {
        let device = on.device(transport.rank());
        run(Session::new(transport, device), &plans, &prepared)
    }));
    let backend = CudaBackend::new(0).unwrap();
    let alone =
        block_on(kyklos_backend_suite::run_alone(&backend, &super::dense_set(&prepared.problem), &prepared));
    let limit = prepared.parallel_limit(&prepared.judge(&alone, "fake cuda"));
    prepared.judge(&both_ways, "NCCL and the host").assert_within(&limit);
    assert!(both_ways.o == through_host.o, "{case}: other bytes than through the host");
    let bits = |lse: &[f32]| lse.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&both_ways.lse), bits(&through_host.lse));
}

/// A planted bug: kernels that do not wait for messages by NCCL must be found where messages go
/// both ways too. (That messages do not wait for kernels is found among GPUs only: here copies to
/// the host wait for the same kernels.)
fn planted() -> Scenario {
    let mut planted =
        scenario("kernels that do not wait for messages, both ways, fail the check", 3, "move_ms=20", || {
            let on = Ranks { gpus: &[Some(0), Some(1), None, Some(2)], clusters: |_| 0 };
            let mesh = Mesh::new(2, 2).unwrap();
            same_as_through_the_host("two rows beyond four tiles", Dtype::F32, mesh, Strategy::Unified, &on);
        });
    planted.fake = "devices=3,memory_mb=256,delay_us=5000,seed=1,ignore_nccl_waits=2".to_owned();
    planted.ends = Ends::Failing;
    planted.says = &[];
    planted
}

/// What the ranks are told.
fn islands() {
    let on = Ranks { gpus: &[Some(0), None, Some(1), Some(2)], clusters: |rank| u32::from(rank == 3) };
    on_threads(in_process_group(4), |transport| {
        let rank = transport.rank();
        let options = NcclOptions { cluster: (on.clusters)(rank.0), ..options() };
        let decision = block_on(NcclCollective::form(&transport, &on.device(rank), options)).unwrap();
        let NcclDecision::Use(nccl) = decision else { panic!("{decision:?}") };
        let islands: Vec<_> = nccl.islands().iter().map(ToString::to_string).collect();
        assert_eq!(islands, ["NCCL 2.21.5 between ranks 0, 2"]);
        let outside: Vec<_> = nccl.outside().iter().map(|one| (one.rank, one.why.as_str())).collect();
        assert_eq!(outside[1], (3, "no other rank of cluster 1 has NCCL 2.21.5"));
        assert!(outside[0].0 == 1 && outside[0].1.contains("not a CUDA device"), "{outside:?}");
    });
}
