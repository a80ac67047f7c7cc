//! Ranks that share memory get the bytes that sockets and channels give, with every strategy.

use kyklos::backend::Device;
use kyklos::plan::check;
use kyklos::{Dtype, Mesh, PlacementKind, Split, Strategy, plan_forward};
use kyklos_backend_suite::Prepared;
use kyklos_backend_suite::fixed_order::case;
use kyklos_oracle::oracle::OracleMask;
use kyklos_transport::in_process_group;
use kyklos_transport::quic::{LinkSettings, quic_loopback_group_over};

use crate::common::run_set;

#[test]
fn shared_memory_sockets_and_channels_give_the_same_bytes_with_every_strategy() {
    // Most messages are larger than those that always go over QUIC, also quarters of a shard.
    let prepared = Prepared::new(case("1600 tokens", 1600, OracleMask::causal(), |_| {}), Dtype::F32);
    let mut tried = Vec::new();
    for strategy in Strategy::ALL {
        for (ulysses, ring) in [(1, 3), (2, 1), (2, 2)] {
            let mesh = Mesh::new(ulysses, ring).unwrap();
            if strategy.accepts(mesh).is_err() {
                continue;
            }
            tried.push(strategy);
            let weights = (0..mesh.size()).map(|rank| f64::from(2 + rank)).collect();
            let split = Split::Weights(weights);
            let set = plan_forward(&prepared.problem, mesh, PlacementKind::Zigzag, &split, strategy).unwrap();
            let run = |group| run_set(&set, group, &prepared.tensors, Device::cpu);
            let (expected, _) = run(in_process_group(mesh.size()));
            let planned: u64 = check(&set).unwrap().iter().map(|rank| rank.bytes_sent).sum();
            for shared_memory in [true, false] {
                let link = LinkSettings { shared_memory, ..LinkSettings::default() };
                let group = quic_loopback_group_over(mesh.size(), link).unwrap();
                let (whole, outputs) = run(group.clone());
                assert!(whole.o == expected.o && whole.lse == expected.lse, "{strategy} {mesh} {link:?}");
                let sent: u64 = outputs.iter().map(|output| output.report.bytes_sent).sum();
                assert_eq!(sent, planned, "{strategy} {mesh}");
                let figures = group.iter().flat_map(|rank| rank.connections()).flatten();
                let shared: u64 = figures.map(|figures| figures.shared_bytes_sent).sum();
                let most = if cfg!(all(target_os = "linux", target_pointer_width = "64")) && shared_memory {
                    planned / 2..=planned
                } else {
                    0..=0
                };
                assert!(most.contains(&shared), "{strategy} {mesh}: {shared} of {planned} bytes");
            }
        }
    }
    tried.dedup();
    // A rank that is alone sends nothing.
    assert_eq!(tried.len(), Strategy::ALL.len() - 1, "{tried:?}");
}
