//! Messages and bytes of backward plans with a full mask and even shards, from the formulas of
//! their documentation.

use kyklos::plan::check;
use kyklos::{AttentionProblem, Dtype, Mask, Mesh, PlacementKind, Split, Strategy, plan_backward};

const RANKS: u32 = 4;
const HEADS: u64 = 4;
const KV_HEADS: u64 = 2;
const DIM: u64 = 8;

/// What each rank sends: bytes and messages. 48 tokens, 4 ranks, f16.
fn sent(replicated: std::ops::Range<u32>, strategy: Strategy) -> Vec<(u64, u64)> {
    let shape = [1, 48, HEADS as u32, KV_HEADS as u32, DIM as u32];
    let problem = AttentionProblem::new(shape, Dtype::F16, Mask::full()).unwrap();
    let problem = problem.with_replicated(replicated).unwrap();
    let (mesh, kind) = (Mesh::new(1, RANKS).unwrap(), PlacementKind::Contiguous);
    let set = plan_backward(&problem, mesh, kind, &Split::Even, strategy).unwrap();
    check(&set).unwrap().iter().map(|check| (check.bytes_sent, check.messages_sent)).collect()
}

#[test]
fn only_gradients_of_keys_on_every_rank_are_sent() {
    // Pieces of 12 keys: a sum of f32 to each other rank, and a result of f16.
    let bytes = 3 * 12 * 2 * KV_HEADS * DIM * (4 + 2);
    assert_eq!(sent(0..48, Strategy::Ring), [(bytes, 6); 4]);
    assert_eq!(sent(0..48, Strategy::PassQ), [(bytes, 6); 4]);
}

#[test]
fn a_ring_sends_keys_and_sums_of_their_gradients() {
    let bytes = 3 * 12 * 2 * KV_HEADS * DIM * (2 + 4);
    assert_eq!(sent(0..0, Strategy::Ring), [(bytes, 6); 4]);
}

#[test]
fn queries_travel_with_what_their_gradients_need() {
    // q and dO of f16, four statistics of f32, a sum of f32.
    let visit = 12 * HEADS * (2 * 2 * DIM + 16 + 4 * DIM);
    assert_eq!(sent(0..0, Strategy::PassQ), [(3 * visit, 6); 4]);
    // Each rank is a child and a parent at three places.
    assert_eq!(sent(0..0, Strategy::Tree), [(3 * visit, 6); 4]);
}
