//! Faults that other programs have had in backward passes, each with a test by its name. All are
//! held on the CPU backend.

use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos::{
    Attention, Dtype, Execution, Mask, Mesh, PlacementKind, Saved, Session, Split, Strategy, Tensor,
    deal_tokens,
};
use kyklos_backend_suite::GradientCase;
use kyklos_oracle::inputs::Case;
use kyklos_oracle::oracle::{Oracle, OracleMask, OracleProblem, Values};
use kyklos_transport::in_process_group;

use super::alone;
use super::prepared::{OnSessions, Sharing};

/// How ranks share a case.
struct Ranks<'a> {
    mesh: (u32, u32),
    kind: PlacementKind,
    strategy: Strategy,
    weights: &'a [f64],
}

/// Batch, queries, keys; query heads, KV heads, head dim.
fn case(
    name: &'static str,
    [batch, q_len, kv_len]: [usize; 3],
    [q_heads, kv_heads, head_dim]: [usize; 3],
) -> Case {
    let problem = OracleProblem {
        batch,
        q_len,
        kv_len,
        q_heads,
        kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f64).sqrt(),
        softcap: None,
        mask: OracleMask::causal(),
        q_offset: (kv_len - q_len) as u64,
        sinks: Vec::new(),
    };
    Case { name, seed: 29, problem, poison: Vec::new(), bias: None }
}

/// The case agrees with the oracle on one rank, and on several ranks as well as on one, with all
/// gradients.
fn holds(case: Case, dtype: Dtype, ranks: &Ranks<'_>) {
    let case = GradientCase::new(case, dtype);
    let errors = case.run(in_process_group(1), &alone(&case, &Device::cpu()));
    for (error, limit) in errors.iter().zip(case.dense_limits()) {
        error.within(&limit).unwrap_or_else(|fault| panic!("alone: {fault}"));
    }
    let mesh = Mesh::new(ranks.mesh.0, ranks.mesh.1).unwrap();
    let split = Split::Weights(ranks.weights.to_vec());
    let (q, kv) = deal_tokens(&case.prepared.problem, mesh, ranks.kind, &split).unwrap();
    let execution = Execution::new().strategy(ranks.strategy);
    let sharing = Sharing { mesh, q, kv, forward: ranks.strategy, execution, device: Device::cpu() };
    let together = case.run(in_process_group(mesh.size()), &sharing);
    for (error, limit) in together.iter().zip(case.parallel_limits(&errors)) {
        error.within(&limit).unwrap_or_else(|fault| panic!("{} on {mesh}: {fault}", ranks.strategy));
    }
}

const RING: Ranks<'_> = Ranks {
    mesh: (1, 3),
    kind: PlacementKind::Contiguous,
    strategy: Strategy::Ring,
    weights: &[5.0, 1.0, 3.0],
};

/// diffusers #14265: every hop used the keys of hop 0.
#[test]
fn each_hop_uses_its_own_keys() {
    holds(case("unlike shards", [1, 150, 150], [4, 2, 24]), Dtype::F32, &RING);
}

/// tt-metal #53216: a block used its own output and log-sum-exp instead of those of all keys; dV
/// was right.
#[test]
fn each_block_uses_the_log_sum_exp_of_all_keys() {
    let mut full = case("full", [1, 96, 96], [2, 2, 16]);
    full.problem.mask = OracleMask::full();
    holds(full, Dtype::Bf16, &RING);
}

/// TransformerEngine: a half that arrives first was added where it had to be copied.
#[test]
fn halves_of_a_zigzag_are_added_to_zeros() {
    let mesh = Mesh::new(RING.mesh.0, RING.mesh.1).unwrap();
    let fits = |strategy: &Strategy| strategy.accepts(mesh).is_ok() && !strategy.moves_queries();
    for strategy in Strategy::ALL.into_iter().filter(fits) {
        let ranks = Ranks { kind: PlacementKind::Zigzag, strategy, ..RING };
        holds(case("zigzag", [1, 170, 170], [2, 1, 16]), Dtype::F32, &ranks);
    }
}

/// flash-attention #1936: rows beyond the last one of a tile had no statistics.
#[test]
fn rows_beyond_the_last_tile_add_nothing() {
    for rows in [1, 95, 97, 193] {
        holds(case("odd rows", [1, rows, 200], [2, 2, 16]), Dtype::F32, &RING);
    }
}

/// TransformerEngine #3216: wrong with a batch of two or more.
#[test]
fn every_batch_entry_has_its_own_gradients() {
    holds(case("batch of three", [3, 61, 80], [4, 2, 16]), Dtype::F16, &RING);
}

/// levanter #449: heads that share keys were not summed. In others, the map from query heads
/// differed between dQ and dK.
#[test]
fn all_query_heads_of_a_group_add_to_their_keys() {
    for heads in [[6, 2, 16], [6, 3, 16], [4, 1, 16]] {
        let ranks = Ranks { mesh: (2, 1), strategy: Strategy::Ulysses, weights: &[1.0, 2.0], ..RING };
        holds(case("shared heads", [1, 70, 70], heads), Dtype::F32, &ranks);
        holds(case("shared heads", [1, 70, 70], heads), Dtype::F32, &RING);
    }
}

/// flash-attention #2402: the slope of the softcap was missing.
#[test]
fn the_slope_of_the_softcap_counts_at_five_caps() {
    let mut capped = case("softcap", [1, 90, 90], [2, 2, 16]);
    capped.problem.softcap = Some(0.5);
    capped.problem.scale *= 2.5;
    holds(capped, Dtype::F32, &RING);
}

/// prime-rl #3397: sinks had no gradient, or that of one rank.
#[test]
fn sinks_get_the_sum_of_all_ranks() {
    let mut sinks = case("sinks", [1, 90, 90], [4, 2, 16]);
    sinks.problem.sinks = vec![4.0, 3.0, 5.0, 4.5];
    holds(sinks, Dtype::F32, &RING);
}

/// DeepSpeed #8316: heads that do not divide by the ranks were forgotten on the way back.
#[test]
fn three_heads_on_two_ranks_come_back() {
    let ranks = Ranks { mesh: (2, 1), strategy: Strategy::Ulysses, weights: &[2.0, 1.0], ..RING };
    holds(case("three heads", [1, 50, 50], [3, 3, 16]), Dtype::F32, &ranks);
}

/// Sums in a 16-bit type lose what many ranks add. The error of f16 on 8 ranks stays within what
/// one rank has.
#[test]
fn sums_of_many_ranks_are_not_rounded_on_the_way() {
    let weights = [1.0; 8];
    let ranks = Ranks { mesh: (1, 8), weights: &weights, ..RING };
    let mut full = case("eight ranks", [1, 256, 256], [2, 2, 16]);
    full.problem.mask = OracleMask::full();
    for dtype in [Dtype::F16, Dtype::Bf16] {
        holds(full.clone(), dtype, &ranks);
    }
}

/// PyTorch #196678: keys beyond the last one scored 0; with a log-sum-exp below −88.7 their weights
/// were infinite.
#[test]
fn keys_beyond_the_last_one_have_no_weight_however_low_the_logits_are() {
    const TOKENS: usize = 64;
    const DIM: usize = 8;
    let made = |sign: f32| -> Vec<f32> {
        (0..TOKENS * DIM).map(|index| sign * (8.4 + (index % 13) as f32 * 0.01)).collect()
    };
    // Logits of about −200.
    let (q, k, v) = (made(1.0), made(-1.0), made(0.1));
    let problem =
        OracleProblem { mask: OracleMask::full(), ..case("", [1, TOKENS, TOKENS], [1, 1, DIM]).problem };
    let oracle = Oracle::new(&problem, Values::F32(&q), Values::F32(&k), Values::F32(&v)).unwrap();
    assert!(oracle.row(0, 0, 0).1 < -190.0);
    let d_o: Vec<f32> = (0..TOKENS * DIM).map(|index| (index % 7) as f32 - 3.0).collect();
    let right = oracle.gradients(Values::F32(&d_o), None).unwrap();
    let done = on_threads(in_process_group(1), |transport| {
        let tensor = |values: &[f32]| Tensor::new([1, TOKENS, 1, DIM], values.to_vec()).unwrap();
        let (q, k, v, d_o) = (tensor(&q), tensor(&k), tensor(&v), tensor(&d_o));
        let mut session = Session::new(transport, Device::cpu());
        let call = Attention::new().mask(Mask::full());
        let output = session.attend(&call, &q, &k, &v).unwrap();
        let saved = Saved { q, k, v, o: output.o, lse: output.lse_pair };
        session.backward(&call, &saved, &d_o, None).unwrap()
    });
    for (found, right) in [(&done[0].dq, right.dq), (&done[0].dk, right.dk), (&done[0].dv, right.dv)] {
        let largest = right.iter().fold(0.0_f64, |most, value| most.max(value.abs()));
        for (found, right) in found.to_vec::<f32>().unwrap().into_iter().zip(right) {
            // An f32 logit of 200 is off by up to 1e-5, and so are weights. Keys are nearly alike, so
            // products of size 0.5 cancel in dQ.
            assert!((f64::from(found) - right).abs() <= 1e-3 * largest + 1e-5, "{found} for {right}");
        }
    }
}

/// flash-attention #2510 and #2549: "deterministic" was ignored, or a race.
#[test]
fn twenty_runs_at_the_same_time_as_other_work_give_the_same_bytes() {
    let runs = crate::amount::amount(20, 100);
    let case = GradientCase::new(case("again", [1, 300, 300], [4, 1, 16]), Dtype::F32);
    let mesh = Mesh::new(1, 3).unwrap();
    let (q, kv) = deal_tokens(&case.prepared.problem, mesh, PlacementKind::Zigzag, &Split::Even).unwrap();
    let execution = Execution::new().strategy(Strategy::Ring);
    let sharing = Sharing { mesh, q, kv, forward: Strategy::Ring, execution, device: Device::cpu() };
    let first = case.gradients(in_process_group(3), &sharing);
    let other = std::sync::atomic::AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while other.load(std::sync::atomic::Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        for _ in 0..runs {
            let again = case.gradients(in_process_group(3), &sharing);
            let same = first[..3] == again[..3];
            if !same {
                other.store(false, std::sync::atomic::Ordering::Relaxed);
            }
            assert!(same, "other bytes");
        }
        other.store(false, std::sync::atomic::Ordering::Relaxed);
    });
}
