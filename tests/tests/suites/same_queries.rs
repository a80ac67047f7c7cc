//! Queries that every rank holds: any owners of the keys, any mask, sinks and bias tensor; every
//! rank gets all rows, and all ranks the same bytes.

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::plan::{ProvedPlans, Step, check};
use kyklos::{
    Attention, Dtype, Execution, Mask, Mesh, Placement, PlacementKind, Results, Session, Split, Strategy,
    Tensor, meshes_by_bytes, plan_forward, plan_placed,
};
use kyklos_oracle::inputs::{Case, CaseBias};
use kyklos_oracle::oracle::OracleProblem;
use kyklos_oracle::tolerance::{Cause, Failure};
use kyklos_transport::{Rank, in_process_group};
use proptest::prelude::*;

use crate::common::run_set;
use crate::open_placement::any_placement;
use crate::plan_properties::Random;
use crate::random_sets::{mask, masks, sink};
use kyklos_backend_suite::{Prepared, Whole};

proptest! {
    #![proptest_config(crate::cases(40, 400))]

    #[test]
    fn every_rank_gets_all_rows(
        (batch, q_len, kv_len, kv_heads, group) in (1usize..3, 1usize..20, 1usize..150, 1usize..3, 1usize..4),
        (ring, dtype) in (1u32..5, prop::sample::select(Dtype::ALL.to_vec())),
        terms in masks(),
        (offset, seed) in (0u64..150, any::<u64>()),
    ) {
        let q_heads = group * kv_heads;
        let problem = OracleProblem {
            batch, q_len, kv_len, q_heads, kv_heads,
            head_dim: 24,
            scale: 0.3,
            softcap: (seed % 3 == 0).then_some(5.0),
            mask: mask(&terms, batch, kv_len),
            q_offset: offset,
            sinks: if seed % 2 == 0 { vec![] } else { (0..q_heads).map(|head| sink(seed, head)).collect() },
        };
        let mut chance = Random(seed);
        let bias = (chance.below(3) == 0).then(|| CaseBias {
            additive: chance.below(2) == 0,
            batch: [1, batch][chance.below(2) as usize],
            heads: [1, q_heads][chance.below(2) as usize],
            shared_rows: chance.below(2) == 0,
            stand_in: false,
        });
        let case = Case { name: "queries on every rank", seed, problem, poison: Vec::new(), bias };
        let prepared = Prepared::new(case, dtype);
        let replicated = if chance.below(2) == 0 { chance.below(9).min(kv_len as u32)..kv_len as u32 / 2 } else { 0..0 };
        let problem = prepared.problem.clone().with_replicated(replicated).unwrap().with_same_queries(true).unwrap();
        let mesh = Mesh::new(1, ring).unwrap();
        let strategy = if ring == 1 { Strategy::Dense } else { Strategy::PassQ };
        let kv = any_placement(mesh, problem.kv_len, problem.replicated.clone(), &mut chance);
        let set = plan_placed(&problem, mesh, Placement::everywhere(mesh, problem.q_len), kv, strategy).unwrap();
        let checks = check(&set).unwrap();
        let (_, outputs) = run_set(&set, in_process_group(ring), &prepared.tensors, Device::cpu);
        let alone = {
            let one = Mesh::new(1, 1).unwrap();
            plan_forward(&prepared.problem, one, PlacementKind::Contiguous, &Split::Even, Strategy::Dense).unwrap()
        };
        let mut whole = Whole::new(&alone);
        for (output, planned) in outputs.iter().zip(checks) {
            prop_assert_eq!(output.report.bytes_sent, planned.bytes_sent);
            prop_assert_eq!(&output.o, &outputs[0].o);
            prop_assert_eq!(&output.lse, &outputs[0].lse);
        }
        whole.add(&alone, 0, &outputs[0]);
        let one = run_set(&alone, in_process_group(1), &prepared.tensors, Device::cpu).0;
        let one = prepared.judge(&one, "cpu alone");
        let vacuous = |failure: &Failure| matches!(failure.cause, Cause::Vacuous(_));
        if let Err(failure) = one.within(&prepared.dense_limit()) {
            prop_assert!(vacuous(&failure), "alone\n{failure}");
            return Ok(());
        }
        if let Err(failure) = prepared.judge(&whole, "cpu together").within(&prepared.parallel_limit(&one)) {
            prop_assert!(vacuous(&failure), "{failure}");
        }
    }
}

/// The same rows on a session: at the owners, on one rank, on all ranks, and from queries that all
/// ranks pass.
#[test]
fn a_session_brings_results_to_the_ranks_that_want_them() {
    let rows = |tokens: std::ops::Range<usize>, heads: usize, factor: f32| {
        let first = tokens.start * heads * 8;
        let values = (first..tokens.end * heads * 8).map(|index| (index as f32 * factor).sin()).collect();
        Tensor::new([1, tokens.len(), heads, 8], values).unwrap()
    };
    let own = [0..3, 3..3, 3..10];
    let outputs = on_threads(in_process_group(3), |transport| {
        let rank = transport.rank();
        let mine = own[rank.0 as usize].clone();
        let mut session = Session::new(transport, Device::cpu());
        let (k, v) = (rows(mine.clone(), 2, 0.3), rows(mine.clone(), 2, 0.7));
        let mut attend = |q: &Tensor, execution: Execution| {
            let call = Attention::new().mask(Mask::causal()).execution(execution);
            let output = session.attend(&call, q, &k, &v).unwrap();
            assert_eq!(output.lse.shape()[..3], output.o.shape()[..3]);
            (output.o.to_vec::<f32>().unwrap(), output.lse.to_vec::<f32>().unwrap())
        };
        let q = rows(mine, 4, 0.11);
        let owner = attend(&q, Execution::new());
        let one = attend(&q, Execution::new().results(Results::One(Rank(2))));
        let all = attend(&q, Execution::new().results(Results::All));
        let same = attend(&rows(0..10, 4, 0.11), Execution::new().same_queries());
        [owner, one, all, same]
    });
    let gathered: Vec<f32> = outputs.iter().flat_map(|[owner, ..]| owner.0.clone()).collect();
    let lse: Vec<f32> = outputs.iter().flat_map(|[owner, ..]| owner.1.clone()).collect();
    for (rank, [_, one, all, same]) in outputs.iter().enumerate() {
        assert_eq!(*all, (gathered.clone(), lse.clone()));
        assert_eq!(*one, if rank == 2 { all.clone() } else { (vec![], vec![]) });
        // Other sums, so other roundings.
        let far = same.0.iter().zip(&gathered).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 1e-5 && same.0.len() == gathered.len(), "{far}");
    }
}

fn problem() -> kyklos::AttentionProblem {
    let problem = kyklos::AttentionProblem::new([1, 40, 4, 2, 8], Dtype::F32, Mask::causal()).unwrap();
    problem.with_queries(3, 37).unwrap().with_same_queries(true).unwrap()
}

/// One state travels from each rank to each other one, and nothing else: the closed form.
#[test]
fn only_running_states_travel() {
    let mesh = Mesh::new(1, 4).unwrap();
    let set =
        plan_forward(&problem(), mesh, PlacementKind::Contiguous, &Split::Even, Strategy::PassQ).unwrap();
    let state = 3 * 4 * (8 * 4 + 8);
    for check in check(&set).unwrap() {
        assert_eq!((check.messages_sent, check.bytes_sent), (3, 3 * state));
    }
    let priced =
        meshes_by_bytes(&problem(), 4, PlacementKind::Contiguous, &Split::Even, Some(Strategy::PassQ));
    assert_eq!(priced.unwrap(), [(mesh, 4 * 3 * state)]);
}

#[test]
fn strategies_that_would_send_queries_or_keys_are_refused() {
    let mesh = Mesh::new(1, 4).unwrap();
    for strategy in Strategy::ALL.into_iter().filter(|strategy| strategy.accepts(mesh).is_ok()) {
        let set = plan_forward(&problem(), mesh, PlacementKind::Contiguous, &Split::Even, strategy);
        match strategy {
            Strategy::PassQ => assert!(set.is_ok()),
            other => {
                let error = set.unwrap_err().to_string();
                assert!(error.contains("all queries on every rank"), "{other}: {error}");
            }
        }
    }
}

/// The planted bugs: a state that changes after it was sent, that is merged twice, or that is left
/// out.
#[test]
fn wrong_plans_are_caught() {
    let mesh = Mesh::new(1, 3).unwrap();
    let set =
        || plan_forward(&problem(), mesh, PlacementKind::Contiguous, &Split::Even, Strategy::PassQ).unwrap();
    assert!(ProvedPlans::new(set()).is_ok());
    type Bug = fn(&mut Vec<Step>);
    let merge = |steps: &[Step]| steps.iter().position(|step| matches!(step, Step::Merge { .. })).unwrap();
    let bugs: [(&str, Bug); 3] = [
        ("attends again", |steps| {
            let attend = steps.iter().find(|step| matches!(step, Step::Attend { .. })).unwrap().clone();
            let exchange = steps.iter().position(|step| matches!(step, Step::Exchange { .. })).unwrap();
            steps.insert(exchange + 1, attend);
        }),
        ("is changed after it was sent", |steps| {
            let sent = steps.iter().find_map(|step| match step {
                Step::Exchange { sends, .. } => Some(sends[0].parts[0].buffer),
                _ => None,
            });
            for step in steps {
                if let Step::Merge { into, from } = step
                    && *from != sent.unwrap()
                {
                    *into = sent.unwrap();
                    break;
                }
            }
        }),
        ("was never met", |steps| {
            let at = steps.iter().rposition(|step| matches!(step, Step::Merge { .. })).unwrap();
            steps.remove(at);
        }),
    ];
    for (bug, plant) in bugs {
        let mut set = set();
        plant(&mut set.plans[1].steps);
        assert!(ProvedPlans::new(set).is_err(), "{bug} is not caught");
    }
    let mut twice = set();
    let steps = &mut twice.plans[Rank(1).0 as usize].steps;
    let again = steps[merge(steps)].clone();
    steps.insert(merge(steps), again);
    assert!(ProvedPlans::new(twice).is_err());
}
