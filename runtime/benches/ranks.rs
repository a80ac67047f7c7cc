//! What the parallel machinery costs: ranks in one process against the dense run of the same problem on the same
//! cores. The floor is 1.0: the same FLOPs, no link, no copies but those of the all-to-all.
//!
//! `cargo bench -p kyklos --bench ranks -- [--short]`

use std::time::{Duration, Instant};

use bytes::Bytes;
use kyklos::backend::cpu::CpuBackend;
use kyklos::local::{RankTask, Tensors, layouts, run_ranks};
use kyklos::plan::World;
use kyklos::{
    AttentionProblem, Dtype, Mask, Mesh, NoObserver, PlacementKind, RunOptions, Split, Strategy, SystemClock,
    plan_world,
};
use kyklos_transport::in_process_group;

fn main() {
    let short = std::env::args().any(|argument| argument == "--short");
    let (seq, rounds) = if short { (1024, 3) } else { (4096, 15) };
    println!("mask,mesh,placement,ranks,median_ms,min_ms,max_ms,ratio_to_dense");
    for mask in [Mask::full(), Mask::causal()] {
        let problem = AttentionProblem::new([1, seq, 8, 8, 64], Dtype::F32, mask).expect("a fixed problem");
        let world = |ulysses, ring| {
            let mesh = Mesh::new(ulysses, ring).expect("a fixed mesh");
            plan_world(&problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Unified)
                .expect("it fits")
        };
        let worlds = [world(1, 1), world(1, 4), world(4, 1), world(2, 2)];
        let tensors = tensors(&worlds[0]);
        // Rounds alternate between the worlds, so that a noisy minute hits all of them.
        let mut times: Vec<Vec<f64>> = worlds.iter().map(|_| Vec::new()).collect();
        for _ in 0..rounds {
            for (world, times) in worlds.iter().zip(&mut times) {
                times.push(run(world, &tensors));
            }
        }
        let median = |times: &[f64]| times[times.len() / 2];
        for times in &mut times {
            times.sort_by(f64::total_cmp);
        }
        for (world, sorted) in worlds.iter().zip(&times) {
            println!(
                "{},{},{},{},{:.2},{:.2},{:.2},{:.3}",
                problem.mask,
                world.mesh,
                world.q_placement.kind(),
                world.mesh.world(),
                median(sorted),
                sorted[0],
                sorted[sorted.len() - 1],
                median(sorted) / median(&times[0]),
            );
        }
    }
}

/// Milliseconds of the second run of all ranks, inputs loaded: from the first rank's start to the last one's end.
fn run(world: &World, tensors: &Tensors) -> f64 {
    let options = RunOptions {
        clock: std::sync::Arc::new(SystemClock::new()),
        observer: std::sync::Arc::new(NoObserver),
        trace: false,
        poison: false,
    };
    let transports = in_process_group(world.mesh.world());
    let deadline = Duration::from_secs(60);
    let ends = run_ranks(world, transports, tensors, 2, deadline, &options, |task: RankTask<'_>| {
        let mut ends = Vec::new();
        task.run_on(&CpuBackend::new(), |_, _| ends.push(Instant::now())).map(|()| ends)
    })
    .expect("the plans hold");
    let ends: Vec<Vec<Instant>> = ends.into_iter().map(|ends| ends.expect("no rank fails")).collect();
    // A rank starts the second run when it has ended the first; the run starts with the last of them.
    let start = ends.iter().map(|ends| ends[0]).max().expect("at least one rank");
    let end = ends.iter().map(|ends| ends[1]).max().expect("at least one rank");
    (end - start).as_secs_f64() * 1e3
}

fn tensors(world: &World) -> Tensors {
    let (q, kv) = layouts(world);
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
    Tensors { q: make(q.bytes(), 1), k: make(kv.bytes(), 2), v: make(kv.bytes(), 3), pairs: None }
}
