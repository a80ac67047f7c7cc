//! Sums in a fixed order: the same bytes on any mesh.

use kyklos::backend::Backend;
use kyklos::{Dtype, Mesh, PlacementKind, Split, Strategy, plan_forward};
use kyklos_oracle::inputs::Case;
use kyklos_oracle::oracle::{OracleMask, OracleProblem, OracleTerm};

use crate::{Prepared, Whole, dense_set, run_alone, run_together};

/// How a plan set is shared: mesh, tokens of each rank (an empty list means an even split),
/// placement, strategy.
pub type Shared = ((u32, u32), &'static [u32], PlacementKind, Strategy);

/// A case of `tokens` tokens. `of` changes it.
pub fn case(name: &'static str, tokens: usize, mask: OracleMask, of: impl FnOnce(&mut Case)) -> Case {
    let problem = OracleProblem {
        batch: 1,
        q_len: tokens,
        kv_len: tokens,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 32,
        scale: (32_f64).sqrt().recip(),
        softcap: None,
        mask,
        q_offset: 0,
        sinks: Vec::new(),
    };
    let mut case = Case { name, seed: tokens as u64, problem, poison: Vec::new(), bias: None };
    of(&mut case);
    case
}

/// Four tiles and a partial tile, over ranks with different numbers of tiles.
pub const UNEVEN: [Shared; 4] = [
    ((1, 2), &[512, 576], PlacementKind::Contiguous, Strategy::Ring),
    ((1, 3), &[256, 768, 64], PlacementKind::Contiguous, Strategy::Bidirectional),
    ((2, 2), &[100, 156, 415, 417], PlacementKind::Contiguous, Strategy::Chunked),
    ((1, 4), &[0, 256, 512, 320], PlacementKind::Contiguous, Strategy::Gather),
];

pub(crate) async fn same_bytes_on_any_mesh<B: Backend>(backend: &B, who: &str) {
    if let Err(error) = backend.supports_fixed_order() {
        assert!(matches!(error, kyklos::Error::Request { .. }), "{who}: {error}");
        return;
    }
    let mask = OracleMask::causal().and(OracleTerm::Window { left: 600, right: 0 });
    let prepared = Prepared::new(case("1088 tokens in a window", 1088, mask, |_| {}), Dtype::F32);
    fixed(backend, &prepared, &UNEVEN, who).await;
}

/// Runs a case in a fixed order alone and in each of these plan sets.
pub async fn fixed<B: Backend>(backend: &B, prepared: &Prepared, sets: &[Shared], who: &str) {
    let name = prepared.case.name;
    let problem = prepared.problem.clone().with_fixed_order(true).unwrap();
    let alone = run_alone(backend, &dense_set(&problem), prepared).await;
    let judged = prepared.judge(&alone, &format!("{who}, alone, in order"));
    let unordered = run_alone(backend, &dense_set(&prepared.problem), prepared).await;
    let limit = prepared.parallel_limit(&prepared.judge(&unordered, who));
    judged.assert_within(&limit);
    for (mesh, tokens, kind, strategy) in sets {
        let mesh = Mesh::new(mesh.0, mesh.1).unwrap();
        let split = if tokens.is_empty() { Split::Even } else { Split::Tokens(tokens.to_vec()) };
        let set = plan_forward(&problem, mesh, *kind, &split, *strategy)
            .unwrap_or_else(|error| panic!("{name} on {mesh} {kind} {strategy}: {error}"));
        kyklos::plan::check(&set).unwrap();
        let together = run_together(backend, &set, prepared).await;
        assert_same(&alone, &together, &format!("{who}: {name} on {mesh} {kind} {strategy}"));
    }
}

fn assert_same(alone: &Whole, together: &Whole, what: &str) {
    let other = alone.o.iter().zip(&together.o).filter(|(a, b)| a != b).count();
    assert!(other == 0, "{what}: {other} of {} bytes of o differ", alone.o.len());
    let bits = |lse: &[f32]| lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&alone.lse) == bits(&together.lse), "{what}: lse differs");
}
