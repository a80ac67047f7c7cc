//! Ranks of one process with a CUDA device each, without NCCL: messages are copies from device to
//! device.

mod apart;
mod copies;
mod given_back;
mod kept;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::collective::Collective;
use kyklos::host::shard;
use kyklos::plan::ProvedPlans;
use kyklos::{Dtype, Mesh, Result, Session, SessionOptions, Strategy};
use kyklos_backend_suite::{Prepared, RankOutput, Whole, attend_planned};
use kyklos_cuda::{CudaBackend, CudaOptions, CudaPeers};
use kyklos_oracle::inputs::cases;
use kyklos_transport::{Group, in_process_group};
use pollster::block_on;

use crate::nccl::{DEADLINE, gradients_on, plans_on};
use crate::scenario::{Ends, Scenario};

const CASE: &str = "two rows beyond four tiles";

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for (ulysses, ring, strategy, dtype, here) in [
        (1, 2, Strategy::Ring, Dtype::F32, 2),
        (1, 4, Strategy::Ring, Dtype::Bf16, 4),
        (4, 1, Strategy::Ulysses, Dtype::F32, 4),
        (2, 2, Strategy::Unified, Dtype::Bf16, 4),
        (1, 3, Strategy::TwoWay, Dtype::F16, 3),
        (1, 3, Strategy::Pipelined, Dtype::F16, 3),
        (1, 4, Strategy::PassQ, Dtype::F32, 4),
        (1, 4, Strategy::Tree, Dtype::F32, 4),
        // The last rank is not of this process, as far as the others know.
        (1, 4, Strategy::Ring, Dtype::F32, 3),
        (2, 2, Strategy::Unified, Dtype::F32, 3),
    ] {
        let ranks = ulysses * ring;
        let name = format!("{strategy} on {ulysses}x{ring} in {dtype}, {here} of {ranks} ranks here");
        all.push(scenario(&name, ranks, move || {
            let long = if ulysses > 2 { "groups of eight" } else { CASE };
            for case in [long, "bias, softcap and sinks"] {
                same_as_through_the_host(case, dtype, Mesh::new(ulysses, ring).unwrap(), strategy, here);
            }
        }));
    }
    for (ulysses, ring, strategy) in [(1, 4, Strategy::Ring), (2, 2, Strategy::Unified)] {
        let name = format!("gradients by {strategy} on {ulysses}x{ring}");
        all.push(scenario(&name, ulysses * ring, move || gradients(ulysses, ring, strategy)));
    }
    for seed in 1..=2 {
        let mut planted = scenario(&format!("kernels that do not wait for copies, seed {seed}"), 4, || {
            let mesh = Mesh::new(2, 2).unwrap();
            same_as_through_the_host(CASE, Dtype::F32, mesh, Strategy::Unified, 4);
        });
        planted.fake = format!("devices=4,memory_mb=256,delay_us=20000,seed={seed},ignore_nccl_waits=2");
        planted.ends = Ends::Failing;
        planted.says_not = &[];
        all.push(planted);
    }
    for (name, fault, says) in [
        ("a device that is lost", "sticky_at=2", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("a device that hangs", "hang_at=2", "the device completed nothing"),
    ] {
        let mut lost = scenario(name, 3, move || fails(says));
        lost.fake = format!("{},{fault}", lost.fake);
        lost.says_not = &[];
        all.push(lost);
    }
    all.extend(
        [apart::scenarios(), kept::scenarios(), copies::scenarios(), given_back::scenarios()].concat(),
    );
    all
}

fn scenario(name: &str, ranks: u32, run: impl Fn() + Send + Sync + 'static) -> Scenario {
    let fake = format!("devices={ranks},memory_mb=256,delay_us=1000,seed={ranks}");
    let mut scenario = Scenario::new(&format!("peers: {name}"), &fake, run);
    scenario.says_not = &["fake driver: 0 bytes copied between devices"];
    scenario
}

fn device(rank: usize) -> Device {
    let options = CudaOptions { stuck_after: Duration::from_secs(8), ..CudaOptions::default() };
    Device::from(CudaBackend::with_options(rank, &options).unwrap())
}

/// The collectives of ranks that find each other.
fn found(ranks: &[(Group, Device)]) -> Vec<Arc<CudaPeers>> {
    std::thread::scope(|scope| {
        let one = |(transport, device): &(Group, Device)| {
            let (transport, device) = (transport.clone(), device.clone());
            let form_within = Duration::from_secs(61);
            scope.spawn(move || block_on(CudaPeers::form(&transport, &device, form_within, DEADLINE)))
        };
        let threads: Vec<_> = ranks.iter().map(one).collect();
        let peers = threads.into_iter().map(|thread| thread.join().unwrap().unwrap());
        let peers: Vec<_> = peers.map(|peers| peers.expect("ranks of one process")).collect();
        for peers in &peers {
            assert_eq!(peers.deadline(), DEADLINE);
            assert!(!peers.to_string().contains("host memory"), "{peers}");
        }
        peers
    })
}

/// The collectives of the ranks of this process, as the caller names them.
fn named(ranks: &[(Group, Device)]) -> Vec<Arc<CudaPeers>> {
    CudaPeers::of(ranks, DEADLINE).unwrap().into_iter().map(Arc::new).collect()
}

/// Runs ranks, each on a thread with a device of its own; the first `here` copy messages from
/// device to device.
fn on_peers(
    plans: &Arc<ProvedPlans>,
    prepared: &Prepared,
    here: usize,
) -> Vec<(Duration, Result<RankOutput>)> {
    let ranks: Vec<(Group, Device)> =
        in_process_group(plans.set().mesh.size()).into_iter().zip((0..).map(device)).collect();
    let peers = if here == ranks.len() { found(&ranks) } else { named(&ranks[..here]) };
    let options = || SessionOptions { deadline: DEADLINE, ..SessionOptions::default() };
    let mut peers = peers.into_iter();
    let sessions: Vec<Session> = ranks
        .into_iter()
        .map(|(transport, device)| match peers.next() {
            Some(peers) => Session::with_collective(transport, device, peers, options()),
            None => Session::with_options(transport, device, options()),
        })
        .collect();
    std::thread::scope(|scope| {
        let one = |mut session| {
            scope.spawn(move || {
                let start = Instant::now();
                let ended = run(&mut session, plans, prepared);
                // A rank stays in its group until all have ended.
                (start.elapsed(), ended, session)
            })
        };
        let threads: Vec<_> = sessions.into_iter().map(one).collect();
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        ended.into_iter().map(|(took, ended, _)| (took, ended)).collect()
    })
}

fn run(session: &mut Session, plans: &Arc<ProvedPlans>, prepared: &Prepared) -> Result<RankOutput> {
    let part = shard(plans.set(), session.rank(), &prepared.tensors)?;
    block_on(attend_planned(session, plans, &part))
}

/// The bytes of the result, and what each rank counts as sent, do not depend on the way of the
/// messages.
fn same_as_through_the_host(case: &str, dtype: Dtype, mesh: Mesh, strategy: Strategy, here: usize) {
    assert!(cases().iter().any(|one| one.name == case));
    let (plans, prepared) = plans_on(case, dtype, mesh, strategy);
    let set = plans.set();
    let [mut copied, mut staged] = [Whole::new(set), Whole::new(set)];
    let [mut sent_copied, mut sent_staged] = [Vec::new(), Vec::new()];
    for (whole, sent, here) in [(&mut copied, &mut sent_copied, here), (&mut staged, &mut sent_staged, 0)] {
        for (rank, (_, output)) in on_peers(&plans, &prepared, here).into_iter().enumerate() {
            let output = output.unwrap();
            whole.add(set, rank, &output);
            sent.push((output.report.bytes_sent, output.report.messages_sent));
        }
    }
    assert_eq!(sent_copied, sent_staged);
    assert!(copied.o == staged.o, "{case}: other bytes than through the host");
    let bits = |lse: &[f32]| lse.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&copied.lse), bits(&staged.lse));
}

fn gradients(ulysses: u32, ring: u32, strategy: Strategy) {
    let mesh = Mesh::new(ulysses, ring).unwrap();
    let group = in_process_group(mesh.size());
    let ranks: Vec<_> = group.iter().cloned().zip((0..).map(device)).collect();
    let peers = CudaPeers::of(&ranks, DEADLINE).unwrap().into_iter().map(Arc::new).collect::<Vec<_>>();
    gradients_on(group, mesh, strategy, |transport| {
        let rank = transport.rank().0 as usize;
        let options = SessionOptions { deadline: DEADLINE, ..SessionOptions::default() };
        Session::with_collective(transport, ranks[rank].1.clone(), peers[rank].clone(), options)
    });
}

/// The device of rank 0 fails: every rank ends with an error, and long before the deadline.
fn fails(says: &str) {
    let (plans, prepared) = plans_on(CASE, Dtype::F32, Mesh::new(1, 3).unwrap(), Strategy::Ring);
    let ended = on_peers(&plans, &prepared, 3);
    let texts: Vec<_> = ended.iter().map(|(_, ended)| ended.as_ref().unwrap_err().to_string()).collect();
    assert!(texts.iter().all(|text| text.contains(says)), "{texts:#?}");
    for (took, _) in ended {
        assert!(took < Duration::from_secs(35), "{took:?}: {texts:#?}");
    }
}
