//! Calls of sessions: lengths by agreement, cached plans, tensors as views and on devices.

mod dropped;
mod many;
mod planned;
mod refusals;
mod share;

use std::sync::Arc;

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::{Tensors, bias_layout, layouts, shard};
use kyklos::local::on_threads;
use kyklos::plan::{PlanSet, ProvedPlans};
use kyklos::{
    Attention, AttentionProblem, BiasKind, Dtype, Execution, Mask, Mesh, Placement, PlacementKind, Session,
    Split, Strategy, Tensor, plan_forward, plan_placed,
};
use kyklos_backend_suite::{Prepared, RankOutput, Whole, attend_planned};
use kyklos_oracle::inputs::cases;
use kyklos_transport::quic::quic_loopback_group;
use kyklos_transport::{Group, Rank, in_process_group};

use crate::amount::amount;
use crate::common::run_set;

/// The call of a problem.
fn call_of(problem: &AttentionProblem, execution: Execution) -> Attention {
    let call = Attention::new()
        .mask(problem.mask.clone())
        .scale(problem.scale)
        .sinks(problem.sinks.clone())
        .q_offset(problem.q_offset)
        .execution(execution);
    match problem.softcap {
        Some(softcap) => call.softcap(softcap),
        None => call,
    }
}

/// Token counts that differ from rank to rank; some ranks have none.
fn uneven(total: u32, ranks: u32, seed: u32) -> Split {
    let mut left = total;
    let mut counts: Vec<u32> = (0..ranks - 1)
        .map(|rank| {
            let count = (total * ((rank + seed) % 3) / ranks).min(left);
            left -= count;
            count
        })
        .collect();
    counts.push(left);
    Split::Tokens(counts)
}

/// Runs a case on sessions, with uneven counts of queries and, separately, of keys.
fn attend(prepared: &Prepared, mesh: Mesh, kind: PlacementKind, strategy: Strategy, seed: u32) -> Whole {
    let problem = &prepared.problem;
    let place = |total, seed| Placement::new(kind, mesh, total, &uneven(total, mesh.size(), seed)).unwrap();
    let (q, kv) = (place(problem.q_len, seed), place(problem.kv_len, seed + 1));
    let set = plan_placed(problem, mesh, q.clone(), kv.clone(), strategy).unwrap();
    let execution = Execution::new().mesh(mesh).strategy(strategy);
    // Where documents are dealt depends on the mask too, which this function does not tell the dealer.
    let execution = match kind {
        PlacementKind::PerDocument => execution.owners(q, kv),
        kind => execution.placement(kind),
    };
    let outputs = on_threads(in_process_group(mesh.size()), |transport| {
        let (q, k, v) = parts(prepared, &set, transport.rank());
        let mut call = call_of(problem, execution.clone());
        if let (Some(bias), Some(rows)) = (problem.bias, prepared.tensors.bias.as_ref()) {
            let own = match bias.shared_rows {
                true => rows.clone(),
                false => {
                    let own = set.q_placement.of_rank(transport.rank());
                    bias_layout(&set).unwrap().gather(rows, own).unwrap()
                }
            };
            // Numbers may be a tensor, too.
            let is_tensor =
                bias.kind == BiasKind::Additive && !bias.shared_rows && transport.rank().0 % 2 == 0;
            let keys = bias.row_elements(problem.dtype, problem.kv_len) as u32;
            call = if is_tensor && keys == problem.kv_len {
                let rows = own.len()
                    / bias.row_bytes(problem.dtype, problem.kv_len)
                    / (bias.batch * bias.heads) as usize;
                let shape = [bias.batch as usize, rows, bias.heads as usize, keys as usize];
                call.bias_tensor(&Tensor::from_bytes(shape, problem.dtype, own).unwrap()).unwrap()
            } else {
                call.bias(bias, own)
            };
        }
        let output = Session::new(transport, Device::cpu()).attend(&call, &q, &k, &v).unwrap();
        pollster::block_on(RankOutput::of(output)).unwrap()
    });
    let mut whole = Whole::new(&set);
    outputs.iter().enumerate().for_each(|(rank, output)| whole.add(&set, rank, output));
    whole
}

fn parts(prepared: &Prepared, set: &PlanSet, rank: Rank) -> (Tensor, Tensor, Tensor) {
    let problem = &prepared.problem;
    let (q_layout, kv_layout) = layouts(set);
    let (q_tokens, kv_tokens) = (set.q_placement.of_rank(rank), set.kv_placement.of_rank(rank));
    let tensor = |bytes: Bytes, tokens: usize, heads: u32| {
        let shape = [problem.batch as usize, tokens, heads as usize, problem.head_dim as usize];
        Tensor::from_bytes(shape, problem.dtype, bytes).unwrap()
    };
    let kv = |whole: &Bytes| {
        tensor(kv_layout.gather(whole, kv_tokens).unwrap(), kv_tokens.len(), problem.kv_heads)
    };
    let q = q_layout.gather(&prepared.tensors.q, q_tokens).unwrap();
    (tensor(q, q_tokens.len(), problem.q_heads), kv(&prepared.tensors.k), kv(&prepared.tensors.v))
}

#[test]
fn calls_agree_with_the_oracle_for_any_counts_of_queries_and_keys() {
    let meshes = [(1, 1), (1, 3), (2, 1), (2, 2)];
    let step = amount(5, 1);
    for (index, case) in cases().into_iter().enumerate().filter(|(index, _)| index % step == 0) {
        let prepared = Prepared::new(case, Dtype::ALL[index % 3]);
        let alone = crate::strategies::run_on_cpu(&crate::strategies::dense(&prepared.problem), &prepared);
        let limit = prepared.parallel_limit(&prepared.judge(&alone, "cpu alone"));
        for (turn, (ulysses, ring)) in meshes.into_iter().enumerate() {
            let mesh = Mesh::new(ulysses.min(prepared.problem.q_heads), ring).unwrap();
            let kind = PlacementKind::ALL[(index + turn) % PlacementKind::ALL.len()];
            let whole = attend(&prepared, mesh, kind, Strategy::of_mesh(mesh), turn as u32);
            prepared.judge(&whole, &format!("a session on {mesh}, {kind}")).assert_within(&limit);
        }
    }
}

pub(super) fn made_up(tokens: usize, heads: usize, seed: f32) -> Tensor {
    let values = (0..tokens * heads * 16).map(|index| (index as f32 * 0.37 + seed).sin()).collect();
    Tensor::new([1, tokens, heads, 16], values).unwrap()
}

pub(super) fn both(transports: Vec<Group>) -> Vec<Group> {
    assert_eq!(transports.len(), 2);
    transports
}

#[test]
fn the_second_call_of_a_shape_makes_no_plan_and_gives_the_same_bytes() {
    for group in [in_process_group(2), quic_loopback_group(2).unwrap()] {
        let made = on_threads(both(group), |transport| {
            let tokens = 5 + transport.rank().0 as usize;
            let mut session = Session::new(transport, Device::cpu());
            let mut attend = |tokens: usize, label: &str| {
                let (q, kv) = (made_up(tokens, 4, 0.1), made_up(tokens, 2, 0.2));
                let call = Attention::new().mask(Mask::causal()).label(label);
                let output = session.attend(&call, &q, &kv, &kv).unwrap();
                (session.plans_made(), output.o.to_vec::<f32>().unwrap())
            };
            let first = attend(tokens, "layer 0");
            let again = attend(tokens, "layer 1");
            assert_eq!(first.1, again.1);
            let other = attend(tokens + 1, "layer 2");
            let back = attend(tokens, "layer 3");
            [first.0, again.0, other.0, back.0]
        });
        assert_eq!(made, [[1, 1, 2, 2]; 2]);
    }
}

#[test]
fn plans_of_many_shapes_are_dropped_and_made_again() {
    let made = on_threads(in_process_group(2), |transport| {
        let mut session = Session::new(transport, Device::cpu());
        let mut attend = |tokens: usize| {
            let x = made_up(tokens, 2, 0.3);
            session.attend(&Attention::new(), &x, &x, &x).unwrap();
            session.plans_made()
        };
        (1..=40).for_each(|tokens| assert_eq!(attend(tokens), tokens as u64));
        [attend(40), attend(1)]
    });
    assert_eq!(made, [[40, 41]; 2], "the oldest plan is gone, the last one is there");
}

#[test]
fn views_and_tensors_on_the_device_give_the_bytes_of_dense_host_tensors() {
    on_threads(in_process_group(2), |transport| {
        let device = Device::cpu();
        let mut session = Session::new(transport, device.clone());
        let tokens = 6;
        // [batch, heads, tokens, dim] in memory.
        let heads_first = |heads: usize, seed: f32| {
            let values: Vec<f32> =
                (0..tokens * heads * 16).map(|index| (index as f32 * 0.37 + seed).sin()).collect();
            Tensor::new([1, heads, tokens, 16], values).unwrap().swap_tokens_and_heads()
        };
        let (q, k, v) = (heads_first(4, 0.1), heads_first(2, 0.2), heads_first(2, 0.3));
        let dense = |view: &Tensor| Tensor::new(view.shape(), view.to_vec::<f32>().unwrap()).unwrap();
        let there = |tensor: &Tensor| tensor.to_device(&device).unwrap();
        let call = Attention::new().mask(Mask::causal());
        let mut attend = |q: &Tensor, k: &Tensor, v: &Tensor| {
            let output = session.attend(&call, q, k, v).unwrap();
            (output.o.to_vec::<f32>().unwrap(), output.lse.to_vec::<f32>().unwrap())
        };
        let right = attend(&dense(&q), &dense(&k), &dense(&v));
        assert_eq!(attend(&q, &k, &v), right);
        assert_eq!(attend(&there(&q), &there(&k), &v), right);
        let on_device = Tensor::new([1, 4, tokens, 16], vec![0.0_f32; 4 * tokens * 16]).unwrap();
        let on_device = on_device.to_device(&device).unwrap().swap_tokens_and_heads();
        assert_eq!(attend(&on_device, &k, &v).0.len(), right.0.len());
    });
}

#[test]
fn after_inputs_that_one_rank_refuses_all_ranks_can_run() {
    let case = cases().into_iter().find(|case| case.name == "two rows beyond four tiles").unwrap();
    let prepared = Prepared::new(case, Dtype::F32);
    let mesh = Mesh::new(1, 2).unwrap();
    let set = plan_forward(&prepared.problem, mesh, PlacementKind::Contiguous, &Split::Even, Strategy::Ring)
        .unwrap();
    let plans = Arc::new(ProvedPlans::new(set).unwrap());
    on_threads(in_process_group(2), |transport| {
        let part = shard(plans.set(), transport.rank(), &prepared.tensors).unwrap();
        let wrong = transport.rank().0 == 1;
        let mut session = Session::new(transport, Device::cpu());
        pollster::block_on(async {
            let q = if wrong { Bytes::new() } else { part.q.clone() };
            let first = attend_planned(&mut session, &plans, &Tensors { q, ..part.clone() }).await;
            let error = first.unwrap_err();
            assert!(error.is_request() && error.to_string().contains("rank 1 has 0 queries"), "{error}");
            attend_planned(&mut session, &plans, &part).await.unwrap();
        });
    });
}

/// Calls of changing shapes: results stay right, and memory does not grow with the number of calls.
/// In a process of its own: other tests use memory too.
#[test]
fn memory_stays_flat_over_calls_of_changing_shapes() {
    const ALONE: &str = "KYKLOS_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "session::memory_stays_flat_over_calls_of_changing_shapes";
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let output = alone.args(["--exact", name]).env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let calls: usize = amount(600, 10_000);
    on_threads(in_process_group(2), |transport| {
        let rank = transport.rank().0;
        let mut session = Session::new(transport, Device::cpu());
        let mut settled = None;
        for turn in 0..calls {
            // Counts that both ranks know, so that each can say what the other one holds.
            let count = |rank: u32| (turn * 7 + rank as usize * 11) % 50;
            let x = Tensor::new([1, count(rank), 2, 16], vec![0.5_f32; count(rank) * 32]).unwrap();
            let output = session.attend(&Attention::new(), &x, &x, &x).unwrap();
            // All keys are alike: exp(16 · 0.25 / 4) for each.
            let right = 1.0 + ((count(0) + count(1)) as f32).ln();
            for lse in output.lse.to_vec::<f32>().unwrap() {
                assert!((lse - right).abs() < 1e-4, "call {turn}: {lse}, not {right}");
            }
            if turn == calls / 3 {
                settled = resident_kib();
            }
        }
        if let (Some(settled), Some(now), 0) = (settled, resident_kib(), rank) {
            assert!(
                now < settled + 48 * 1024,
                "{settled} KiB after a third of the calls, {now} KiB at the end"
            );
        }
    });
}

/// Memory of this process; `None` where the system does not say.
fn resident_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// The same plan through the agreement of lengths and given beforehand.
#[test]
fn a_call_gives_the_bytes_of_the_plan_that_it_agrees_on() {
    let case = cases().into_iter().find(|case| case.name == "two rows beyond four tiles").unwrap();
    let prepared = Prepared::new(case, Dtype::F32);
    let mesh = Mesh::new(1, 3).unwrap();
    let whole = attend(&prepared, mesh, PlacementKind::Zigzag, Strategy::Ring, 0);
    let place =
        |total, seed| Placement::new(PlacementKind::Zigzag, mesh, total, &uneven(total, 3, seed)).unwrap();
    let problem = &prepared.problem;
    let set = plan_placed(problem, mesh, place(problem.q_len, 0), place(problem.kv_len, 1), Strategy::Ring)
        .unwrap();
    let given = run_set(&set, in_process_group(3), &prepared.tensors, Device::cpu).0;
    assert_eq!((whole.o, whole.lse), (given.o, given.lse));
}
