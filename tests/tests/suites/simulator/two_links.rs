//! Discrete devices with a link that reaches their memory inside a host, and one between hosts that
//! does not.

use kyklos::simulate::{Cluster, PlanQuery, choose, simulate};
use kyklos::{AttentionProblem, Dtype, Mask, Split};

use super::{close, full};

/// Hosts of four devices. `device_memory`: what the links inside a host and between hosts reach.
fn hosts(device_memory: [bool; 2]) -> Cluster {
    let [inside, between] = device_memory;
    Cluster::from_toml(&format!(
        r#"
        name = "two links"
        between_hosts = "wire"
        [device.gpu]
        memory = "discrete"
        staging_gb_per_s = 2
        copy_gb_per_s = 1e9
        [[device.gpu.attention]]
        dtype = "f32"
        head_dim = 64
        gflop_per_s = 100
        [link.peer]
        gb_per_s = 100
        latency_us = 1
        device_memory = {inside}
        [link.wire]
        gb_per_s = 1
        latency_us = 20
        device_memory = {between}
        [[host]]
        name = "h"
        count = 2
        devices = [{{ kind = "gpu", count = 4 }}]
        inside = "peer"
        "#
    ))
    .expect("written to fit")
}

#[test]
fn only_messages_on_links_that_do_not_reach_device_memory_are_staged() {
    let size = full([1, 8]);
    let staged_ns = |device_memory| {
        let prediction = simulate(&size, &hosts(device_memory)).unwrap();
        prediction.ranks.iter().map(|rank| rank.copy_ns as f64).collect::<Vec<_>>()
    };
    // Seven hops of a block of keys and values of 512 tokens, copied at both ends of a message.
    let hops = 7.0 * 2.0 * 512.0 * 8.0 * 64.0 * 4.0 / 2.0;
    assert!(staged_ns([false, false]).iter().all(|ns| close(*ns, 2.0 * hops)));
    // Ranks 3 and 7 send to the other host, ranks 4 and 0 receive from it.
    for (rank, ns) in staged_ns([true, false]).into_iter().enumerate() {
        assert!(close(ns, if rank % 4 == 0 || rank % 4 == 3 { hops } else { 0.0 }), "rank {rank}: {ns}");
    }
    assert!(staged_ns([true, true]).iter().all(|ns| *ns == 0.0));
}

#[test]
fn the_best_plan_is_faster_by_what_it_does_not_stage() {
    let problem = AttentionProblem::new([1, 4096, 8, 8, 64], Dtype::F32, Mask::full()).unwrap();
    let wanted = PlanQuery {
        ranks: 8,
        mesh: None,
        strategy: None,
        placement: None,
        split: Split::Even,
        gradients: false,
    };
    let best = |device_memory| {
        let priced = choose(&problem, &wanted, &hosts(device_memory)).unwrap().swap_remove(0);
        priced.prediction().unwrap().wall_ns
    };
    let (none, inside, all) = (best([false, false]), best([true, false]), best([true, true]));
    assert!(all < inside && inside < none, "{all} {inside} {none}");
}
