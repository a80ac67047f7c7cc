//! Planted bugs in decoding: packed heads, parts of the keys, and their merge.

use kyklos::Dtype;
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::OracleMask;

use super::{Bug, Planted, bug, call, case};
use crate::call::{Call, Kernel, Keys};

const BUGS: [Bug; 11] = [
    bug(
        "a tile between two parts is in neither",
        "decode.h",
        "from.skip(u32(u64(all) * part / more.parts))",
        "from.skip(u32((u64(all) * part + more.parts - 1) / more.parts))",
    ),
    bug(
        "a part without tiles leaves its state as it was",
        "attend.h",
        "if (At::FRESH && rows_here) mine.merge(at);",
        "",
    ),
    bug(
        "a row that sees no key of a part leaves its state as it was",
        "rows.h",
        "if (!there || (entry.nothing && !At::FRESH)) continue;",
        "if (!there || entry.nothing) continue;",
    ),
    bug("a part adds to what is in memory", "rows.h", "reads = there && !At::FRESH", "reads = there"),
    bug("all rows are of the first head", "decode.h", "pack.first + n % pack.count", "pack.first"),
    bug(
        "each packed row is a query row",
        "decode.h",
        "const u32 row = n / pack.count;",
        "const u32 row = n;",
    ),
    bug(
        "parts forget the batch",
        "decode.h",
        "args.ml + (((u64(part) * more.batch + batch)",
        "args.ml + (((u64(part) + batch)",
    ),
    bug("the state that was there is not scaled", "state.h", "float l = old_l * keep;", "float l = old_l;"),
    bug(
        "a part is not scaled",
        "state.h",
        "fused(state.from_a[part * rows * state.dim + row.a + d], exp2_fast((their_m - m) * LOG2_E), a)",
        "state.from_a[part * rows * state.dim + row.a + d] + a",
    ),
    bug("parts that saw no key are merged", "state.h", "if (ml[0] != EMPTY_M || ml[1] != 0.0f) with", "with"),
    bug(
        "a lane writes before the others have read",
        "state.h",
        "warp_sync();\n    const bool fresh = old_l == 0.0f && old_m == EMPTY_M;",
        "const bool fresh = old_l == 0.0f && old_m == EMPTY_M;",
    ),
];

const INSTANCE: &str = "#include \"decode.h\"\n#include \"state.h\"\n\
    KERNEL(decode_bf16_64, DecodeArguments, (Decode<Bf16, 64>::THREADS)) { Decode<Bf16, 64>(args).run(); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(merge_parts, PartsArguments, StateRow::THREADS) { merge_in_order(args); }\n\
    KERNEL(finalize_bf16, StateArguments, StateRow::THREADS) { finalize<Bf16>(args); }\n";

fn one_row(case: &mut Case) {
    (case.problem.q_len, case.problem.kv_len) = (1, 210);
    // Large enough for maxima to differ between parts.
    case.problem.scale *= 4.0;
}

fn some_rows(case: &mut Case) {
    (case.problem.batch, case.problem.q_len, case.problem.kv_len) = (2, 40, 300);
    (case.problem.q_offset, case.problem.mask) = (230, OracleMask::causal());
}

pub(super) fn kernel() -> Planted {
    let calls = vec![
        (call(one_row), Kernel::Decode(3), Keys::Whole),
        (call(one_row), Kernel::Decode(3), Keys::Split),
        (call(some_rows), Kernel::Decode(7), Keys::Whole),
    ];
    Planted::attending("decode", INSTANCE, &BUGS, calls)
}

const F32: &str = "attend_f32.h";

const F32_FAULTS: [Bug; 13] = [
    bug("warps behind the last part go on", "decode.h", "if (part >= args.parts) return;", ""),
    bug("all warps of a part have its first row", "decode.h", "at.row(rows, warp % rows)", "at.row(rows, 0)"),
    bug("a block has four warps", "decode.h", "args.tile_blocks * WARPS", "args.tile_blocks * 4"),
    bug(
        "all warps of a block have one part",
        "decode.h",
        "part = warp / rows",
        "part = block_x() % args.parts",
    ),
    bug("a part adds to what is in memory", F32, "At::FRESH ? EMPTY_M : ml[0]", "ml[0]"),
    bug(
        "a part that sees no key leaves its state as it was",
        F32,
        "if (entry.nothing && !At::FRESH) return;",
        "if (entry.nothing) return;",
    ),
    bug("a part that sees no key has a maximum", F32, "entry.nothing ? EMPTY_M : entry.m", "entry.m"),
    bug(
        "the maximum of half of the lanes",
        F32,
        "apart = 16; apart; apart /= 2) most",
        "apart = 8; apart; apart /= 2) most",
    ),
    bug(
        "the sum of half of the lanes",
        F32,
        "apart = 16; apart; apart /= 2) sum",
        "apart = 8; apart; apart /= 2) sum",
    ),
    bug("weights are not scaled to a new maximum", F32, "fused(sum, rescale, weight)", "sum + weight"),
    bug("values are not scaled to a new maximum", F32, "acc[i] *= rescale;", ""),
    bug("hidden values that are NaN are multiplied by 0", F32, "if (!(seen >> c & 1)) continue;", ""),
    bug(
        "values of the first key",
        F32,
        "(first_key + c) * args.v.row_stride",
        "first_key * args.v.row_stride",
    ),
];

const F32_INSTANCE: &str = "#include \"decode.h\"\n#include \"state.h\"\n\
    KERNEL(decode_f32, DecodeArguments, DecodeF32::THREADS) { DecodeF32::run(args); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(merge_parts, PartsArguments, StateRow::THREADS) { merge_in_order(args); }\n\
    KERNEL(finalize_f32, StateArguments, StateRow::THREADS) { finalize<F32>(args); }\n";

pub(super) fn in_f32() -> Planted {
    let call = |case| Call::new::<f32>(case, Dtype::F32);
    let nan = cases().into_iter().find(|case| case.name == "NaN in padding").unwrap();
    let calls = vec![
        (call(case(one_row)), Kernel::Decode(3), Keys::Split),
        (call(case(some_rows)), Kernel::Decode(7), Keys::Whole),
        (call(nan), Kernel::Decode(2), Keys::Whole),
    ];
    Planted::attending("decode f32", F32_INSTANCE, &F32_FAULTS, calls)
}
