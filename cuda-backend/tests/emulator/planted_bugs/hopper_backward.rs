//! Planted bugs in the kernels of the backward pass for Hopper.

use kyklos::Dtype;
use kyklos_backend_suite::GradientCase;
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::{OracleMask, OracleTerm};

use super::{Bug, Planted, bug, case};
use crate::backward_call::{BackwardCall, NanCall, gives_nothing, without_finite_logits};
use crate::equal_logits::{equal_logits, shares_are_equal};
use crate::job::Timing;
use crate::program::Program;

const FILE: &str = "backward_hopper.h";
const COMMON: &str = "hopper.h";

const BUGS: [Bug; 60] = [
    bug(
        "dK, dV: the rest of the log-sum-exp is left out",
        FILE,
        "bits_of(row.lift)",
        "bits_of(Lift<T>::EXPONENT)",
    ),
    bug("dQ: the rest of the log-sum-exp is left out", FILE, "rows[half].lift", "Lift<T>::EXPONENT"),
    bug("fixed rows are not waited for", FILE, "phase_wait(fixed_full(), 0);", ""),
    bug("moving tiles are not waited for", FILE, "phase_wait(full(stage), parity_of(step));", ""),
    bug(
        "a tile is copied before the previous one was read",
        FILE,
        "phase_wait(empty(stage), parity_of(step) ^ 1);",
        "",
    ),
    bug(
        "numbers are written before the previous ones were read",
        FILE,
        "phase_wait(Base::empty(stage), Base::parity_of(step) ^ 1);",
        "",
    ),
    bug(
        "the producer's first wait is for a future phase",
        FILE,
        "phase_wait(empty(stage), parity_of(step) ^ 1);",
        "phase_wait(empty(stage), parity_of(step));",
    ),
    bug("the parity of phases never changes", FILE, "step / STAGES % 2;", "0;"),
    bug(
        "fewer bytes of moving tiles are expected than copied",
        FILE,
        "phase_arrive_expecting(full(stage), PAIR_BYTES);",
        "phase_arrive_expecting(full(stage), TENSOR_BYTES);",
    ),
    bug(
        "the rows of one consumer are expected",
        FILE,
        "phase_arrive_expecting(fixed_full(), CONSUMERS * PAIR_BYTES);",
        "phase_arrive_expecting(fixed_full(), PAIR_BYTES);",
    ),
    bug(
        "the writers of numbers do not count",
        FILE,
        "phase_init(full(stage), 1 + WRITERS);",
        "phase_init(full(stage), 1);",
    ),
    bug(
        "one writer of numbers counts",
        FILE,
        "phase_init(full(stage), 1 + WRITERS);",
        "phase_init(full(stage), WRITERS ? WRITERS : 1);",
    ),
    bug(
        "a warp does not arrive after it has read",
        FILE,
        "phase_init(empty(stage), READERS);",
        "phase_init(empty(stage), READERS + 1);",
    ),
    bug(
        "half of the warps free a stage",
        FILE,
        "phase_init(empty(stage), READERS);",
        "phase_init(empty(stage), READERS / 2);",
    ),
    bug(
        "a stage is freed before its rows were added",
        FILE,
        "wgmma_wait<0>();\n        settle(scores);\n        settle(dp);\n        if (step > 0) release(empty(stage_of(step - 1)));",
        "if (step > 0) release(empty(stage_of(step - 1)));\n        wgmma_wait<0>();\n        settle(scores);\n        settle(dp);",
    ),
    bug(
        "the stage that is read is freed",
        FILE,
        "release(empty(stage_of(step - 1)))",
        "release(empty(stage))",
    ),
    bug("the first tile frees a stage", FILE, "if (step > 0) release", "release"),
    bug("the writers of numbers do not arrive", FILE, "release(Base::full(stage));", ""),
    bug(
        "tiles of one query head are counted",
        "backward/tiles.h",
        "return (end - head) * of_head;",
        "return of_head;",
    ),
    bug("S and dP are not waited for", FILE, "wgmma_wait<0>();\n        settle(scores);", "settle(scores);"),
    bug("no fence before S and dP", FILE, "wgmma_fence();\n        multiply<0>(scores", "multiply<0>(scores"),
    bug(
        "no fence before dK and dV",
        FILE,
        "settle(packed_ds);\n            wgmma_fence();",
        "settle(packed_ds);",
    ),
    bug("no fence before dQ", FILE, "settle(packed);\n            wgmma_fence();", "settle(packed);"),
    bug(
        "the last dK and dV are not waited for",
        FILE,
        "wgmma_wait<0>();\n        settle(dv);",
        "settle(dv);",
    ),
    bug("the last dQ is not waited for", FILE, "wgmma_wait<0>();\n        settle(dq);", "settle(dq);"),
    bug("S of the first 64 elements", FILE, "(i / 4 * CHUNK + i % 4 * 32)", "(i % 4 * 32)"),
    bug(
        "a wrong step along the elements of a row",
        FILE,
        "i / 4 * CHUNK + i % 4 * 32",
        "i / 4 * CHUNK + i % 4 * 16",
    ),
    bug(
        "a wrong stride between chunks of moving rows",
        FILE,
        "matrix_at(moving, CHUNK)",
        "matrix_at(moving, CHUNK / 2)",
    ),
    bug("a wrong step along moving rows", FILE, "right + i * 16 * 128 / 16", "right + i * 8 * 128 / 16"),
    bug("a wrong stride between eight rows", COMMON, "u64(1024 >> 4) << 32", "u64(2048 >> 4) << 32"),
    bug(
        "both consumers have the rows of the first",
        FILE,
        "matrix_at(fixed(consumer) + tensor * TENSOR_BYTES, 16)",
        "matrix_at(fixed(0) + tensor * TENSOR_BYTES, 16)",
    ),
    bug("both consumers are given the same rows", FILE, "first + c * ROWS, head", "first, head"),
    bug("dP of the first tensor", FILE, "multiply<1>(dp, held", "multiply<0>(dp, held"),
    bug(
        "both consumers hold the rows of the first",
        FILE,
        "rows = fixed(consumer) + tensor",
        "rows = fixed(0) + tensor",
    ),
    bug("the rows of one warp are held", FILE, "row = this->mine + lane % 16;", "row = lane % 16;"),
    bug("held rows without the swizzle", FILE, "((column ^ row) & 7) * 16", "column * 16"),
    bug("only the first tensor is held", FILE, "held[tensor < HELD ? tensor : 0][i]", "held[0][i]"),
    bug("dV from queries", FILE, "Base::add(dv, packed_p, d_o_from);", "Base::add(dv, packed_p, q_from);"),
    bug("dK from dP", FILE, "Base::add(dk, packed_ds, q_from);", "Base::add(dk, packed_p, q_from);"),
    bug(
        "dK without the scale",
        FILE,
        "dk, half, 0, Lift<T>::BACK / shrink[half], args.scale",
        "dk, half, 0, Lift<T>::BACK / shrink[half], 1.0f",
    ),
    bug(
        "dQ without the scale",
        FILE,
        "dq, half, 0, Lift<T>::BACK / shrink[half], args.scale",
        "dq, half, 0, Lift<T>::BACK / shrink[half], 1.0f",
    ),
    bug("dK, dV: no tile is tested against the mask", FILE, "tested = kind & EDGE || odd;", "tested = odd;"),
    bug("dQ: no tile is tested against the mask", FILE, "tested = !tiles.now.full() ||", "tested ="),
    bug("dK, dV: a span has one key less", FILE, "position >= load_shared(", "position > load_shared("),
    bug("dQ: a span has one key more", FILE, "position < row.span.hi", "position <= row.span.hi"),
    bug(
        "NaN in the rows of tested tiles",
        FILE,
        "kind & EDGE ? odd_in<Mine>(q_from, Base::PAIR_BYTES, Base::OWN + consumer)",
        "kind & EDGE ? false",
    ),
    bug(
        "a full tile with a row that counts for no key",
        FILE,
        "consumer) : kind & BLIND;",
        "consumer) : false;",
    ),
    bug("its other pairs are not tested", FILE, "tested = kind & EDGE || odd;", "tested = kind & EDGE;"),
    bug(
        "NaN in d_o stays",
        FILE,
        "clear_odd<Mine>(q_from, Base::PAIR_BYTES,",
        "clear_odd<Mine>(q_from, TENSOR_BYTES,",
    ),
    bug(
        "NaN in keys stays",
        FILE,
        "clear_odd<Mine>(k_from, TENSOR_BYTES, consumer, Base::CONSUMERS, Base::BOTH);",
        "",
    ),
    bug(
        "one consumer clears what the other one reads",
        COMMON,
        "named_sync(all, 128 * consumers);\n    for",
        "for",
    ),
    bug(
        "one consumer does not wait until the other one has cleared",
        COMMON,
        "stores_are_there();\n    named_sync(all, 128 * consumers);",
        "stores_are_there();",
    ),
    bug("both writers write the first rows", FILE, "n = writer * 32 + lane;", "n = lane;"),
    bug("one query head of the group", FILE, "args.readers[at.kv_head + 1]", "args.readers[at.kv_head] + 1"),
    bug("keys behind the last are written", FILE, "if (key >= attend.keys) continue;", ""),
    bug(
        "rows behind the last are written",
        FILE,
        "if (numbers[half].span.lo >= numbers[half].span.hi) continue;",
        "",
    ),
    bug(
        "a tile of keys has the list of another",
        FILE,
        "at.first / Base::FIXED)",
        "at.first / BACKWARD_TILE)",
    ),
    bug("dK, dV without softcap", FILE, "(this->bent ? BENT : 0)", "0"),
    bug("dQ without softcap", FILE, "if (this->bent)", "if (false)"),
    bug("rows of the KV head's number", FILE, "{ return tile.head; }", "{ return tile.head - tile.head; }"),
];

const INSTANCE: &str = "#include \"backward_hopper.h\"\n#include \"row_stats.h\"\n#include \"state.h\"\n\
    KERNEL(attend_f16_96, AttendArguments, (Attention<F16, 96>::THREADS)) { Attention<F16, 96>(args, Place(args)).run(); }\n\
    KERNEL(hopper_queries_f16_128, HopperBackwardArguments, (HopperQueries<F16, 128>::THREADS)) { HopperQueries<F16, 128>(args).run(); }\n\
    KERNEL(hopper_keys_f16_128, HopperBackwardArguments, (HopperKeys<F16, 128>::THREADS)) { HopperKeys<F16, 128>(args).run(); }\n\
    KERNEL(hopper_queries_f16_64, HopperBackwardArguments, (HopperQueries<F16, 64>::THREADS)) { HopperQueries<F16, 64>(args).run(); }\n\
    KERNEL(hopper_keys_f16_64, HopperBackwardArguments, (HopperKeys<F16, 64>::THREADS)) { HopperKeys<F16, 64>(args).run(); }\n\
    KERNEL(attend_f16_64, AttendArguments, (Attention<F16, 64>::THREADS)) { Attention<F16, 64>(args, Place(args)).run(); }\n\
    KERNEL(row_stats_f16, RowStatsArguments, ROW_STATS_THREADS) { row_stats<F16>(args); }\n\
    KERNEL(clear_words, ClearArguments, CLEAR_THREADS) { clear(args); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(finalize_f16, StateArguments, StateRow::THREADS) { finalize<F16>(args); }\n";

/// Padded to 128 elements, in two chunks.
fn wide(mut case: Case) -> Case {
    case.problem.head_dim = 72;
    case.problem.scale = 72.0_f64.sqrt().recip();
    case
}

/// In one chunk.
fn narrow(mut case: Case) -> Case {
    case.problem.head_dim = 48;
    case.problem.scale = 48.0_f64.sqrt().recip();
    case
}

/// Three query heads over one KV head, several tiles of both sides, full, partial and empty; more
/// than all stages hold.
fn causal(case: &mut Case) {
    (case.problem.q_len, case.problem.kv_len) = (133, 460);
    (case.problem.q_offset, case.problem.mask) = (330, OracleMask::causal());
}

/// Two batch entries, of which the second has fewer keys.
fn entries(case: &mut Case) {
    (case.problem.batch, case.problem.q_len, case.problem.kv_len) = (2, 70, 140);
    case.problem.mask = OracleMask::full().and(OracleTerm::Valid(vec![140, 66]));
}

fn softcap(case: &mut Case) {
    (case.problem.q_len, case.problem.kv_len) = (17, 70);
    (case.problem.softcap, case.problem.scale) = (Some(2.0), case.problem.scale * 3.0);
}

pub(super) fn kernels() -> Planted {
    let call = |halves, change: fn(&mut Case)| {
        BackwardCall::new(GradientCase::new(wide(case(change)), Dtype::F16), halves).on_hopper()
    };
    let padded = cases().into_iter().find(|case| case.name == "NaN in padding").unwrap();
    let scaled = GradientCase::of_scaled_loss(wide(case(causal)), Dtype::F16, 8192.0);
    let calls = [
        call(false, causal),
        call(true, entries),
        // Both tensors of the fixed rows are in registers.
        BackwardCall::new(GradientCase::new(narrow(case(causal)), Dtype::F16), false).on_hopper(),
        call(false, softcap),
        BackwardCall::new(GradientCase::new(wide(padded), Dtype::F16), false).on_hopper(),
        BackwardCall::new(scaled, false).on_hopper(),
    ];
    let nan = wide(case(causal));
    let nan = [12, 11].map(|element| NanCall::new(&nan, Dtype::F16, [40, element]).on_hopper());
    let dead = without_finite_logits(Dtype::F16, wide).on_hopper();
    // Of the instances of 128 elements.
    let equal = equal_logits(Dtype::F16, 1e20, false, |case| case.problem.head_dim = 72).on_hopper();
    let judge = move |program: &Program, timing: Timing| {
        calls.iter().try_for_each(|call| call.judge(program, timing).map(|_| ()))?;
        nan.iter().try_for_each(|call| call.judge(program, timing))?;
        shares_are_equal(&equal, program, timing)?;
        gives_nothing(&dead, program, timing)
    };
    Planted { name: "hopper backward", instance: INSTANCE, bugs: &BUGS, judge: Box::new(judge) }
}
