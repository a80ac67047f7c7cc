//! Inputs that are used with other plans or devices than those for which they were loaded.

use std::sync::Arc;

use bytes::Bytes;
use kyklos::backend::Device;
use kyklos::host::{Tensors, shard};
use kyklos::local::on_threads;
use kyklos::plan::ProvedPlans;
use kyklos::{
    AttentionProblem, BiasKind, BiasTensor, Dtype, Error, Mask, Mesh, PlacementKind, Session, Split,
    Strategy, plan_world,
};
use kyklos_transport::{Rank, TransportError, in_process_group};

fn problem() -> AttentionProblem {
    AttentionProblem::new([1, 32, 4, 2, 16], Dtype::F32, Mask::causal()).unwrap()
}

fn plans(
    problem: &AttentionProblem,
    mesh: Mesh,
    kind: PlacementKind,
    strategy: Strategy,
) -> Arc<ProvedPlans> {
    let world = plan_world(problem, mesh, kind, &Split::Even, strategy).unwrap();
    Arc::new(ProvedPlans::new(world).unwrap())
}

/// Zeros, as inputs of `rank`.
fn part(plans: &ProvedPlans, rank: Rank) -> Tensors {
    let problem = &plans.world().problem;
    let zeros = |heads: u32| Bytes::from(vec![0; (32 * heads * 16) as usize * problem.dtype.bytes()]);
    let bias =
        problem.bias.map(|bias| vec![0; bias.bytes(problem.dtype, problem.q_len, problem.kv_len) as usize]);
    let kv = zeros(problem.kv_heads);
    let whole = Tensors { q: zeros(problem.q_heads), k: kv.clone(), v: kv, bias: bias.map(Into::into) };
    shard(plans.world(), rank, &whole).unwrap()
}

/// Rank 1 of two runs plans on inputs that do not fit them; then both run plans on inputs that do.
#[test]
fn inputs_of_other_tokens_extents_or_devices_are_refused_before_data_moves() {
    let line = Mesh::new(1, 2).unwrap();
    let ring = |problem: &AttentionProblem| plans(problem, line, PlacementKind::Contiguous, Strategy::Ring);
    let right = ring(&problem());
    let biased = BiasTensor { kind: BiasKind::Additive, batch: 1, heads: 1, shared_rows: false };
    let more_heads = AttentionProblem::new([1, 32, 2, 2, 16], Dtype::F32, Mask::causal()).unwrap();
    let wrong = [
        (plans(&problem(), line, PlacementKind::Striped, Strategy::Ring), "queries"),
        (ring(&problem().with_bias(Some(biased)).unwrap()), "attention bias tensor"),
        (ring(&AttentionProblem { dtype: Dtype::F16, ..problem() }), "f16"),
        (ring(&more_heads), "2 query heads"),
    ];
    let errors = on_threads(in_process_group(2), |transport| {
        let odd = transport.rank().0 == 1;
        let device = Device::cpu();
        let mut session = Session::new(transport.clone(), device.clone());
        pollster::block_on(async {
            let mut inputs = session.load(&right, part(&right, transport.rank())).await.unwrap();
            let mut errors = Vec::new();
            for (plans, _) in &wrong {
                let mut others = session.load(plans, part(plans, transport.rank())).await.unwrap();
                let inputs = if odd { &mut others } else { &mut inputs };
                errors.push(session.run(&right, inputs).await.unwrap_err());
            }
            let mut neighbour = Session::new(in_process_group(2).remove(0), Device::cpu());
            let mut elsewhere = neighbour.load(&right, part(&right, transport.rank())).await.unwrap();
            let chosen = if odd { &mut elsewhere } else { &mut inputs };
            errors.push(session.run(&right, chosen).await.unwrap_err());
            let output = session.run(&right, &mut inputs).await.unwrap();
            // Plans with another strategy, in which the ranks have the same tokens.
            let ulysses =
                plans(&problem(), Mesh::new(2, 1).unwrap(), PlacementKind::Contiguous, Strategy::Ulysses);
            let again = session.run(&ulysses, &mut inputs).await.unwrap();
            assert_eq!(again.o.len(), output.o.len());
            errors
        })
    });
    let words = wrong.iter().map(|(_, words)| *words).chain(["which is not the device of the session"]);
    for ((theirs, own), words) in errors[0].iter().zip(&errors[1]).zip(words) {
        assert!(own.is_request() && own.to_string().contains(words), "{own}");
        assert!(matches!(theirs, Error::Transport(TransportError::Refused { .. })), "{theirs:?}");
        assert!(theirs.to_string().contains(&format!("rank 1: {own}")), "{theirs} does not tell {own}");
    }
}
