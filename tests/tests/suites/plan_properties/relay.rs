//! Relay: several ranks of a shard need the same KV heads. These heads cross between shards once,
//! during attention.

use kyklos::plan::{Plan, PlanSet, Step, check};
use kyklos::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_forward};

/// Bytes of keys and values that each rank sends to other shards, and inside its own shard.
fn rounds_sent(set: &PlanSet) -> Vec<(u64, u64)> {
    let shard = |rank: u32| rank / set.mesh.ulysses();
    let sent = |plan: &Plan| {
        let sends = plan.steps.iter().filter_map(|step| match step {
            Step::Exchange { sends, .. } => Some(sends),
            _ => None,
        });
        sends.flatten().fold((0, 0), |(between, inside), send| {
            let bytes: u64 = send.parts.iter().map(|part| plan.slice_bytes(&set.problem, part)).sum();
            match shard(send.to) == shard(plan.rank) {
                true => (between, inside + bytes),
                false => (between + bytes, inside),
            }
        })
    };
    set.plans.iter().map(sent).collect()
}

#[test]
fn relayed_kv_heads_cross_between_shards_once() {
    let mesh = Mesh::new(8, 4).unwrap();
    for mask in [Mask::full(), Mask::causal()] {
        let problem = AttentionProblem::new([2, 4096, 16, 2, 8], Dtype::F16, mask).unwrap();
        let sent = |strategy| {
            let set = plan_forward(&problem, mesh, PlacementKind::Zigzag, &Split::Even, strategy).unwrap();
            check(&set).unwrap();
            rounds_sent(&set)
        };
        let (unified, relay) = (sent(Strategy::Unified), sent(Strategy::Relay));
        // Two KV heads for eight ranks: four ranks need the same head, so each of them sends a quarter of
        // it.
        for (rank, (unified, relay)) in unified.iter().zip(&relay).enumerate() {
            assert_eq!(relay.0 * 4, unified.0, "rank {rank}");
        }
        // Three blocks of 1024 tokens, k and v, of batch 2 and 8 elements of 2 bytes.
        assert!(relay.iter().all(|(between, _)| *between == 3 * (1024 / 4) * 2 * 2 * 8 * 2));
        // Inside a shard, each rank forwards its piece of three blocks to three other ranks.
        for ((_, exchanged), (between, inside)) in unified.iter().zip(&relay) {
            assert_eq!(inside - exchanged, 3 * between);
        }
    }
}

#[test]
fn relay_is_unified_where_no_two_ranks_need_the_same_kv_heads() {
    // With 3 KV heads over 4 ranks, two ranks need the same head, but no two ranks need the same set of
    // heads.
    for (heads, kv_heads) in [(8, 4), (8, 8), (12, 3)] {
        let problem = AttentionProblem::new([1, 64, heads, kv_heads, 8], Dtype::F32, Mask::causal()).unwrap();
        let plans = |strategy| {
            let mesh = Mesh::new(4, 2).unwrap();
            plan_forward(&problem, mesh, PlacementKind::Zigzag, &Split::Even, strategy).unwrap().plans
        };
        assert_eq!(plans(Strategy::Relay), plans(Strategy::Unified), "{kv_heads} KV heads");
    }
}

#[test]
fn both_moves_of_a_relay_travel_under_attention() {
    let problem = AttentionProblem::new([1, 96, 4, 2, 8], Dtype::F32, Mask::full()).unwrap();
    let mesh = Mesh::new(4, 3).unwrap();
    let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Relay).unwrap();
    for plan in &set.plans {
        let mut posted = Vec::new();
        let mut under = Vec::new();
        for step in &plan.steps {
            match step {
                Step::Exchange { id, .. } => posted.push(*id),
                Step::Wait { id } => posted.retain(|posted| posted != id),
                Step::Attend { kv, .. } => under.push((kv.tokens.len(), posted.len())),
                _ => {}
            }
        }
        // Attention over half of the rank's 32 tokens overlaps the first hop. The other half overlaps the
        // second hop and the exchange of the first block's pieces. The first block overlaps the
        // exchange of the second block's pieces. The second block overlaps nothing.
        assert_eq!(under, [(16, 1), (16, 2), (32, 1), (32, 0)], "rank {}", plan.rank);
    }
}
