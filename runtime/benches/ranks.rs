//! Cost of the parallel machinery: every strategy, with four ranks of one process, compared with
//! the dense run of the same problem on the same cores. The lower limit is 1.0: the same FLOPs, and
//! only memory between ranks. `computing` is the share of the wall time in which a rank computed,
//! as minimum and maximum over the ranks.
//!
//! `cargo bench -p kyklos --bench ranks -- [--short]`

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::{Tensors, layouts, shard};
use kyklos::local::on_threads;
use kyklos::plan::{PlanSet, ProvedPlans};
use kyklos::{
    Attention, AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Session, Split, Strategy, plan_forward,
};
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Group, in_process_group};

type Forming = fn(u32) -> Vec<Group>;

fn main() {
    let short = std::env::args().any(|argument| argument == "--short");
    let (seq, rounds) = if short { (1024, 3) } else { (4096, 9) };
    println!(
        "transport,mask,strategy,mesh,placement,median_ms,min_ms,max_ms,ratio_to_dense,computing_least,computing_most"
    );
    let quic: Forming = |ranks| quic_loopback_group(ranks).expect("loopback sockets");
    for (transport, group) in [("in-process", in_process_group as Forming), ("quic", quic)] {
        for mask in [Mask::full(), Mask::causal()] {
            let problem =
                AttentionProblem::new([1, seq, 8, 2, 64], Dtype::F32, mask).expect("a fixed problem");
            let sets: Vec<PlanSet> =
                Strategy::ALL.into_iter().map(|strategy| set(&problem, strategy)).collect();
            let tensors = tensors(&sets[0]);
            // Rounds alternate between the plan sets, so that a noisy minute hits all of them.
            let mut runs: Vec<Vec<Timed>> = sets.iter().map(|_| Vec::new()).collect();
            for _ in 0..rounds {
                for (set, runs) in sets.iter().zip(&mut runs) {
                    runs.push(run(set, group(set.mesh.size()), &tensors));
                }
            }
            for runs in &mut runs {
                runs.sort_by(|a, b| a.ms.total_cmp(&b.ms));
            }
            // The first strategy is dense.
            let dense_ms = runs[0][rounds / 2].ms;
            for (set, runs) in sets.iter().zip(&runs) {
                let Timed { ms, computing } = &runs[rounds / 2];
                println!(
                    "{transport},{},{},{},{},{ms:.2},{:.2},{:.2},{:.3},{:.2},{:.2}",
                    problem.mask,
                    set.strategy,
                    set.mesh,
                    set.q_placement.name(),
                    runs[0].ms,
                    runs[rounds - 1].ms,
                    ms / dense_ms,
                    computing.iter().copied().fold(f64::INFINITY, f64::min),
                    computing.iter().copied().fold(0.0, f64::max),
                );
            }
        }
    }
}
/// Four ranks, on a mesh that uses the strategy.
fn set(problem: &AttentionProblem, strategy: Strategy) -> PlanSet {
    let (ulysses, ring) = match strategy {
        Strategy::Dense => (1, 1),
        Strategy::Ulysses | Strategy::Chunked => (4, 1),
        // Four query heads share a KV head, so two ranks of a shard share one.
        Strategy::Relay => (4, 2),
        Strategy::Unified => (2, 2),
        _ => (1, 4),
    };
    let mesh = Mesh::new(ulysses, ring).expect("a fixed mesh");
    plan_forward(problem, mesh, PlacementKind::Zigzag, &Split::Even, strategy).expect("it fits")
}

/// One run.
struct Timed {
    ms: f64,
    /// For each rank, the share of that time in which it computed.
    computing: Vec<f64>,
}

/// Milliseconds of the second run of all ranks with inputs loaded, from the last rank's start to
/// the last rank's end.
fn run(set: &PlanSet, transports: Vec<Group>, tensors: &Tensors) -> Timed {
    let plans = Arc::new(ProvedPlans::new(set.clone()).expect("the plans hold"));
    let ends = on_threads(transports, |transport| {
        let part = shard(set, transport.rank(), tensors)?;
        let mut session = Session::new(transport, Device::cpu());
        pollster::block_on(async {
            let [q, k, v] = part.qkv(&plans.set().problem)?;
            let call = Attention::planned(&plans);
            let mut ends = Vec::new();
            for _ in 0..2 {
                let output = session.attend_async(&call, &q, &k, &v).await?;
                ends.push((Instant::now(), output.report.compute_ns));
            }
            Ok::<_, kyklos::Error>(ends)
        })
    });
    let ends: Vec<Vec<(Instant, u64)>> = ends.into_iter().map(|ends| ends.expect("no rank fails")).collect();
    // A rank starts the second run when its first run has ended. The measured time starts when the last
    // rank starts the second run.
    let start = ends.iter().map(|ends| ends[0].0).max().expect("at least one rank");
    let end = ends.iter().map(|ends| ends[1].0).max().expect("at least one rank");
    let ms = (end - start).as_secs_f64() * 1e3;
    Timed { ms, computing: ends.iter().map(|ends| ends[1].1 as f64 / 1e6 / ms).collect() }
}

fn tensors(set: &PlanSet) -> Tensors {
    let (q, kv) = layouts(set);
    // Speed does not depend on the values; these are between -1 and 1.
    let make = |bytes: usize, seed: u32| {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (f64::from(state) / f64::from(u32::MAX) * 2.0 - 1.0) as f32
        };
        let values: Vec<f32> = (0..bytes / 4).map(|_| next()).collect();
        Bytes::copy_from_slice(bytemuck::cast_slice(&values))
    };
    Tensors { q: make(q.bytes(), 1), k: make(kv.bytes(), 2), v: make(kv.bytes(), 3), bias: None }
}
