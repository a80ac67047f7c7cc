//! Planted bugs in the kernels of the backward pass.

use kyklos::Dtype;
use kyklos_backend_suite::GradientCase;
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::{OracleMask, OracleTerm};

use super::{Bug, Planted, bug, case};
use crate::backward_call::{BackwardCall, NanCall, gives_nothing, without_finite_logits};
use crate::equal_logits::{equal_logits, shares_are_equal};
use crate::job::Timing;
use crate::program::Program;
use crate::states::{adds_rows, pairs_are_exact, stats_are_exact};

const TILES: &str = "backward/tiles.h";
const QUERIES: &str = "backward/queries.h";
const KEYS: &str = "backward/keys.h";
/// The exponent's last term.
const LIFT: &str = "lift = fused(-stats[3], LOG2_E, Lift<T>::EXPONENT);";

const BUGS: [Bug; 32] = [
    bug("the rest of the log-sum-exp is left out", "backward/common.h", LIFT, ";"),
    bug("the log-sum-exp is one number", "backward/common.h", LIFT, "lse += stats[3];"),
    bug(
        "P of a logit with another rounding",
        TILES,
        "float x = product(score, scale), d",
        "float x = product(score, scale * LOG2_E) * 0.693147181f, d",
    ),
    bug("copies are not waited for", TILES, "copy_async_wait<0>();", ";"),
    bug("no barrier between copies and readers", TILES, "barrier_or(odd_here(stage, here))", "false"),
    bug(
        "the next tile goes to the stage that is read",
        TILES,
        "copy_moving(stage ^ 1, tiles)",
        "copy_moving(stage, tiles)",
    ),
    bug("P of a hidden pair is not selected", TILES, "score = hidden ? 0.0f : p;", "score = p;"),
    bug("dS of a hidden pair is not selected", TILES, "dp = hidden ? 0.0f : p * d;", "dp = p * d;"),
    bug("no slope of the softcap", TILES, "d *= fused(-t, t, 1.0f);", ";"),
    bug("no delta", TILES, "d = dp - delta;", "d = dp;"),
    bug("dS beyond the range of f16", TILES, "if (!Lift<T>::NARROW) return;", "return;"),
    bug("the sum so far keeps its factor", TILES, "acc[j][i] *= by;", ";"),
    bug(
        "the largest dS of two of four lanes",
        TILES,
        "of_row = larger(of_row, shuffle_xor(of_row, 2));",
        ";",
    ),
    bug("P keeps a factor", "backward/common.h", "BACK = 1.0f / 4096.0f", "BACK = 1.0f / 2048.0f"),
    bug(
        "moving rows in another order",
        TILES,
        "16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2",
        "16 * n + lane % 16, 2 * k + lane / 16",
    ),
    bug(
        "columns of fixed rows swapped",
        TILES,
        "mine + lane % 16, 2 * k + lane / 16",
        "mine + lane % 16, 2 * k + 1 - lane / 16",
    ),
    bug("moving rows are not transposed", TILES, "load_matrices_transposed(b,", "load_matrices(b,"),
    bug(
        "NaN of hidden pairs is multiplied by 0",
        TILES,
        "if (Mine::odd(u16(b[i]))) b[i] &= 0xffff0000u;",
        ";",
    ),
    bug("NaN reaches hidden pairs", TILES, "if (!seen(n, half)) continue;", ";"),
    bug("NaN reaches no pair", TILES, "acc[j][2 * half + 1] += weight * T::high(pair);", ";"),
    bug("a row without visible keys counts", "backward/common.h", "if (stats[0] == -EMPTY_M) return;", ";"),
    bug(
        "all batch entries have the mask of the first",
        "backward/common.h",
        "mask_class(args.classes > 1 ? batch : 0)",
        "mask_class(0)",
    ),
    bug(
        "a tile of rows has the list of another",
        QUERIES,
        "at(attend, first / BACKWARD_TILE,",
        "at(attend, block_x(),",
    ),
    bug("dQ: no tile is tested against the mask", QUERIES, "return !tile.now.full() ||", "return false &&"),
    bug("dQ without the scale", QUERIES, "shrink[half], args.scale", "shrink[half], 1.0f"),
    bug(
        "rows behind the last are written",
        QUERIES,
        "if (numbers[half].span.lo >= numbers[half].span.hi) continue;",
        ";",
    ),
    bug("one query head of the group", KEYS, "args.readers[at.kv_head + 1]", "args.readers[at.kv_head] + 1"),
    bug(
        "the numbers of rows are in one stage",
        KEYS,
        "store_shared(into + 2",
        "store_shared(shared_base() + 2 * Base::FIXED_BYTES + 2",
    ),
    bug("keys behind the last are written", KEYS, "if (key >= attend.keys) continue;", ";"),
    bug("dK, dV: no tile is tested against the mask", KEYS, "return !tile.now.full() ||", "return false &&"),
    bug(
        "a full tile with a row that counts for no key",
        KEYS,
        "if (!tested_in(tile)) return blind;",
        "if (!tested_in(tile)) return false;",
    ),
    bug("its other pairs are not tested", KEYS, "tested_in(tile) || odd", "tested_in(tile)"),
];

/// The kernels of one type and head dim, and all others that a call needs.
macro_rules! instance {
    ($type:literal, $name:literal, $dim:literal) => {
        concat!(
            "#include \"backward/keys.h\"\n#include \"backward/queries.h\"\n#include \"row_stats.h\"\n#include \"state.h\"\n",
            "KERNEL(attend_", $name, "_", $dim, ", AttendArguments, (Attention<", $type, ", ", $dim,
            ">::THREADS)) { Attention<", $type, ", ", $dim, ">(args, Place(args)).run(); }\n",
            "KERNEL(backward_queries_", $name, "_", $dim, ", BackwardArguments, (BackwardQueries<", $type, ", ", $dim,
            ">::THREADS)) { BackwardQueries<", $type, ", ", $dim, ">(args).run(); }\n",
            "KERNEL(backward_keys_", $name, "_", $dim, ", BackwardArguments, (BackwardKeys<", $type, ", ", $dim,
            ">::THREADS)) { BackwardKeys<", $type, ", ", $dim, ">(args).run(); }\n",
            "KERNEL(row_stats_", $name, ", RowStatsArguments, ROW_STATS_THREADS) { row_stats<", $type, ">(args); }\n",
            "KERNEL(clear_words, ClearArguments, CLEAR_THREADS) { clear(args); }\n",
            "KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n",
            "KERNEL(finalize_", $name, ", StateArguments, StateRow::THREADS) { finalize<", $type, ">(args); }\n",
        )
    };
}

/// Three query heads over one KV head, several tiles of both sides, full and partial.
fn causal(case: &mut Case) {
    (case.problem.q_len, case.problem.kv_len) = (133, 210);
    (case.problem.q_offset, case.problem.mask) = (77, OracleMask::causal());
}

fn softcap(case: &mut Case) {
    (case.problem.q_len, case.problem.kv_len) = (17, 70);
    (case.problem.softcap, case.problem.scale) = (Some(2.0), case.problem.scale * 3.0);
}

/// Two batch entries, of which the second has fewer keys.
fn entries(case: &mut Case) {
    (case.problem.batch, case.problem.q_len, case.problem.kv_len) = (2, 20, 140);
    case.problem.mask = OracleMask::full().and(OracleTerm::Valid(vec![140, 66]));
}

/// The first rows see two spans of keys, so the mask has two layers. Keys of the second span are in
/// both.
fn layers(case: &mut Case) {
    (case.problem.q_len, case.problem.kv_len) = (133, 150);
    case.problem.mask = "slices:0..66x0..40,0..66x100..140,66..133x100..140".parse().unwrap();
}

fn call(dtype: Dtype, halves: bool, change: impl FnOnce(&mut Case)) -> BackwardCall {
    BackwardCall::new(GradientCase::new(case(change), dtype), halves)
}

fn named(dtype: Dtype, name: &str) -> BackwardCall {
    let case = cases().into_iter().find(|case| case.name == name).unwrap();
    BackwardCall::new(GradientCase::new(case, dtype), false)
}

/// Calls that cover the kernels of `dtype`.
fn judge(dtype: Dtype) -> impl Fn(&Program, Timing) -> Result<(), String> + Sync {
    let mut calls = vec![
        call(dtype, false, causal),
        call(dtype, true, causal),
        call(dtype, false, softcap),
        call(dtype, true, entries),
        call(dtype, false, layers),
        named(dtype, "NaN in padding"),
        named(dtype, "logits of a million"),
    ];
    if dtype == Dtype::F16 {
        let case = GradientCase::of_scaled_loss(case(causal), dtype, 8192.0);
        calls.push(BackwardCall::new(case, false));
    }
    let nan = case(causal);
    let nan = [12, 11].map(|element| NanCall::new(&nan, dtype, [40, element]));
    let dead = without_finite_logits(dtype, |case| case);
    let equal = equal_logits(dtype, 1e20, false, |_| ());
    move |program, timing| {
        calls.iter().try_for_each(|call| call.judge(program, timing).map(|_| ()))?;
        nan.iter().try_for_each(|call| call.judge(program, timing))?;
        shares_are_equal(&equal, program, timing)?;
        gives_nothing(&dead, program, timing)
    }
}

pub(super) fn tiles() -> Planted {
    let judge = Box::new(judge(Dtype::F16));
    Planted { name: "backward", instance: instance!("F16", "f16", "64"), bugs: &BUGS, judge }
}

const WIDE: [Bug; 3] = [
    bug("two warps sum the same elements", KEYS, "out_from = thread_x() / 128 * OUT;", "out_from = 0;"),
    bug(
        "the other half of the warps has other keys",
        TILES,
        "mine(thread_x() / 32 % 4 * 16)",
        "mine(thread_x() / 32 * 16)",
    ),
    bug(
        "one half of the elements is written",
        KEYS,
        "args.dk + into, dk, half, out_from,",
        "args.dk + into, dk, half, 0,",
    ),
];

/// Heads of which two warps share the elements.
pub(super) fn wide() -> Planted {
    let call = call(Dtype::Bf16, false, |case| {
        causal(case);
        case.problem.head_dim = 192;
        case.problem.scale = 192.0_f64.sqrt().recip();
    });
    let judge = move |program: &Program, timing| call.judge(program, timing).map(|_| ());
    let instance = instance!("Bf16", "bf16", "192");
    Planted { name: "backward wide", instance, bugs: &WIDE, judge: Box::new(judge) }
}

const F32: &str = "backward/f32.h";

const F32_BUGS: [Bug; 13] = [
    bug("the rest of the log-sum-exp is left out", "backward/common.h", LIFT, ";"),
    bug("the log-sum-exp is one number", "backward/common.h", LIFT, "lse += stats[3];"),
    bug(
        "a logit is summed in two halves",
        F32,
        "AttentionF32::scaled_dot(attend, q, k)",
        "AttentionF32::dot(attend.dim / 2, q, k, attend.scale) + AttentionF32::dot(attend.dim / 2, q + attend.dim / 2, k + attend.dim / 2, attend.scale)",
    ),
    bug("no slope of the softcap", F32, "of_bias * fused(-bent, bent, 1.0f)", "of_bias"),
    bug("no delta", F32, "(dp - row.delta)", "dp"),
    bug("dQ without the scale", F32, "fused(acc[i], args.scale,", "fused(acc[i], 1.0f,"),
    bug("dK without the scale", F32, "fused(dk[i], args.scale,", "fused(dk[i], 1.0f,"),
    bug(
        "hidden keys are multiplied by 0",
        F32,
        "may be NaN.\n                if (!(seen >> c & 1)) continue;",
        "may be NaN.\n",
    ),
    bug(
        "hidden rows are multiplied by 0",
        F32,
        "may be NaN.\n                    if (!(seen >> c & 1)) continue;",
        "may be NaN.\n",
    ),
    bug(
        "keys of the first lane",
        F32,
        "(first_key + c) * attend.k.row_stride",
        "first_key * attend.k.row_stride",
    ),
    bug(
        "one query head of the group",
        F32,
        "head < args.readers[at.kv_head + 1]",
        "head <= args.readers[at.kv_head]",
    ),
    bug("dV replaces what was there", F32, "of_dv += dv[i];", "of_dv = dv[i];"),
    bug(
        "a tile of keys has the list of another",
        F32,
        "at.first / BACKWARD_TILE);\n            for",
        "block_x());\n            for",
    ),
];

const F32_INSTANCE: &str = "#include \"backward/f32.h\"\n#include \"row_stats.h\"\n#include \"state.h\"\n\
    KERNEL(attend_f32, AttendArguments, AttentionF32::THREADS) { AttentionF32::run(args); }\n\
    KERNEL(backward_queries_f32, BackwardArguments, BackwardF32::THREADS) { BackwardF32::queries(args); }\n\
    KERNEL(backward_keys_f32, BackwardArguments, BackwardF32::THREADS) { BackwardF32::keys(args); }\n\
    KERNEL(row_stats_f32, RowStatsArguments, ROW_STATS_THREADS) { row_stats<F32>(args); }\n\
    KERNEL(clear_words, ClearArguments, CLEAR_THREADS) { clear(args); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(finalize_f32, StateArguments, StateRow::THREADS) { finalize<F32>(args); }\n";

pub(super) fn in_f32() -> Planted {
    let judge = judge(Dtype::F32);
    // Logits of some hundreds, whose rounding is the largest error.
    let large = call(Dtype::F32, false, |case| {
        causal(case);
        case.problem.scale *= 60.0;
    });
    let judge = move |program: &Program, timing| {
        judge(program, timing)?;
        large.judge(program, timing).map(|_| ())
    };
    Planted { name: "backward f32", instance: F32_INSTANCE, bugs: &F32_BUGS, judge: Box::new(judge) }
}

const SMALL: [Bug; 10] = [
    bug("a log-sum-exp without a rest", "logits.h", "of_sum - (lse - m) : 0.0f;", "0.0f : 0.0f;"),
    bug("a row that saw no key has a rest", "logits.h", "magnitude(lse) < INFINITE ?", "true ?"),
    bug("no gradient of the log-sum-exp", "row_stats.h", "if (args.d_lse) delta -= args.d_lse[row];", ";"),
    bug("delta of half of the lanes", "row_stats.h", "for (u32 apart = 16;", "for (u32 apart = 8;"),
    bug("a row that saw no key keeps its log-sum-exp", "row_stats.h", "unseen{{-EMPTY_M,", "unseen{{lse,"),
    bug("a row that saw no key has a delta", "row_stats.h", "1.0f, 0.0f, 0.0f}}", "1.0f, delta, 0.0f}}"),
    bug("a factor of the other sign of the rest", "row_stats.h", "exp_fast(-rest)", "exp_fast(rest)"),
    bug(
        "every second block of words is cleared",
        "row_stats.h",
        "n < args.count; n += step",
        "n < args.count; n += 2 * step",
    ),
    bug(
        "rows replace those that were there",
        "repack.h",
        "float_of(place) + float_of(word)",
        "float_of(word)",
    ),
    bug(
        "rows are added as integers",
        "repack.h",
        "bits_of(float_of(place) + float_of(word))",
        "place + word",
    ),
];

/// Row statistics, zeros and additions.
pub(super) fn small() -> Planted {
    let call = call(Dtype::F32, true, causal);
    let judge = move |program: &Program, timing| {
        adds_rows(program, timing)?;
        stats_are_exact(program, timing)?;
        pairs_are_exact(program, timing)?;
        call.judge(program, timing).map(|_| ())
    };
    let instance = concat!(
        "#include \"backward/f32.h\"\n#include \"repack.h\"\n#include \"row_stats.h\"\n#include \"state.h\"\n",
        "KERNEL(attend_f32, AttendArguments, AttentionF32::THREADS) { AttentionF32::run(args); }\n",
        "KERNEL(backward_queries_f32, BackwardArguments, BackwardF32::THREADS) { BackwardF32::queries(args); }\n",
        "KERNEL(backward_keys_f32, BackwardArguments, BackwardF32::THREADS) { BackwardF32::keys(args); }\n",
        "KERNEL(row_stats_f32, RowStatsArguments, ROW_STATS_THREADS) { row_stats<F32>(args); }\n",
        "KERNEL(clear_words, ClearArguments, CLEAR_THREADS) { clear(args); }\n",
        "KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n",
        "KERNEL(finalize_f32, StateArguments, StateRow::THREADS) { finalize<F32>(args); }\n",
        "KERNEL(accumulate, RepackArguments, Repack::THREADS) { Repack::run<true>(args); }\n",
    );
    Planted { name: "backward small", instance, bugs: &SMALL, judge: Box::new(judge) }
}
