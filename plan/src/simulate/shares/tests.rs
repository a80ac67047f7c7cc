use super::*;
use crate::dtype::Dtype;
use crate::mask::Mask;
use crate::placement::PlacementKind;
use crate::plan::check;
use crate::strategy::plan as plan_forward;
use crate::strategy_list::Strategy;

fn problem(tokens: u32, mask: &str) -> AttentionProblem {
    AttentionProblem::new([2, tokens, 4, 2, 16], Dtype::F32, mask.parse().unwrap()).unwrap()
}

fn on(ulysses: u32, ring: u32, placement: PlacementKind) -> Candidate {
    let mesh = Mesh::new(ulysses, ring).unwrap();
    Candidate { strategy: Strategy::of_mesh(mesh), mesh, placement }
}

fn capacities(speeds: &[u64]) -> Vec<Capacity> {
    let of = |speed: &u64| Capacity { pairs_per_s: *speed, step_ns: 0, memory_bytes: None };
    speeds.iter().map(of).collect()
}

/// Seconds of computing of each rank, pair by pair.
fn seconds(
    problem: &AttentionProblem,
    candidate: Candidate,
    split: &Split,
    capacities: &[Capacity],
) -> Vec<f64> {
    let Candidate { mesh, placement, strategy } = candidate;
    let set = plan_forward(problem, mesh, placement, split, strategy).unwrap();
    let keys = |token: u32| -> u64 {
        (0..problem.batch as usize)
            .map(|entry| problem.mask.visible(entry, token, problem.kv_len).keys())
            .sum()
    };
    let of = |(rank, capacity): (usize, &Capacity)| {
        let shard = set.q_placement.of_shard(rank as u32 / mesh.ulysses());
        let pairs: u64 = shard.iter().map(keys).sum();
        let pairs = pairs * u64::from(problem.q_heads / mesh.ulysses());
        pairs as f64 / capacity.pairs_per_s as f64
    };
    capacities.iter().enumerate().map(of).collect()
}

#[test]
fn every_rank_ends_at_the_same_time_under_every_mask() {
    let speeds = capacities(&[7_000_000, 1_000_000, 2_000_000, 4_000_000]);
    for mask in ["full", "causal", "window:100,0", "causal+documents:0,500,2100,3000"] {
        for placement in [PlacementKind::Contiguous, PlacementKind::Zigzag] {
            for mesh in [(1, 4), (2, 2)] {
                let (problem, candidate) = (problem(3000, mask), on(mesh.0, mesh.1, placement));
                let shares = Shares::level(&problem, candidate, &speeds, None).unwrap();
                let took = seconds(&problem, candidate, &shares.split, &speeds);
                let last = took.iter().copied().fold(0.0, f64::max);
                let predicted = shares.compute_ns as f64 / 1e9;
                assert!((last / predicted - 1.0).abs() < 0.02, "{mask} {candidate}: {last} {predicted}");
                // In a shard of two ranks the slower one counts; the other waits.
                if mesh == (1, 4) {
                    let first = took.iter().copied().fold(f64::INFINITY, f64::min);
                    assert!(last / first < 1.03, "{mask} {candidate}: {took:?}");
                    let even = seconds(&problem, candidate, &Split::Even, &speeds);
                    assert!(
                        last < even.iter().copied().fold(0.0, f64::max) / 1.3,
                        "{mask} {candidate}: {even:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_device_that_does_not_help_is_left_out() {
    let (problem, ring) = (problem(3000, "full"), on(1, 3, PlacementKind::Contiguous));
    let left_out =
        |capacities: &[Capacity]| Shares::level(&problem, ring, capacities, None).unwrap().left_out;
    assert_eq!(left_out(&capacities(&[1000, 1000, 30])), []);
    assert_eq!(left_out(&capacities(&[1000, 1000, 3])), [Rank(2)]);
    assert_eq!(left_out(&capacities(&[1000, 0, 500])), [Rank(1)]);
    // 72 million pairs: 36 ms on each of two. A step of the third takes as long.
    let mut slow_to_begin = capacities(&[1_000_000_000; 3]);
    slow_to_begin[0].step_ns = 36_000_000;
    assert_eq!(left_out(&slow_to_begin), [Rank(0)]);
    slow_to_begin[0].step_ns = 1_000_000;
    assert_eq!(left_out(&slow_to_begin), []);
    // Equal ranks all take part, however many.
    let many = Shares::level(&problem, on(1, 300, PlacementKind::Contiguous), &capacities(&[5; 300]), None);
    assert_eq!(many.unwrap().left_out, []);
}

#[test]
fn a_slow_link_leaves_a_device_out_and_a_fast_one_does_not() {
    let cluster = |gb_per_s: f64| {
        Cluster::from_toml(&format!(
            r#"
            name = "two hosts"
            about = "for a test"
            between_hosts = "line"
            [link.line]
            gb_per_s = {gb_per_s}
            latency_us = 100
            [device.one]
            attention = [{{ dtype = "f32", head_dim = 16, gflop_per_s = 64, share_of_it = 1.0 }}]
            tile_rows = 1
            tile_keys = 1
            attend_step_us = 10
            copy_gb_per_s = 10
            memory = "unified"
            [[host]]
            name = "a"
            count = 2
            devices = [{{ kind = "one", count = 1 }}]
            "#
        ))
        .unwrap()
    };
    // 64 Gflop/s are a gigapair of dim 16 in a second: 72 ms alone. The keys and values have 384 kB.
    let (problem, ring) = (problem(3000, "full"), on(1, 2, PlacementKind::Contiguous));
    let speeds = capacities(&[1_000_000_000; 2]);
    let left_out =
        |gb_per_s| Shares::level(&problem, ring, &speeds, Some(&cluster(gb_per_s))).unwrap().left_out;
    assert_eq!(left_out(1.0), []);
    assert_eq!(left_out(0.001), [Rank(1)]);
}

#[test]
fn shares_keep_within_the_memory_of_each_rank() {
    let (problem, ring) = (problem(3000, "causal"), on(1, 3, PlacementKind::Zigzag));
    let peaks = |capacities: &[Capacity]| {
        let shares = Shares::level(&problem, ring, capacities, None)?;
        let set = plan_forward(&problem, ring.mesh, ring.placement, &shares.split, ring.strategy)?;
        Ok::<_, Error>((shares, check(&set)?.iter().map(|rank| rank.peak_bytes).collect::<Vec<_>>()))
    };
    let mut ranks = capacities(&[4_000_000, 2_000_000, 1_000_000]);
    let (free, free_peaks) = peaks(&ranks).unwrap();
    assert_eq!(free.limited, []);
    for (part, left_out) in [(8, &[][..]), (6, &[]), (4, &[Rank(0)])] {
        let memory = free_peaks[0] * part / 10;
        ranks[0].memory_bytes = Some(memory);
        let (shares, limited) = peaks(&ranks).unwrap();
        // With less memory the keys that it receives do not fit either.
        let least = if left_out.is_empty() { memory * 8 / 10 } else { 0 };
        assert!((least..=memory).contains(&limited[0]), "{limited:?} {memory}");
        assert_eq!((&shares.limited[..], &shares.left_out[..]), (&[Rank(0)][..], left_out));
        assert!(
            shares.compute_ns > free.compute_ns && limited[1] > free_peaks[1],
            "{limited:?} {free_peaks:?}"
        );
    }
    for rank in &mut ranks {
        rank.memory_bytes = Some(free_peaks[0] / 10);
    }
    let refusal = peaks(&ranks).unwrap_err();
    assert!(refusal.is_request() && refusal.to_string().contains("do not fit the memory"), "{refusal}");
}

#[test]
fn shares_have_a_time_under_other_capacities() {
    let (problem, ring) = (problem(3000, "causal"), on(1, 2, PlacementKind::Zigzag));
    let before = capacities(&[3_000_000, 1_000_000]);
    let shares = Shares::level(&problem, ring, &before, None).unwrap();
    let same = shares.compute_ns(&problem, ring.mesh, &before).unwrap();
    assert!(same.abs_diff(shares.compute_ns) < 10, "{same} {}", shares.compute_ns);
    let slower = shares.compute_ns(&problem, ring.mesh, &capacities(&[1_500_000, 1_000_000])).unwrap();
    assert!(slower.abs_diff(2 * shares.compute_ns) < 10);
}

#[test]
fn wrong_numbers_of_ranks_and_ranks_without_devices_are_refused() {
    let (problem, ring) = (problem(300, "full"), on(1, 2, PlacementKind::Contiguous));
    for wrong in [&[1, 1, 1][..], &[0, 0]] {
        assert!(Shares::level(&problem, ring, &capacities(wrong), None).unwrap_err().is_request());
    }
    // Nothing to see: any shares are level.
    let nothing = AttentionProblem::new([1, 0, 4, 2, 16], Dtype::F32, Mask::full()).unwrap();
    assert_eq!(Shares::level(&nothing, ring, &capacities(&[1, 9]), None).unwrap().split, Split::Even);
}
