//! Predictions of gradients.

use kyklos::plan::check;
use kyklos::simulate::{
    Candidate, Cluster, EstimatedPlan, LinkDescription, PlanQuery, choose, fewest_bytes, predict,
    predict_backward, simulate,
};
use kyklos::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_backward};

use super::{close, cluster, described, fast, sum};

#[test]
fn gradients_take_the_products_of_the_device() {
    let problem = AttentionProblem::new([1, 2048, 8, 2, 64], Dtype::F32, Mask::causal()).unwrap();
    let mesh = Mesh::new(1, 4).unwrap();
    let candidate = Candidate { strategy: Strategy::Ring, mesh, placement: PlacementKind::Zigzag };
    for (said, products) in [("", 7.0), ("backward_products = 5", 5.0), ("backward_products = 8", 8.0)] {
        let text = fast().to_toml().unwrap().replace("backward_products = 7.0", said);
        let cluster = Cluster::from_toml(&text).unwrap();
        let forward = predict(&problem, candidate, &Split::Even, &cluster).unwrap();
        let backward = predict_backward(&problem, candidate, &Split::Even, &cluster).unwrap();
        let ratio =
            sum(&backward, |rank| rank.compute_ns) as f64 / sum(&forward, |rank| rank.compute_ns) as f64;
        assert!(close(ratio, products / 2.0), "{products}: {ratio}");
        // The buffers are those that the proof counts.
        let set = plan_backward(&problem, mesh, candidate.placement, &Split::Even, Strategy::Ring).unwrap();
        let proved = check(&set).unwrap();
        let peaks: Vec<_> = backward.ranks.iter().map(|rank| (rank.peak_bytes, rank.bytes_sent)).collect();
        assert_eq!(peaks, proved.iter().map(|rank| (rank.peak_bytes, rank.bytes_sent)).collect::<Vec<_>>());
    }
    let wrong = fast().to_toml().unwrap().replace("backward_products = 7.0", "backward_products = 0");
    let refusal = Cluster::from_toml(&wrong).unwrap_err().to_string();
    assert!(refusal.contains("device.d.attention.backward_products = 0"), "{refusal}");
}

/// A hop of keys and the sums that go home take at most the time of the gradients of a shard of T
/// tokens if T is at least F (e + 4) / (p g W): F flop/s, e bytes of an element, p products, g
/// query heads for each KV head, W bytes/s.
#[test]
fn hops_of_a_backward_ring_are_hidden_from_the_shard_of_the_formula_on() {
    let (shard, group) = (1024.0, 4.0);
    let problem = AttentionProblem::new([1, 8192, 8, 2, 64], Dtype::F32, Mask::full()).unwrap();
    let mesh = Mesh::new(1, 8).unwrap();
    let candidate = Candidate { strategy: Strategy::Ring, mesh, placement: PlacementKind::Contiguous };
    let wall_s = |gb_per_s: f64| {
        // Each rank has one port for all that it sends.
        let mut described = fast().description().clone();
        let port = LinkDescription { gb_per_s, ..described.link["wire"].clone() };
        described.link.insert("port".to_owned(), port);
        described.host[0].nic = Some("port".to_owned());
        let cluster = Cluster::new(described).unwrap();
        predict_backward(&problem, candidate, &Split::Even, &cluster).unwrap().wall_s()
    };
    // 100 GFLOP/s, 4 bytes, 7 products.
    let least_gb_per_s = 100.0 * (4.0 + 4.0) / (7.0 * group * shard);
    let alone_s = wall_s(1e6);
    // The last sums travel when the work is done: they stay visible, a part of a hop.
    let above = wall_s(1.1 * least_gb_per_s) / alone_s;
    assert!(above < 1.0 + 1.0 / 8.0, "{above}");
    let below = wall_s(0.5 * least_gb_per_s) / alone_s;
    assert!(below > 1.6, "{below}");
}

#[test]
fn with_gradients_both_passes_are_priced_and_the_backward_pass_by_the_strategy_that_runs_it() {
    let problem = AttentionProblem::new([1, 4096, 8, 1, 64], Dtype::F32, Mask::causal()).unwrap();
    let mut wanted = PlanQuery {
        ranks: 4,
        mesh: None,
        strategy: None,
        placement: None,
        split: Split::Even,
        gradients: true,
    };
    let cluster = cluster("gb_per_s = 1\nlatency_us = 50", "");
    let priced = choose(&problem, &wanted, &cluster).unwrap();
    let mut replaced = 0;
    for EstimatedPlan { candidate, passes, .. } in &priced {
        let passes = passes.as_ref().unwrap();
        let of_backward = candidate.of_backward(&problem);
        assert_eq!(passes.backward_strategy, of_backward.strategy);
        assert!(of_backward.strategy.has_backward() && of_backward.mesh == candidate.mesh);
        replaced += u32::from(of_backward != *candidate);
        let forward = predict(&problem, *candidate, &Split::Even, &cluster).unwrap();
        let backward = predict_backward(&problem, of_backward, &Split::Even, &cluster).unwrap();
        assert_eq!((&passes.forward, &passes.backward), (&forward, &backward));
    }
    let without = Strategy::ALL.into_iter().filter(|strategy| !strategy.has_backward()).count();
    assert!(replaced > 0 || without == 0);
    let walls: Vec<_> =
        priced.iter().filter_map(EstimatedPlan::prediction).map(|both| both.wall_ns).collect();
    let of_passes = priced.iter().filter_map(|priced| priced.passes.as_ref());
    let sums: Vec<_> = of_passes.map(|passes| passes.forward.wall_ns + passes.backward.wall_ns).collect();
    assert!(walls == sums && walls.is_sorted());
    // A backward pass that is refused refuses the candidate.
    let fixed = problem.clone().with_fixed_order(true).unwrap();
    wanted.placement = Some(PlacementKind::Contiguous);
    assert!(choose(&fixed, &wanted, &cluster).unwrap().iter().all(|priced| priced.prediction().is_none()));
    assert!(fewest_bytes(&fixed, &wanted).unwrap_err().to_string().contains("in a fixed order"));
    wanted.gradients = false;
    assert!(fewest_bytes(&fixed, &wanted).is_ok());
}

#[test]
fn a_long_backward_ring_is_extrapolated_within_a_few_percent() {
    for (mask, placement) in
        [(Mask::full(), PlacementKind::Contiguous), (Mask::causal(), PlacementKind::Zigzag)]
    {
        let problem = AttentionProblem::new([1, 512 * 192, 8, 8, 128], Dtype::Bf16, mask).unwrap();
        let cluster = described("h100-infiniband.toml").grown_for(192).unwrap();
        let mesh = Mesh::new(1, 192).unwrap();
        let candidate = Candidate { strategy: Strategy::Ring, mesh, placement };
        let told = predict_backward(&problem, candidate, &Split::Even, &cluster).unwrap();
        let set = plan_backward(&problem, mesh, placement, &Split::Even, Strategy::Ring).unwrap();
        let walked = simulate(&set, &cluster).unwrap();
        assert!(told.extrapolated && !walked.extrapolated);
        let off = told.wall_s() / walked.wall_s() - 1.0;
        let bytes = told.bytes_sent() as f64 / walked.bytes_sent() as f64 - 1.0;
        assert!(off.abs() < 0.05 && bytes.abs() < 0.02, "{placement}: time {off}, bytes {bytes}");
    }
}
