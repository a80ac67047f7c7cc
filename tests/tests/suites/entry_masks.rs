//! One mask for each batch entry: every plan agrees with the oracle, with any owners; a call of
//! many entries gives the bytes of one call for each; masks that change places are another plan,
//! and their results are wrong.

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::Tensors;
use kyklos::local::on_threads;
use kyklos::plan::{PlanSet, ProvedPlans, check, plan_hash};
use kyklos::{
    Attention, AttentionProblem, Dtype, Error, Mask, Mesh, PlacementKind, Session, Split, Strategy, Tensor,
    plan_forward,
};
use kyklos_oracle::inputs::cases;
use kyklos_oracle::oracle::{OracleMask, OracleTerm};
use kyklos_oracle::tolerance::discriminates;
use kyklos_transport::in_process_group;
use proptest::test_runner::TestRunner;

use crate::common::devices::{Broken, Fault};
use crate::common::run_set;
use crate::open_placement::{agrees, drawn};
use kyklos_backend_suite::{Prepared, Whole, oracle_dtype};

#[test]
fn any_mask_of_each_entry_agrees_with_the_oracle_with_any_owners_in_every_strategy() {
    for strategy in Strategy::ALL {
        let mut runner = TestRunner::new(crate::cases(8, 80));
        runner
            .run(&drawn(2..4, true), |drawn| agrees(strategy, drawn))
            .unwrap_or_else(|error| panic!("{strategy}: {error}"));
    }
}

/// The cases with a mask for each batch entry.
fn entry_cases() -> impl Iterator<Item = Prepared> {
    let by_entry = |mask: &OracleMask| mask.terms.iter().any(|term| matches!(term, OracleTerm::Entries(_)));
    let cases =
        cases().into_iter().filter(move |case| by_entry(&case.problem.mask) && case.poison.is_empty());
    cases.map(|case| Prepared::new(case, Dtype::F32))
}

fn run(set: &PlanSet, tensors: &Tensors) -> Whole {
    run_set(set, in_process_group(set.mesh.size()), tensors, Device::cpu).0
}

fn planned(problem: &AttentionProblem, mesh: (u32, u32), strategy: Strategy) -> PlanSet {
    let mesh = Mesh::new(mesh.0, mesh.1).unwrap();
    plan_forward(problem, mesh, PlacementKind::Zigzag, &Split::Even, strategy).unwrap()
}

/// The part of batch entry `entry` of `batch`.
fn part<T: Clone>(all: &[T], entry: usize, batch: usize) -> Vec<T> {
    let each = all.len() / batch;
    all[entry * each..(entry + 1) * each].to_vec()
}

/// `all` with one batch entry, of this mask.
fn one_entry(all: &AttentionProblem, mask: Mask) -> AttentionProblem {
    let shape = [1, all.kv_len, all.q_heads, all.kv_heads, all.head_dim];
    let one = AttentionProblem::new(shape, all.dtype, mask).unwrap();
    let one = one.with_queries(all.q_len, all.q_offset).unwrap();
    let one = one.with_logits(all.scale, all.softcap).unwrap().with_sinks(all.sinks.clone()).unwrap();
    one.with_fixed_order(all.fixed_order).unwrap().with_inference(all.inference)
}

#[test]
fn a_call_gives_the_bytes_of_one_call_for_each_entry() {
    let mut count = 0;
    for prepared in entry_cases().filter(|prepared| prepared.case.bias.is_none()) {
        let (problem, tensors) = (&prepared.problem, &prepared.tensors);
        let batch = problem.batch as usize;
        let masks: Vec<Mask> =
            problem.mask.to_string().split("//").map(|mask| mask.parse().unwrap()).collect();
        for (mesh, strategy) in
            [((1, 1), Strategy::Dense), ((1, 3), Strategy::Ring), ((2, 2), Strategy::Unified)]
        {
            let together = run(&planned(problem, mesh, strategy), tensors);
            for (entry, mask) in masks.iter().enumerate() {
                let of = |tensor: &Bytes| Bytes::from(part(tensor, entry, batch));
                let alone = one_entry(problem, mask.clone());
                let tensors = Tensors { q: of(&tensors.q), k: of(&tensors.k), v: of(&tensors.v), bias: None };
                let alone = run(&planned(&alone, mesh, strategy), &tensors);
                let what = format!("{}: {strategy}, entry {entry}", prepared.case.name);
                assert!(alone.o == part(&together.o, entry, batch), "{what}: o");
                assert!(alone.lse == part(&together.lse, entry, batch), "{what}: lse");
                count += 1;
            }
        }
    }
    assert!(count >= 40, "{count}");
}

/// The planted bugs: a kernel takes the mask of the next batch entry, or that of the first one for
/// all.
#[test]
fn the_mask_of_another_entry_is_caught() {
    let mut caught = 0;
    for prepared in entry_cases() {
        let set = planned(&prepared.problem, (2, 2), Strategy::Unified);
        let right = prepared.judge(&run(&set, &prepared.tensors), "no bug");
        let limit = prepared.parallel_limit(&right);
        right.assert_within(&limit);
        for fault in [Fault::MaskOfNextEntry, Fault::MaskOfFirstEntry] {
            let broken = || Broken::device(fault);
            let (whole, _) = run_set(&set, in_process_group(4), &prepared.tensors, broken);
            let wrong = prepared.judge(&whole, "a planted bug");
            let what = format!("{}: {fault:?}", prepared.case.name);
            assert!(wrong.within(&limit).is_err(), "{what} passes: {wrong}");
            let ratio = discriminates(right.max_abs_error, wrong.max_abs_error, oracle_dtype(Dtype::F32));
            ratio.unwrap_or_else(|error| panic!("{what}: {error}"));
            caught += 1;
        }
    }
    assert!(caught >= 16, "{caught}");
}

fn problem(mask: &str) -> AttentionProblem {
    AttentionProblem::new([2, 64, 2, 2, 8], Dtype::F32, mask.parse().unwrap()).unwrap()
}

#[test]
fn masks_that_change_places_are_another_plan() {
    let hash = |mask: &str| plan_hash(&planned(&problem(mask), (1, 4), Strategy::Ring), &[]);
    let hashes = [
        "documents:0,20,64//documents:0,50,64",
        "documents:0,50,64//documents:0,20,64",
        "documents:0,20,64",
        "documents:0,20,64//documents:0,20,64",
    ]
    .map(hash);
    for (index, hash) in hashes.iter().enumerate() {
        assert!(!hashes[..index].contains(hash), "{index}");
    }
}

#[test]
fn keys_travel_where_a_query_of_any_entry_sees_them() {
    let sent = |mask: &str| -> u64 {
        let mesh = Mesh::new(1, 4).unwrap();
        let set = plan_forward(&problem(mask), mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring)
            .unwrap();
        check(&set).unwrap().iter().map(|check| check.bytes_sent).sum()
    };
    let (own, one, both) = ("documents:0,16,32,48,64", "documents:0,32,64", "documents:0,16,32,64");
    assert_eq!([sent(own), sent(&format!("{own}//{own}"))], [0, 0]);
    assert_eq!(sent(&format!("{own}//{one}")), sent(one));
    assert_eq!(sent(&format!("{one}//{own}")), sent(one));
    assert_eq!(sent(&format!("{own}//{both}")), sent(both));
    assert!(0 < sent(both) && sent(both) < sent(one));
    assert_eq!(sent("valid:0//full"), sent("full"));
}

/// Plans for other masks of the entries do not prove these masks: a key would be missing.
#[test]
fn the_proof_asks_for_the_keys_of_every_entry() {
    let own = "documents:0,16,32,48,64";
    let (problem, mesh) = (problem(&format!("{own}//{own}")), Mesh::new(1, 4).unwrap());
    let kind = PlacementKind::Contiguous;
    let mut set = plan_forward(&problem, mesh, kind, &Split::Even, Strategy::Ring).unwrap();
    assert!(ProvedPlans::new(set.clone()).is_ok());
    let other = "documents:0,16,32,48,64//documents:0,32,64".parse().unwrap();
    set.problem = set.problem.with_mask(other).unwrap();
    let error = ProvedPlans::new(set).unwrap_err().to_string();
    assert!(error.contains("of batch 1 sees keys"), "{error}");
}

#[test]
fn sessions_take_masks_of_entries_and_refuse_ranks_that_have_them_in_another_order() {
    let masks = ["documents:0,3,8", "causal+documents:0,5,8"];
    let mask =
        |order: [usize; 2]| Mask::per_entry(order.map(|at| masks[at].parse().unwrap()).to_vec()).unwrap();
    let values = |tokens: usize, from: usize| -> Tensor {
        let entry = |entry: usize| {
            (0..tokens * 16).map(move |at| ((entry * 999 + from * 16 + at) as f32 * 0.37).sin())
        };
        Tensor::new([2, tokens, 2, 8], (0..2).flat_map(entry).collect::<Vec<f32>>()).unwrap()
    };
    let attend = |session: &mut Session, order, x: &Tensor| -> Result<Vec<f32>, Error> {
        session.attend(&Attention::new().mask(mask(order)), x, x, x)?.o.to_vec::<f32>()
    };
    let mut alone = Session::new(in_process_group(1).remove(0), Device::cpu());
    let whole = attend(&mut alone, [0, 1], &values(8, 0)).unwrap();
    let parts = on_threads(in_process_group(2), |transport| {
        let rank = transport.rank().0 as usize;
        let mut session = Session::new(transport, Device::cpu());
        let x = values(4, rank * 4);
        let refusal = attend(&mut session, [rank, 1 - rank], &x).unwrap_err();
        assert!(refusal.is_request(), "{refusal}");
        (refusal.to_string(), attend(&mut session, [0, 1], &x).unwrap())
    });
    assert_eq!(parts[0].0, parts[1].0);
    assert!(parts[0].0.contains("rank 1 calls with another mask"), "{}", parts[0].0);
    for (entry, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let ours = &parts[rank].1[entry * 64..][..64];
        let expected = &whole[(entry * 2 + rank) * 64..][..64];
        assert!(ours.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "entry {entry}, rank {rank}");
    }
}
