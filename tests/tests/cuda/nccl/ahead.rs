//! Steps that are submitted before those in front of them are done: the device waits for no round
//! trip to the host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::plan::ProvedPlans;
use kyklos::{Dtype, Mesh, PlacementKind, Result, RunOptions, Session, Split, Strategy, plan_forward};
use kyklos_backend_suite::{Prepared, RankOutput};
use kyklos_cuda::{CudaBackend, CudaOptions, NcclOptions};
use kyklos_oracle::inputs::cases;
use kyklos_transport::{Group, in_process_group};

use super::{DEADLINE, plans, run, session};
use crate::scenario::Scenario;

const CASE: &str = "two rows beyond four tiles";
const RANKS: u32 = 3;
/// Launches of each rank in a call of the ring: attention to the own keys and to two others, and
/// the division at the end.
const LAUNCHES: u32 = 4;

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    // No kernel runs before the device has had these launches: a host that waits for a kernel before
    // submits no more.
    let default = NcclOptions::default().steps_ahead;
    for (name, steps_ahead, hold_until, ends_well) in [
        ("a whole call is submitted before its first kernel runs", default, LAUNCHES, true),
        ("with two steps ahead the host waits for the first one", 2, 3, true),
        ("with two steps ahead no fourth kernel is launched before the first has run", 2, 4, false),
        ("without steps ahead the host waits for each kernel", 0, 1, true),
        ("without steps ahead no second kernel is launched before the first has run", 0, 2, false),
    ] {
        let options = NcclOptions { steps_ahead, deadline: DEADLINE, ..NcclOptions::default() };
        all.push(held(name, hold_until, options, ends_well));
    }
    all.push(super::scenario("the times of steps ahead have no overlap", 3, "move_ms=1500", times));
    all
}

/// A call on devices that run no kernel before they have had `hold_until` launches.
fn held(name: &str, hold_until: u32, options: NcclOptions, ends_well: bool) -> Scenario {
    let mut scenario = super::scenario(name, RANKS, "", move || {
        let prepared = Prepared::new(cases().into_iter().find(|one| one.name == CASE).unwrap(), Dtype::F32);
        let mesh = Mesh::new(1, RANKS).unwrap();
        // With equal shares the ranks have the same kernels, one launch for each step.
        let set = plan_forward(&prepared.problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Ring);
        let plans = Arc::new(ProvedPlans::new(set.unwrap()).unwrap());
        let outputs = on_threads(in_process_group(RANKS), |transport| {
            run(patient(&transport, options, ends_well), &plans, &prepared)
        });
        let texts: Vec<_> =
            outputs.iter().filter_map(|output| Some(output.as_ref().err()?.to_string())).collect();
        assert_eq!(texts.len(), if ends_well { 0 } else { outputs.len() }, "{texts:?}");
        let hangs = texts.iter().any(|text| text.contains("the device completed nothing"));
        assert!(ends_well || hangs, "{texts:?}");
    });
    scenario.fake = format!("devices={RANKS},memory_mb=256,delay_us=1000,seed=7,hold_until={hold_until}");
    if !ends_well {
        // What a device that hangs holds is left to the end of the process.
        scenario.ends = crate::scenario::Ends::LeavingSomething;
        scenario.says = &[];
    }
    scenario
}

/// A session on a device that counts as lost soon, where it is to hang.
fn patient(transport: &Group, nccl: NcclOptions, ends_well: bool) -> Session {
    let stuck_after = Duration::from_secs(if ends_well { 60 } else { 4 });
    let options = CudaOptions { stuck_after, ..CudaOptions::default() };
    let ordinal = transport.rank().0 as usize;
    let device = Device::from(CudaBackend::with_options(ordinal, &options).unwrap());
    session(transport.clone(), device, nccl, RunOptions::default())
}

/// Messages take 1.5 s: the device waits for them, and what is counted is no more than what has
/// passed.
fn times() {
    let (plans, prepared) = plans(CASE, Dtype::F32, 3);
    on_threads(in_process_group(3), |transport| {
        let device = Device::from(CudaBackend::new(transport.rank().0 as usize).unwrap());
        let options = NcclOptions { deadline: DEADLINE, ..NcclOptions::default() };
        let run_options = RunOptions { trace: true, ..RunOptions::default() };
        let session = session(transport, device, options, run_options);
        let start = Instant::now();
        let output: Result<RankOutput> = run(session, &plans, &prepared);
        let passed = u64::try_from(start.elapsed().as_nanos()).unwrap();
        let RankOutput { report, spans, .. } = output.unwrap();
        let counted = report.compute_ns + report.wait_ns + report.copy_ns;
        assert!(counted <= passed, "{report:?} in {passed} ns");
        assert!(report.wait_ns > 0 && report.compute_ns > 0, "{report:?}");
        let of_device = |name: &str| spans.iter().filter(|span| span.name.contains(name)).count();
        assert_eq!(of_device("on the device"), 2, "{spans:?}");
        let mut own: Vec<_> = spans.iter().filter(|span| span.peer.is_none()).collect();
        own.sort_by_key(|span| (span.start_ns, span.end_ns));
        for pair in own.windows(2) {
            assert!(pair[0].end_ns <= pair[1].start_ns, "{pair:?}");
        }
    });
}
