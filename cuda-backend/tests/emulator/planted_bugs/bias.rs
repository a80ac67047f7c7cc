//! Planted bugs in the kernels of the gradient of a bias.

use kyklos::Dtype;
use kyklos_backend_suite::GradientCase;
use kyklos_oracle::oracle::OracleMask;

use super::{Bug, Planted, bug};
use crate::backward_call::{BackwardCall, every_bias, plain};
use crate::equal_logits::{equal_logits, shares_are_equal};
use crate::job::Timing;
use crate::program::Program;

const PLACE: &str = "backward/common.h";
const BIAS: &str = "backward/bias.h";

const BUGS: [Bug; 14] = [
    bug(
        "the rest of the log-sum-exp is left out",
        BIAS,
        "lift = float_of(number(1))",
        "lift = Lift<T>::EXPONENT",
    ),
    bug("the slope of the softcap counts", "backward/tiles.h", "if (!OF_BIAS) d *=", "d *="),
    bug("dS keeps the factor of P", BIAS, " * Lift<T>::BACK;", ";"),
    bug(
        "rows behind the last are written",
        BIAS,
        "if (shared || add == -INFINITE) continue;",
        "if (shared) continue;",
    ),
    bug("rows of another tile", BIAS, "at.into[(first_row + n) *", "at.into[n *"),
    bug(
        "keys by their index",
        BIAS,
        "row_stride + positions[half]] += value",
        "row_stride + (first_key + 8 * half)] += value",
    ),
    bug("one query head replaces another", BIAS, "positions[half]] += value;", "positions[half]] = value;"),
    bug(
        "sums of keys replace others",
        BIAS,
        "at.into[positions[half]] += sums",
        "at.into[positions[half]] = sums",
    ),
    bug("sums of two of four lanes", BIAS, "sums[half] += shuffle_xor(sums[half], 2);", ";"),
    bug("four lanes add a sum", BIAS, "if (lane % 4 == 0 && ", "if ("),
    bug("one sum for two keys", BIAS, "sums[half] += value;", "sums[0] += value;"),
    bug("keys of another head", PLACE, "kv_head = args.attend.kv_head_of[head];", "kv_head = 0;"),
    bug("all heads add to the first", PLACE, " + head * args.bias_sum.head_stride", ""),
    bug("all batch entries add to the first", PLACE, " + batch * args.bias_sum.batch_stride", ""),
];

/// The kernels that a call of a type and a head dim needs.
const INSTANCE: &str = "#include \"backward/bias.h\"\n#include \"backward/queries.h\"\n#include \"row_stats.h\"\n#include \"state.h\"\n\
    KERNEL(attend_f16_64, AttendArguments, (Attention<F16, 64>::THREADS)) { Attention<F16, 64>(args, Place(args)).run(); }\n\
    KERNEL(backward_queries_f16_64, BackwardArguments, (BackwardQueries<F16, 64>::THREADS)) { BackwardQueries<F16, 64>(args).run(); }\n\
    KERNEL(backward_keys_f16_64, BackwardArguments, (BackwardKeys<F16, 64>::THREADS)) { BackwardKeys<F16, 64>(args).run(); }\n\
    KERNEL(backward_bias_f16_64, BackwardArguments, (BackwardBias<F16, 64>::THREADS)) { BackwardBias<F16, 64>(args).run(); }\n\
    KERNEL(row_stats_f16, RowStatsArguments, ROW_STATS_THREADS) { row_stats<F16>(args); }\n\
    KERNEL(clear_words, ClearArguments, CLEAR_THREADS) { clear(args); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(finalize_f16, StateArguments, StateRow::THREADS) { finalize<F16>(args); }\n";

/// Biases of every shape over two batch entries and four heads; half of them with a softcap, and
/// with keys in two blocks.
fn judge(dtype: Dtype) -> impl Fn(&Program, Timing) -> Result<(), String> + Sync {
    let call = |(n, bias)| {
        let mut case = plain();
        let problem = &mut case.problem;
        (problem.batch, problem.q_len, problem.kv_len) = (2, 70, 90);
        (problem.q_heads, problem.kv_heads) = (4, 2);
        // The last keys are seen by the last rows only, or by none.
        (problem.mask, problem.q_offset) = (OracleMask::causal(), 0);
        problem.softcap = (n % 2 == 0).then_some(1.5);
        case.bias = Some(bias);
        BackwardCall::new(GradientCase::new(case, dtype), n % 3 == 0)
    };
    let calls: Vec<_> = every_bias().enumerate().map(call).collect();
    let equal = equal_logits(dtype, 1e20, true, |_| ());
    move |program, timing| {
        shares_are_equal(&equal, program, timing)?;
        calls.iter().try_for_each(|call| call.judge(program, timing).map(|_| ()))
    }
}

pub(super) fn tiles() -> Planted {
    let judge = Box::new(judge(Dtype::F16));
    Planted { name: "bias", instance: INSTANCE, bugs: &BUGS, judge }
}

const F32: &str = "backward/f32.h";

const F32_BUGS: [Bug; 8] = [
    bug(
        "the slope of the softcap counts",
        F32,
        "1.0f), of_bias, true}",
        "1.0f), of_bias * fused(-bent, bent, 1.0f), true}",
    ),
    bug("no delta", F32, "(dp - row.delta)", "dp"),
    bug("rows behind the last are written", F32, "if (mine.seen && !shared) at.into", "if (!shared) at.into"),
    bug("one query head replaces another", F32, "position] += mine.of_bias", "position] = mine.of_bias"),
    bug("the sum of the last tile", F32, "sum += mine.of_bias;", "sum = mine.of_bias;"),
    bug(
        "sums of half of the lanes",
        F32,
        "for (u32 apart = 16; apart; apart /= 2) sum",
        "for (u32 apart = 8; apart; apart /= 2) sum",
    ),
    bug("sums of keys replace others", F32, "at.into[position] += sum;", "at.into[position] = sum;"),
    bug(
        "a tile of keys has the list of another",
        F32,
        "float sum = 0.0f;\n        Tiles tiles = tiles_of(attend, at.mask_class, at.first / BACKWARD_TILE);",
        "float sum = 0.0f;\n        Tiles tiles = tiles_of(attend, at.mask_class, attend.q_tiles - 1);",
    ),
];

const F32_INSTANCE: &str = "#include \"backward/f32.h\"\n#include \"row_stats.h\"\n#include \"state.h\"\n\
    KERNEL(attend_f32, AttendArguments, AttentionF32::THREADS) { AttentionF32::run(args); }\n\
    KERNEL(backward_queries_f32, BackwardArguments, BackwardF32::THREADS) { BackwardF32::queries(args); }\n\
    KERNEL(backward_keys_f32, BackwardArguments, BackwardF32::THREADS) { BackwardF32::keys(args); }\n\
    KERNEL(backward_bias_f32, BackwardArguments, BackwardF32::THREADS) { BackwardF32::bias(args); }\n\
    KERNEL(row_stats_f32, RowStatsArguments, ROW_STATS_THREADS) { row_stats<F32>(args); }\n\
    KERNEL(clear_words, ClearArguments, CLEAR_THREADS) { clear(args); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(finalize_f32, StateArguments, StateRow::THREADS) { finalize<F32>(args); }\n";

pub(super) fn in_f32() -> Planted {
    let judge = Box::new(judge(Dtype::F32));
    Planted { name: "bias f32", instance: F32_INSTANCE, bugs: &F32_BUGS, judge }
}
