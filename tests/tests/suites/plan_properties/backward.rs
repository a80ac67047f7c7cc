//! Backward plans over random problems: all are proved, send what a closed form says, and no
//! planted fault passes the proof.

use kyklos::plan::{BufferId, Content, PlanSet, ProvedPlans, Step, check};
use kyklos::{BiasKind, BiasTensor, Mesh, Strategy, WireFormat, plan_backward_placed};
use proptest::prelude::*;

use super::backward_bytes::closed_form;
use super::{Drawn, Random, sets};

/// The backward plan set with the owners of a forward one, where it has one.
fn backward(set: &PlanSet, seed: u64) -> Option<PlanSet> {
    let additive = set.problem.bias.is_some_and(|bias| bias.kind == BiasKind::Additive);
    let of_bias = additive && !seed.is_multiple_of(4);
    let problem = &set.problem.clone().with_bias_gradient(of_bias).expect("the bias is additive");
    if problem.wire == WireFormat::Int8 {
        return None;
    }
    // Strategies that move queries send no keys whose type could be another on the wire.
    let has_wire = |strategy| problem.wire == WireFormat::Same || !Strategy::moves_queries(strategy);
    let fits = |strategy: &Strategy| {
        // A row of the gradient of a bias is complete where its query is.
        let has_bias =
            !(of_bias && problem.bias.is_some_and(|bias| !bias.shared_rows) && strategy.moves_queries());
        strategy.has_backward() && strategy.accepts(set.mesh).is_ok() && has_wire(*strategy) && has_bias
    };
    let all: Vec<Strategy> = Strategy::ALL.into_iter().filter(fits).collect();
    let strategy = all[(seed % all.len() as u64) as usize];
    let (q, kv) = (set.q_placement.clone(), set.kv_placement.clone());
    Some(plan_backward_placed(problem, set.mesh, q, kv, strategy).expect("nothing is refused"))
}

type Fault = fn(&mut PlanSet, &mut Random) -> Option<&'static str>;

/// Each fault breaks a plan in one way. It returns none if the plan has nothing to break in this
/// way.
const FAULTS: &[Fault] = &[
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::AttendBackward(_)))?;
        set.plans[rank].steps.remove(step);
        Some("a block that is missing")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::AttendBackward(_)))?;
        let again = set.plans[rank].steps[step].clone();
        set.plans[rank].steps.insert(step, again);
        Some("a block counted twice")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Accumulate { .. }))?;
        let Step::Accumulate { from, .. } = set.plans[rank].steps[step] else { return None };
        if !matters(set, rank, from) {
            return None;
        }
        set.plans[rank].steps.remove(step);
        Some("a sum that is lost")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Accumulate { .. }))?;
        let again = set.plans[rank].steps[step].clone();
        // Zeros may be added twice.
        let Step::Accumulate { from, .. } = again else { return None };
        if !matters(set, rank, from) {
            return None;
        }
        set.plans[rank].steps.insert(step, again);
        Some("a sum added twice")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Accumulate { .. }))?;
        let steps = &mut set.plans[rank].steps;
        let Step::Accumulate { from, .. } = steps[step] else { return None };
        let arrives = |step: &Step| match step {
            Step::Exchange { recvs, .. } => recvs.iter().any(|recv| recv.parts.contains(&from)),
            _ => false,
        };
        let posted = steps.iter().position(arrives)?;
        let moved = steps.remove(step);
        steps.insert(posted + 1, moved);
        Some("a sum added before it has arrived")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Wait { .. }))?;
        set.plans[rank].steps.remove(step);
        Some("a wait that is missing")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::AttendBackward(_)))?;
        let own = set.plans[rank].kv;
        let plan = &mut set.plans[rank];
        let Step::AttendBackward(step) = &mut plan.steps[step] else { return None };
        let kv = &mut step.kv;
        // Both buffers begin with the keys that every rank holds.
        let same = kv.tokens.end <= set.problem.replicated.len();
        if same || plan.buffers[kv.buffer.0].tokens == plan.buffers[own.0].tokens {
            return None;
        }
        kv.buffer = own;
        Some("the keys of the first hop")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Exchange { .. }))?;
        let content = |id: BufferId, set: &PlanSet| set.plans[rank].buffer(id).content;
        let Step::Exchange { sends, .. } = &set.plans[rank].steps[step] else { return None };
        let send = sends.iter().position(|send| {
            let sums = [Content::KeyValueGradSum, Content::QueryGradSum, Content::BiasGradSum];
            send.parts.iter().any(|part| sums.contains(&content(part.buffer, set)))
        })?;
        let ranks = set.mesh.size();
        let Step::Exchange { sends, .. } = &mut set.plans[rank].steps[step] else { return None };
        sends[send].to = (sends[send].to + 1) % ranks;
        Some("a sum sent to another owner")
    },
    |set, random| {
        let rank = random.below(set.plans.len() as u32) as usize;
        let travels = |set: &PlanSet, index: usize| {
            set.plans[rank].steps.iter().any(|step| match step {
                Step::Exchange { sends, recvs, .. } => {
                    sends.iter().flat_map(|send| &send.parts).any(|part| part.buffer.0 == index)
                        || recvs.iter().any(|recv| recv.parts.contains(&BufferId(index)))
                }
                _ => false,
            })
        };
        let sums = |set: &PlanSet| -> Vec<usize> {
            let buffers = set.plans[rank].buffers.iter().enumerate();
            let declares = buffers.filter(|(_, buffer)| buffer.met.len() > 1).map(|(index, _)| index);
            declares.filter(|index| travels(set, *index)).collect()
        };
        let found = sums(set);
        let buffer = *found.get(random.below(found.len() as u32) as usize)?;
        let met = &mut set.plans[rank].buffers[buffer].met;
        *met = met.slice(1..met.len());
        Some("a sum that declares other queries")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::AttendBackward(_)))?;
        let plan = &mut set.plans[rank];
        let gradients = plan.gradients?;
        let Step::AttendBackward(step) = &mut plan.steps[step] else { return None };
        step.d_o.buffer = gradients.stats;
        Some("statistics for the gradient of the output")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::AttendBackward(_)))?;
        let plan = &mut set.plans[rank];
        let Step::AttendBackward(step) = &mut plan.steps[step] else { return None };
        let dq = &mut step.dq;
        let (name, tokens) = (plan.buffers[dq.0].name.clone(), plan.buffers[dq.0].tokens.clone());
        if tokens.len() < 2 {
            return None;
        }
        let other = kyklos::plan::Buffer {
            name,
            tokens: tokens.slice(1..tokens.len()),
            ..plan.buffers[dq.0].clone()
        };
        plan.buffers.push(other);
        *dq = BufferId(plan.buffers.len() - 1);
        Some("gradients of other queries")
    },
    |set, random| {
        let adds = |step: &Step| matches!(step, Step::AttendBackward(step) if step.d_bias.is_some());
        let (rank, step) = pick(set, random, adds)?;
        let own = set.plans[rank].bias?;
        let Step::AttendBackward(step) = &mut set.plans[rank].steps[step] else { return None };
        let d_bias = &mut step.d_bias;
        match random.below(3) {
            0 => *d_bias = None,
            1 => d_bias.as_mut()?.tokens.end -= 1,
            // Its rows of the bias itself.
            _ => d_bias.as_mut()?.buffer = own,
        }
        Some("the gradient of a bias in another place")
    },
    |set, random| {
        let rank = random.below(set.plans.len() as u32) as usize;
        set.plans[rank].gradients.as_mut()?.d_bias.take()?;
        Some("a gradient of a bias that nobody gets")
    },
    |set, random| {
        let rounds = |step: &Step| matches!(step, Step::Convert { .. });
        let (rank, step) = pick(set, random, rounds)?;
        let plan = &mut set.plans[rank];
        let Step::Convert { from, .. } = &plan.steps[step] else { return None };
        if plan.buffer(from.buffer).content != Content::KeyValueGradSum {
            return None;
        }
        let sum = from.buffer;
        let adds = |step: &Step| matches!(step, Step::AttendBackward(step) if step.d_kv.buffer == sum);
        let earlier = plan.steps.iter().position(adds)?;
        let moved = plan.steps.remove(step);
        plan.steps.insert(earlier, moved);
        Some("a sum rounded before it is complete")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Accumulate { .. }))?;
        let plan = &set.plans[rank];
        let Step::Accumulate { from, into } = plan.steps[step].clone() else { return None };
        let other = plan.steps[step + 1..].iter().find_map(|step| match step {
            Step::Accumulate { from: other, into: there } if *there == into => Some(*other),
            _ => None,
        })?;
        if !matters(set, rank, from) && !matters(set, rank, other) {
            return None;
        }
        set.plans[rank].steps[step] = Step::Accumulate { from: other, into };
        Some("the sum of one rank for that of another")
    },
    |set, random| {
        let (rank, step) = pick(set, random, |step| matches!(step, Step::Repack { .. }))?;
        let plan = &mut set.plans[rank];
        let Step::Repack { into, .. } = &plan.steps[step] else { return None };
        if plan.gradients?.d_kv != into.buffer {
            return None;
        }
        plan.steps.remove(step);
        Some("rows of a gradient that are not written")
    },
];

/// Whether a sum that was received, or copied, holds more than zeros.
fn matters(set: &PlanSet, rank: usize, sum: BufferId) -> bool {
    let (problem, buffer) = (&set.problem, set.plans[rank].buffer(sum));
    let (queries, keys) = match buffer.content {
        Content::QueryGradSum | Content::BiasGradSum => (&buffer.tokens, &buffer.met),
        _ => (&buffer.met, &buffer.tokens),
    };
    queries.iter().any(|query| {
        (0..problem.batch as usize).any(|entry| {
            let visible = problem.mask.visible(entry, problem.q_position(query), problem.kv_len);
            keys.iter().any(|key| visible.sees(key))
        })
    })
}

fn pick(set: &PlanSet, random: &mut Random, wanted: fn(&Step) -> bool) -> Option<(usize, usize)> {
    let rank = random.below(set.plans.len() as u32) as usize;
    let steps = &set.plans[rank].steps;
    let found: Vec<usize> = (0..steps.len()).filter(|step| wanted(&steps[*step])).collect();
    found.get(random.below(found.len() as u32) as usize).map(|step| (rank, *step))
}

proptest! {
    #![proptest_config(crate::cases(300, 3000))]

    #[test]
    fn every_backward_plan_is_proved_and_sends_what_the_closed_form_says(Drawn(set) in sets(), seed in any::<u64>()) {
        let Some(set) = backward(&set, seed) else { return Ok(()) };
        let checks = check(&set).map_err(|error| TestCaseError::fail(format!("{}: {error}", set.strategy)))?;
        let sent: u64 = checks.iter().map(|check| check.bytes_sent).sum();
        prop_assert_eq!(sent, closed_form(&set), "{}", set.strategy);
    }

    #[test]
    fn no_planted_fault_passes_the_proof_of_a_backward_plan(Drawn(set) in sets(), seed in any::<u64>()) {
        let Some(set) = backward(&set, seed) else { return Ok(()) };
        let mut random = Random(seed);
        for fault in FAULTS {
            let mut broken = set.clone();
            if let Some(what) = fault(&mut broken, &mut random) {
                prop_assert!(check(&broken).is_err(), "{what}, {}, passes", set.strategy);
            }
        }
    }
}

/// Every fault applies to some plan of a ring, with and without keys that every rank holds or a
/// bias, of pass-q or of a tree.
#[test]
fn every_fault_applies_and_is_found() {
    let problem =
        kyklos::AttentionProblem::new([1, 40, 4, 2, 8], kyklos::Dtype::F32, kyklos::Mask::full()).unwrap();
    let mesh = Mesh::new(1, 4).unwrap();
    let set = |problem: &kyklos::AttentionProblem, strategy| {
        let (kind, split) = (kyklos::PlacementKind::Contiguous, kyklos::Split::Even);
        kyklos::plan_backward(problem, mesh, kind, &split, strategy).unwrap()
    };
    let replicated = problem.clone().with_replicated(4..13).unwrap();
    let bias = BiasTensor { kind: BiasKind::Additive, batch: 1, heads: 1, shared_rows: false };
    let sets = [
        set(&problem, Strategy::Ring),
        set(&replicated, Strategy::Ring),
        set(&problem, Strategy::PassQ),
        set(&problem, Strategy::Tree),
        set(
            &problem.clone().with_bias(Some(bias)).unwrap().with_bias_gradient(true).unwrap(),
            Strategy::Ring,
        ),
    ];
    for set in &sets {
        assert_eq!(ProvedPlans::new(set.clone()).unwrap().checks().len(), 4);
    }
    for (index, fault) in FAULTS.iter().enumerate() {
        let applied = (0..200).filter_map(|seed| {
            let mut broken = sets[seed as usize % sets.len()].clone();
            fault(&mut broken, &mut Random(seed)).map(|what| (what, check(&broken)))
        });
        let applied: Vec<_> = applied.collect();
        assert!(!applied.is_empty(), "fault {index} never applies");
        for (what, result) in applied {
            assert!(result.is_err(), "{what} passes");
        }
    }
}
