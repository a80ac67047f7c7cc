//! Plans over random problems, meshes, splits and masks. Every plan is proved. Its bytes are
//! exactly the bytes of a second, independent closed form. No planted fault passes the proof.

mod backward;
mod backward_bytes;
mod closed_form;
mod faults;
mod in_order;
mod messages;
mod placed;
mod relay;

use std::collections::BTreeSet;

use closed_form::closed_form;
use faults::FAULTS;
use kyklos::plan::{Explained, PlanSet, Recv, Send, Step, check, explain, plan_hash};
use kyklos::{
    AttentionProblem, BiasKind, BiasTensor, Dtype, Mask, MaskSlice, Mesh, PlacementKind, SlicePart, Split,
    Strategy, WireFormat, meshes_by_bytes, plan_forward,
};
use proptest::prelude::*;
use proptest::strategy::Strategy as _;

/// A plan set that prints its problem, mesh, strategy and placement, but not its plans, because
/// they are too long.
#[derive(Clone)]
pub(crate) struct Drawn(pub(crate) PlanSet);

impl std::fmt::Debug for Drawn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let PlanSet { problem, mesh, strategy, q_placement, .. } = &self.0;
        let tokens: Vec<usize> = q_placement.ranks().iter().map(|tokens| tokens.len()).collect();
        write!(f, "{problem:?} {strategy} on {mesh}, {} {tokens:?}", q_placement.name())
    }
}

/// A problem, a mesh and a split that fit each other.
pub(crate) fn sets() -> impl proptest::strategy::Strategy<Value = Drawn> {
    let shape = (1u32..4, 0u32..70, 1u32..5, 1u32..5, prop::sample::select(vec![8u32, 16, 24]));
    let mesh = (1u32..5, 1u32..6);
    let kind = prop::sample::select(PlacementKind::ALL.to_vec());
    let dtype = prop::sample::select(Dtype::ALL.to_vec());
    (shape, mesh, kind, dtype, 0usize..8, 0u32..9, any::<u64>()).prop_map(
        |((batch, seq, kv_heads, group, dim), (ulysses, ring), kind, dtype, mask, offset, seed)| {
            let (q_heads, ulysses) = (kv_heads * group, ulysses.min(kv_heads * group));
            let mut random = Random(seed);
            let mask = mask_number(mask, batch, seq, &mut random);
            let problem = AttentionProblem::new([batch, seq, q_heads, kv_heads, dim], dtype, mask)
                .expect("drawn to fit");
            let problem = problem.with_queries(seq, offset).expect("drawn to fit");
            let bias = (seq > 0 && random.below(3) == 0).then(|| BiasTensor {
                kind: [BiasKind::Mask, BiasKind::Additive][random.below(2) as usize],
                batch: [1, batch][random.below(2) as usize],
                heads: [1, q_heads][random.below(2) as usize],
                shared_rows: random.below(3) == 0,
            });
            let problem = problem.with_bias(bias).expect("drawn to fit");
            let mesh = Mesh::new(ulysses, ring).expect("drawn to fit");
            let split = match random.below(3) {
                0 => Split::Even,
                1 => Split::Weights(
                    (0..mesh.size()).map(|i| f64::from(i == 0) + f64::from(random.below(4))).collect(),
                ),
                _ => Split::Tokens(random.shares(seq, mesh.size())),
            };
            // Dense, ring and Ulysses are special cases of unified.
            let known = &Strategy::ALL[3..];
            let drawn = known[random.below(known.len() as u32) as usize];
            let strategy = if drawn.accepts(mesh).is_ok() { drawn } else { Strategy::Unified };
            let rounds = mesh.ring() > 1 && !strategy.moves_queries();
            let wire = match random.below(6) {
                0 | 1 if rounds && dtype == Dtype::F32 => WireFormat::F16,
                2 | 3 if rounds => WireFormat::Int8,
                _ => WireFormat::Same,
            };
            let problem = problem.with_wire(wire).expect("drawn to fit");
            let replicated = match random.below(4) {
                0 => random.range(seq),
                _ => 0..0,
            };
            let problem = problem.with_replicated(replicated).expect("drawn to fit");
            Drawn(plan_forward(&problem, mesh, kind, &split, strategy).expect("drawn to fit"))
        },
    )
}

fn mask_number(kind: usize, batch: u32, seq: u32, random: &mut Random) -> Mask {
    let window = |random: &mut Random| Mask::window(Some(random.below(seq + 1)), Some(random.below(4)));
    let documents = |random: &mut Random| {
        let middle = 1 + random.below(seq.max(2) - 1);
        if seq < 2 { Mask::full() } else { Mask::documents(vec![0, middle, seq]).expect("ascending") }
    };
    let padding =
        |random: &mut Random| Mask::key_padding((0..batch).map(|_| random.below(seq + 1)).collect());
    match kind {
        0 => Mask::full(),
        1 => Mask::causal(),
        2 => window(random),
        3 => documents(random),
        4 => padding(random),
        5 => {
            let slice = |random: &mut Random| {
                let (q, k) = (random.range(seq), random.range(seq));
                let parts = [SlicePart::Full, SlicePart::Causal, SlicePart::Inverse, SlicePart::Both];
                MaskSlice::new(q, k, parts[random.below(4) as usize]).expect("ascending")
            };
            Mask::slices((0..random.below(6)).map(|_| slice(random)).collect())
        }
        6 => {
            let masks = (0..batch).map(|_| {
                let kind = random.below(7).min(5) as usize;
                mask_number(kind, 1, seq, random)
            });
            Mask::per_entry(masks.collect()).expect("masks for one entry")
        }
        _ => Mask::causal().and(documents(random)).and_then(|mask| mask.and(padding(random))).expect("fits"),
    }
}

/// Deterministic numbers from a seed that proptest shrinks (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % u64::from(bound.max(1))) as u32
    }

    /// A range of numbers below `end`.
    fn range(&mut self, end: u32) -> std::ops::Range<u32> {
        let (a, b) = (self.below(end + 1), self.below(end + 1));
        a.min(b)..a.max(b)
    }

    /// `total` in `parts` parts, some of them likely to be 0.
    fn shares(&mut self, total: u32, parts: u32) -> Vec<u32> {
        let mut cuts: Vec<u32> = (1..parts).map(|_| self.below(total + 1)).collect();
        cuts.extend([0, total]);
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }
}

proptest! {
    #![proptest_config(crate::cases(400, 3000))]

    #[test]
    fn every_plan_is_proved_and_sends_what_the_closed_form_says(Drawn(set) in sets()) {
        let checks = check(&set).map_err(|error| TestCaseError::fail(error.to_string()))?;
        for (rank, check) in (0u32..).zip(&checks) {
            prop_assert_eq!((check.bytes_sent, check.messages_sent), closed_form(&set, rank), "rank {}", rank);
        }
    }

    /// So a message on one device may be a handle of the sender's memory.
    #[test]
    fn no_plan_writes_to_a_buffer_that_travels(Drawn(set) in sets()) {
        for plan in &set.plans {
            let mut travelling = BTreeSet::new();
            for step in &plan.steps {
                let written = match step {
                    Step::Exchange { sends, recvs, .. } => {
                        travelling.extend(sends.iter().flat_map(|send| &send.parts).map(|part| part.buffer));
                        travelling.extend(recvs.iter().flat_map(|recv| &recv.parts).copied());
                        continue;
                    }
                    Step::Repack { into, .. } => into.buffer,
                    Step::Attend { state, .. } => *state,
                    Step::AttendBackward(step) => step.d_kv.buffer,
                    Step::Accumulate { into, .. } => into.buffer,
                    Step::Convert { into, .. } | Step::Merge { into, .. } | Step::Finalize { into, .. } => *into,
                    Step::Wait { .. } | Step::Free { .. } => continue,
                };
                prop_assert!(!travelling.contains(&written), "rank {} writes {written:?}", plan.rank);
            }
        }
    }

    #[test]
    fn meshes_are_priced_at_what_their_plans_send(Drawn(set) in sets()) {
        let PlanSet { problem, mesh, q_placement, strategy, .. } = &set;
        let split = Split::Tokens(q_placement.ranks().iter().map(|tokens| tokens.len() as u32).collect());
        let kind = q_placement.kind().expect("dealt");
        let priced = meshes_by_bytes(problem, mesh.size(), kind, &split, Some(*strategy)).expect("fits");
        prop_assert!(priced.is_sorted_by_key(|(_, bytes)| *bytes));
        for (mesh, bytes) in priced {
            let set = plan_forward(problem, mesh, kind, &split, *strategy).expect("fits");
            let sent: u64 = set.plans.iter().map(|plan| plan.volume(problem).0).sum();
            prop_assert_eq!(sent, bytes, "{} {}", strategy, mesh);
        }
    }

    #[test]
    fn no_seeded_fault_passes_the_proof(Drawn(set) in sets(), seed in any::<u64>()) {
        let mut random = Random(seed);
        for fault in FAULTS {
            let mut broken = set.clone();
            if let Some(what) = fault(&mut broken, &mut random) {
                let proof = check(&broken);
                prop_assert!(proof.is_err(), "{} passed the proof:\n{}", what,
                    explain(&broken, &proof.unwrap_or_default(), None));
            }
        }
    }
}

#[test]
fn a_deadlock_between_two_ranks_is_found() {
    let problem = AttentionProblem::new([1, 8, 1, 1, 8], Dtype::F32, Mask::full()).unwrap();
    let mesh = Mesh::new(1, 2).unwrap();
    let mut set =
        plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring).unwrap();
    // Divide the hop into two exchanges on both ranks. Each rank first waits for a message that the
    // other rank sends only in its second exchange.
    for plan in &mut set.plans {
        let Step::Exchange { sends, recvs, .. } = plan.steps[0].clone() else {
            panic!("the ring posts first")
        };
        let (first, second) = if plan.rank == 0 { (0, 1) } else { (1, 0) };
        plan.steps[0] = Step::Exchange { id: first, sends: vec![], recvs };
        plan.steps.insert(1, Step::Wait { id: first });
        plan.steps.insert(2, Step::Exchange { id: second, sends, recvs: vec![] });
        let old = plan.steps.iter().rposition(|step| matches!(step, Step::Wait { .. })).unwrap();
        plan.steps[old] = Step::Wait { id: second };
    }
    let error = check(&set).unwrap_err().to_string();
    assert!(error.contains("waits for ever"), "{error}");
}

#[test]
fn a_message_without_parts_is_refused() {
    let problem = AttentionProblem::new([1, 8, 1, 1, 8], Dtype::F32, Mask::full()).unwrap();
    let mesh = Mesh::new(1, 2).unwrap();
    let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring).unwrap();
    for only in [0, 1] {
        let mut broken = set.clone();
        let exchange = match only {
            0 => Step::Exchange { id: 9, sends: vec![Send { to: 1, parts: vec![] }], recvs: vec![] },
            _ => Step::Exchange { id: 9, sends: vec![], recvs: vec![Recv { from: 0, parts: vec![] }] },
        };
        broken.plans[only].steps.splice(0..0, [exchange, Step::Wait { id: 9 }]);
        let error = check(&broken).unwrap_err().to_string();
        assert!(error.contains("a message without parts"), "{error}");
    }
}

#[test]
fn plan_sets_with_missing_plans_or_owners_are_refused() {
    let problem = AttentionProblem::new([1, 8, 2, 2, 8], Dtype::F32, Mask::full()).unwrap();
    let mesh = Mesh::new(1, 1).unwrap();
    let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap();
    let refused = |change: fn(&mut PlanSet)| {
        let mut set = set.clone();
        change(&mut set);
        check(&set).unwrap_err().to_string()
    };
    assert!(refused(|set| set.plans.clear()).contains("0 plans"));
    let empty_heads = refused(|set| {
        let attend = set.plans[0].steps.iter_mut().find(|step| matches!(step, Step::Attend { .. }));
        let Some(Step::Attend { q, .. }) = attend else { panic!("a dense plan attends") };
        q.heads = 0..0;
    });
    assert!(empty_heads.contains("is empty"), "{empty_heads}");
    let itself = refused(|set| {
        let whole = set.plans[0].whole(set.plans[0].q);
        set.plans[0].steps.insert(0, Step::Repack { from: whole.clone(), into: whole });
    });
    assert!(itself.contains("into itself"), "{itself}");
}

#[test]
fn bytes_on_known_meshes_are_the_published_ones() {
    // MHA, 8 ranks, in units of 2·S·H/N elements: U8R1 1.75, U4R2 2.5, U2R4 4, U1R8 7 (lse not
    // counted).
    let (seq, heads, dim) = (1024u32, 8u32, 64u32);
    let problem = AttentionProblem::new([1, seq, heads, heads, dim], Dtype::F32, Mask::full()).unwrap();
    for (ulysses, units) in [(8, 1.75), (4, 2.5), (2, 4.0), (1, 7.0)] {
        let mesh = Mesh::new(ulysses, 8 / ulysses).unwrap();
        let set =
            plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Unified).unwrap();
        let lse = u64::from(seq / 8 * heads / ulysses * (ulysses - 1) * 8);
        let unit = f64::from(2 * seq * heads / 8 * dim * 4);
        for check in check(&set).unwrap() {
            assert_eq!((check.bytes_sent - lse) as f64 / unit, units, "U{ulysses}");
        }
    }
}

#[test]
fn ulysses_wider_than_the_heads_is_refused_with_a_mesh_that_works() {
    let problem = AttentionProblem::new([1, 12, 3, 3, 8], Dtype::F32, Mask::full()).unwrap();
    let mesh = Mesh::new(4, 1).unwrap();
    let error =
        plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ulysses).unwrap_err();
    assert_eq!(
        error.to_string(),
        "ulysses = 4 needs at least 4 query heads, the problem has 3: use a mesh of 2 x 2, or a ring"
    );
}

#[test]
fn strategies_refuse_meshes_that_contradict_them() {
    let problem = AttentionProblem::new([1, 12, 4, 4, 8], Dtype::F32, Mask::full()).unwrap();
    let accepted = |strategy, ulysses, ring| {
        let mesh = Mesh::new(ulysses, ring).unwrap();
        plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, strategy).is_ok()
    };
    let rules = [
        (Strategy::Dense, true, false, false, false),
        (Strategy::Ring, true, true, false, false),
        (Strategy::Ulysses, true, false, true, false),
        (Strategy::Unified, true, true, true, true),
        (Strategy::Chunked, false, false, true, true),
        (Strategy::Bidirectional, false, true, false, true),
        (Strategy::Pipelined, false, true, false, true),
        (Strategy::TwoWay, false, true, false, true),
        (Strategy::Line, false, true, false, true),
        (Strategy::Gather, false, true, false, true),
        (Strategy::PassQ, false, true, false, true),
        (Strategy::Tree, false, true, false, true),
        (Strategy::Relay, false, false, false, true),
    ];
    assert!(rules.iter().map(|(strategy, ..)| *strategy).eq(Strategy::ALL), "a strategy has no line");
    for (strategy, dense, ring, ulysses, both) in rules {
        let got = [(1, 1), (1, 2), (2, 1), (2, 2)].map(|(ulysses, ring)| accepted(strategy, ulysses, ring));
        assert_eq!(got, [dense, ring, ulysses, both], "{strategy}");
    }
}

#[test]
fn the_hash_covers_everything_that_makes_a_plan_and_nothing_else() {
    let make = |shape, mask: &str, mesh: (u32, u32), kind, split: Split| {
        let problem = AttentionProblem::new(shape, Dtype::F32, mask.parse().unwrap()).unwrap();
        plan_forward(&problem, Mesh::new(mesh.0, mesh.1).unwrap(), kind, &split, Strategy::Unified).unwrap()
    };
    let (shape, kind) = ([1, 16, 4, 2, 8], PlacementKind::Contiguous);
    let names = |n: u32| (0..n).map(|rank| format!("rank-{rank}")).collect::<Vec<_>>();
    let base = plan_hash(&make(shape, "causal", (2, 2), kind, Split::Even), &names(4));
    let same = make(shape, "window:-1,0", (2, 2), kind, Split::Tokens(vec![4; 4]));
    assert_eq!(base, plan_hash(&same, &names(4)), "the same mask and tokens in other words");
    let mut wider = make(shape, "causal", (2, 2), kind, Split::Even);
    wider.problem = wider.problem.with_logits(0.25, None).unwrap();
    let mut sinking = make(shape, "causal", (2, 2), kind, Split::Even);
    sinking.problem = sinking.problem.with_sinks(vec![0.0; 4]).unwrap();
    let mut paired = make(shape, "causal", (2, 2), kind, Split::Even);
    paired.problem = paired
        .problem
        .with_bias(Some(BiasTensor { kind: BiasKind::Mask, batch: 1, heads: 1, shared_rows: false }))
        .unwrap();
    let mut shared = make(shape, "causal", (2, 2), kind, Split::Even);
    shared.problem = shared
        .problem
        .with_bias(Some(BiasTensor { kind: BiasKind::Mask, batch: 1, heads: 1, shared_rows: true }))
        .unwrap();
    assert_ne!(plan_hash(&shared, &names(4)), plan_hash(&paired, &names(4)));
    let mut coded = make(shape, "causal", (2, 2), kind, Split::Even);
    coded.problem = coded.problem.with_wire(WireFormat::Int8).unwrap();
    let others = [
        plan_hash(&make([1, 16, 4, 4, 8], "causal", (2, 2), kind, Split::Even), &names(4)),
        plan_hash(&make(shape, "full", (2, 2), kind, Split::Even), &names(4)),
        plan_hash(&make(shape, "causal", (1, 4), kind, Split::Even), &names(4)),
        plan_hash(&make(shape, "causal", (2, 2), PlacementKind::Zigzag, Split::Even), &names(4)),
        plan_hash(&make(shape, "causal", (2, 2), kind, Split::Tokens(vec![5, 3, 4, 4])), &names(4)),
        plan_hash(&make(shape, "causal", (2, 2), kind, Split::Even), &names(3)),
        plan_hash(&make(shape, "causal+slices:0..16x0..9", (2, 2), kind, Split::Even), &names(4)),
        plan_hash(&wider, &names(4)),
        plan_hash(&sinking, &names(4)),
        plan_hash(&paired, &names(4)),
        plan_hash(&shared, &names(4)),
        plan_hash(&coded, &names(4)),
    ];
    for (index, other) in others.iter().enumerate() {
        assert_ne!(base, *other, "change {index}");
    }
}

#[test]
fn a_plan_explains_itself_the_same_way_every_time() {
    let problem = AttentionProblem::new([1, 4096, 8, 2, 64], Dtype::F32, Mask::causal()).unwrap();
    let mesh = Mesh::new(2, 2).unwrap();
    let set = plan_forward(&problem, mesh, PlacementKind::Zigzag, &Split::Even, Strategy::Unified).unwrap();
    let checks = check(&set).unwrap();
    let text = explain(&set, &checks, Some(kyklos_transport::Rank(1)));
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/plan_2x2_zigzag.txt");
    if std::env::var_os("KYKLOS_BLESS").is_some() {
        std::fs::write(golden, &text).unwrap();
    }
    let expected = std::fs::read_to_string(golden).unwrap_or_default();
    assert_eq!(text, expected, "if the change is wanted, run with KYKLOS_BLESS=1 and review {golden}");
    let json = serde_json::to_value(Explained::new(&set, &checks, None)).unwrap();
    assert_eq!(json["plans"].as_array().unwrap().len(), 4);
    assert_eq!(json["plans"][1]["check"]["messages_sent"], checks[1].messages_sent);
}

#[test]
fn under_a_causal_mask_each_ring_sends_only_visible_blocks() {
    // In units of the bytes of a ring without a mask: R − 1 hops of all R shards.
    let problem = AttentionProblem::new([1, 640, 2, 2, 16], Dtype::F16, Mask::causal()).unwrap();
    for ring in [2, 4, 5, 8] {
        let share = |strategy, kind| {
            let mesh = Mesh::new(1, ring).unwrap();
            let set = plan_forward(&problem, mesh, kind, &Split::Even, strategy).unwrap();
            let sent: u64 = check(&set).unwrap().iter().map(|check| check.bytes_sent).sum();
            sent as f64 / (f64::from(ring - 1) * f64::from(640 * 2 * 2 * 16 * 2))
        };
        // Contiguous: only later shards see a shard. Zigzag: all shards see a shard, but only earlier
        // shards see its back half.
        assert_eq!(share(Strategy::Ring, PlacementKind::Contiguous), 0.5);
        assert_eq!(share(Strategy::Gather, PlacementKind::Contiguous), 0.5);
        assert_eq!(share(Strategy::Ring, PlacementKind::Zigzag), 1.0);
        assert_eq!(share(Strategy::TwoWay, PlacementKind::Zigzag), 0.75);
        assert_eq!(share(Strategy::Pipelined, PlacementKind::Contiguous), 0.5);
        assert_eq!(share(Strategy::Line, PlacementKind::Contiguous), 0.5);
    }
}

#[test]
fn int8_codes_are_sent_with_their_scales() {
    let problem = AttentionProblem::new([2, 400, 6, 3, 40], Dtype::F16, Mask::full()).unwrap();
    let mesh = Mesh::new(1, 2).unwrap();
    let sent = |wire, strategy| {
        let problem = problem.clone().with_wire(wire).unwrap();
        let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, strategy).unwrap();
        let checks = check(&set).unwrap();
        assert_eq!(checks[0].bytes_sent, closed_form(&set, 0).0);
        checks[0].bytes_sent
    };
    let heads = 2 * 3;
    assert_eq!(sent(WireFormat::Same, Strategy::Ring), heads * 2 * 200 * 40 * 2);
    // 200 tokens are four blocks, and the last block is short. Half of the tokens are two blocks.
    let codes = heads * 2 * 200 * 40;
    let scales = |blocks: u64| heads * (blocks * 40 * 4 + 200 * 4);
    assert_eq!(sent(WireFormat::Int8, Strategy::Ring), codes + scales(4));
    assert_eq!(sent(WireFormat::Int8, Strategy::TwoWay), codes + scales(2 + 2));
    assert_eq!(sent(WireFormat::Int8, Strategy::Pipelined), codes + scales(4));
    assert_eq!(sent(WireFormat::Int8, Strategy::Gather), codes + scales(4));
}

#[test]
fn a_part_of_a_buffer_whose_tokens_share_scales_is_refused() {
    let problem = AttentionProblem::new([1, 400, 2, 2, 8], Dtype::F32, Mask::full()).unwrap();
    let mesh = Mesh::new(1, 2).unwrap();
    for (wire, refused) in [(WireFormat::F16, false), (WireFormat::Int8, true)] {
        let problem = problem.clone().with_wire(wire).unwrap();
        let placement = PlacementKind::Contiguous;
        let mut set = plan_forward(&problem, mesh, placement, &Split::Even, Strategy::Ring).unwrap();
        // Rank 0 sends only the last half of a block, and the receiver expects exactly this half.
        for plan in &mut set.plans {
            for step in &mut plan.steps {
                let Step::Exchange { sends, .. } = step else { continue };
                for part in sends.iter_mut().flat_map(|send| &mut send.parts) {
                    part.tokens = 64..128;
                }
            }
        }
        let error = check(&set).unwrap_err().to_string();
        assert_eq!(error.contains("share a scale"), refused, "{wire}: {error}");
    }
}

#[test]
fn a_bidirectional_ring_has_half_the_hops_and_a_line_no_link_that_closes_it() {
    let problem = AttentionProblem::new([1, 60, 2, 2, 8], Dtype::F32, Mask::full()).unwrap();
    for ring in [2, 3, 4, 7, 8] {
        let set = |strategy| {
            let mesh = Mesh::new(1, ring).unwrap();
            plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, strategy).unwrap()
        };
        let waits = |set: &PlanSet| {
            set.plans[0].steps.iter().filter(|step| matches!(step, Step::Wait { .. })).count() as u32
        };
        assert_eq!(waits(&set(Strategy::Ring)), ring - 1);
        assert_eq!(waits(&set(Strategy::Bidirectional)), ring / 2);
        assert_eq!(waits(&set(Strategy::Gather)), ring - 1);
        let line = set(Strategy::Line);
        for plan in &line.plans {
            let peers = plan.steps.iter().flat_map(|step| match step {
                Step::Exchange { sends, .. } => sends.iter().map(|send| send.to).collect(),
                _ => Vec::new(),
            });
            assert!(peers.into_iter().all(|peer| peer.abs_diff(plan.rank) == 1), "rank {}", plan.rank);
        }
    }
}

#[test]
fn the_next_chunk_of_heads_travels_while_this_one_is_attended_to() {
    let problem = AttentionProblem::new([1, 64, 16, 8, 8], Dtype::F32, Mask::full()).unwrap();
    let set = plan_forward(
        &problem,
        Mesh::new(2, 1).unwrap(),
        PlacementKind::Contiguous,
        &Split::Even,
        Strategy::Chunked,
    )
    .unwrap();
    for plan in &set.plans {
        // Every attention step except the last one runs while an exchange is posted and not yet awaited.
        let mut posted = Vec::new();
        let mut under = Vec::new();
        for step in &plan.steps {
            match step {
                Step::Exchange { id, .. } => posted.push(*id),
                Step::Wait { id } => posted.retain(|posted| posted != id),
                Step::Attend { .. } => under.push(posted.len()),
                _ => {}
            }
        }
        assert_eq!(under, [1, 2, 2, 1], "rank {}", plan.rank);
    }
}

#[test]
fn replicated_keys_are_never_sent() {
    let problem = AttentionProblem::new([2, 96, 4, 2, 8], Dtype::F16, Mask::full()).unwrap();
    let sent = |replicated: std::ops::Range<u32>, mesh: (u32, u32), strategy| -> u64 {
        let problem = problem.clone().with_replicated(replicated).unwrap();
        let mesh = Mesh::new(mesh.0, mesh.1).unwrap();
        let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, strategy).unwrap();
        check(&set).unwrap().iter().map(|check| check.bytes_sent).sum()
    };
    // 64 of 96 keys are not replicated: shards of 16 instead of 24.
    let key_bytes = 2 * 2 * 2 * 8 * 2;
    for strategy in [
        Strategy::Ring,
        Strategy::Bidirectional,
        Strategy::Pipelined,
        Strategy::TwoWay,
        Strategy::Line,
        Strategy::Gather,
    ] {
        let of_keys = |keys: u64| keys * 3 * key_bytes;
        assert_eq!(sent(0..0, (1, 4), strategy), of_keys(96), "{strategy}");
        assert_eq!(sent(0..32, (1, 4), strategy), of_keys(64), "{strategy}");
        assert_eq!(sent(50..82, (1, 4), strategy), of_keys(64), "{strategy}");
        assert_eq!(sent(0..96, (1, 4), strategy), 0, "{strategy}: cross-attention to keys that all have");
    }
    let all_to_all = sent(0..0, (2, 2), Strategy::Unified) - sent(0..96, (2, 2), Strategy::Unified);
    // Each rank sends half of the heads of its 24 keys to its peer. Then one head of its 48 keys goes
    // around the ring.
    assert_eq!(all_to_all, 4 * (24 * key_bytes / 2 + 48 * key_bytes / 2));
}

#[test]
fn documents_that_are_dealt_one_by_one_level_the_work() {
    let mask: Mask = "causal+documents:0,700,800,3900,4096".parse().unwrap();
    let problem = AttentionProblem::new([1, 4096, 1, 1, 8], Dtype::F32, mask).unwrap();
    let slowest = |kind| {
        let mesh = Mesh::new(1, 4).unwrap();
        let set = plan_forward(&problem, mesh, kind, &Split::Even, Strategy::Ring).unwrap();
        let work = |tokens: &kyklos::TokenRuns| -> u64 {
            tokens.iter().map(|token| problem.mask.visible(0, token, 4096).keys()).sum()
        };
        let works: Vec<u64> = set.q_placement.ranks().iter().map(work).collect();
        *works.iter().max().unwrap() as f64 * 4.0 / works.iter().sum::<u64>() as f64
    };
    let (zigzag, each) = (slowest(PlacementKind::Zigzag), slowest(PlacementKind::PerDocument));
    assert!(each < 1.005 && zigzag > 1.1, "per document {each}, zigzag {zigzag}");
}

#[test]
fn the_owner_of_a_query_sends_log2_messages_in_a_tree() {
    // One query, on rank 0, over the keys of 13 ranks.
    let problem = AttentionProblem::new([1, 130, 4, 2, 8], Dtype::F32, Mask::full()).unwrap();
    let problem = problem.with_queries(1, 129).unwrap();
    let received = |strategy| -> Vec<usize> {
        let mesh = Mesh::new(1, 13).unwrap();
        let set = plan_forward(&problem, mesh, PlacementKind::Contiguous, &Split::Even, strategy).unwrap();
        check(&set).unwrap();
        let recvs = |step: &Step| match step {
            Step::Exchange { recvs, .. } => recvs.len(),
            _ => 0,
        };
        set.plans.iter().map(|plan| plan.steps.iter().map(recvs).sum()).collect()
    };
    assert_eq!(received(Strategy::PassQ)[0], 12);
    let tree = received(Strategy::Tree);
    assert_eq!(tree[0], 4, "from ranks 1, 2, 4 and 8");
    // One message to and one message from each other rank, the same as without a tree.
    assert_eq!(tree.iter().sum::<usize>(), 2 * 12);
}
