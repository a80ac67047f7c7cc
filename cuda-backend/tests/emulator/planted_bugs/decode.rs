//! Planted bugs in decoding: packed heads, parts of the keys, and their merge.

use kyklos::Dtype;
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::{OracleMask, OracleTerm};

use super::{Bug, Planted, bug, call, case};
use crate::call::{Call, Kernel, Keys};

const BUGS: [Bug; 20] = [
    bug(
        "a tile between two parts is in neither",
        "decode.h",
        "from.skip(u32(u64(all) * part / more.parts))",
        "from.skip(u32((u64(all) * part + more.parts - 1) / more.parts))",
    ),
    bug(
        "a part without tiles leaves its state as it was",
        "attend.h",
        "(At::PARTS || args.fresh) && rows_here",
        "args.fresh && rows_here",
    ),
    bug(
        "a row that sees no key of a part leaves its state as it was",
        "rows.h",
        "(entry.nothing && reads(half))",
        "entry.nothing",
    ),
    bug("a part adds to what is in memory", "rows.h", "&& !At::PARTS && !args.fresh;", "&& !args.fresh;"),
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
    bug("the sum that was there is not scaled", "state.h", "fused(old.y, keep, l)", "old.y + l"),
    bug(
        "the state that was there is not scaled",
        "state.h",
        "sums[unit].x[k] *= keep;",
        "sums[unit].x[k] *= 1.0f;",
    ),
    bug(
        "the state that was there is forgotten",
        "state.h",
        "? four_at(state.a + row.a + d) : Four{}",
        "? Four{} : Four{}",
    ),
    bug(
        "a part is not scaled",
        "state.h",
        "fused(found[i][unit].x[k], of_part[i], sums[unit].x[k])",
        "found[i][unit].x[k] + sums[unit].x[k]",
    ),
    bug("the sum of a part is not scaled", "state.h", "fused(one.y, weight, l)", "one.y + l"),
    bug(
        "the sums of half of the lanes",
        "state.h",
        "apart = 16; apart; apart /= 2) l",
        "apart = 8; apart; apart /= 2) l",
    ),
    bug(
        "the maximum of half of the lanes",
        "state.h",
        "apart = 16; apart; apart /= 2) m",
        "apart = 8; apart; apart /= 2) m",
    ),
    bug(
        "parts that saw no key are merged",
        "state.h",
        "seen >> (n + i) & 1 && d < state.dim",
        "d < state.dim",
    ),
    bug("the weight of the first part for all", "state.h", "shuffle(weight, n + i)", "shuffle(weight, n)"),
    bug(
        "parts behind the 32nd are left out",
        "state.h",
        "first < args.parts; first += 32) {\n            const Pair one = ml(first);\n            const float",
        "first < 32; first += 32) {\n            const Pair one = ml(first);\n            const float",
    ),
    bug(
        "the weights of the first 32 parts for all",
        "state.h",
        "const Pair one = ml(first);\n            const float",
        "const Pair one = ml(0);\n            const float",
    ),
    bug("a fresh state is read", "state.h", "args.fresh ? Pair{EMPTY_M, 0.0f} : pair_at", "pair_at"),
    bug(
        "a row without keys is left out of a fresh state",
        "state.h",
        "if (!any && !args.fresh) return;",
        "if (!any) return;",
    ),
];

const INSTANCE: &str = "#include \"decode.h\"\n#include \"state.h\"\n\
    KERNEL(decode_bf16_64, DecodeArguments, (Decode<Bf16, 64>::THREADS)) { Decode<Bf16, 64>(args).run(); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(merge_parts, PartsArguments, StateRow::THREADS) { Parts(args).run(); }\n\
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

/// The last two rows see no key, and neither do those of the second batch entry.
fn blind_rows(case: &mut Case) {
    (case.problem.batch, case.problem.q_len, case.problem.kv_len) = (2, 9, 150);
    let window = OracleTerm::Window { left: 5, right: 0 };
    case.problem.mask = OracleMask::full().and(window).and(OracleTerm::Valid(vec![143, 0]));
    case.problem.q_offset = 141;
}

pub(super) fn kernel() -> Planted {
    let calls = vec![
        (call(one_row), Kernel::Decode(3), Keys::Whole),
        (call(one_row), Kernel::Decode(3), Keys::Split),
        (call(some_rows), Kernel::Decode(7), Keys::Whole),
        // Most parts have no tile.
        (call(one_row), Kernel::Decode(40), Keys::Split),
        (call(blind_rows), Kernel::Decode(3), Keys::Whole),
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
    bug("a part adds to what is in memory", F32, "fresh ? EMPTY_M : ml[0]", "ml[0]"),
    bug(
        "a part that sees no key leaves its state as it was",
        F32,
        "if (entry.nothing && !fresh) return;",
        "if (entry.nothing) return;",
    ),
    bug(
        "a part that sees no key has a maximum",
        F32,
        "ml[0] = entry.m;",
        "ml[0] = entry.nothing ? 0.0f : entry.m;",
    ),
    bug(
        "the maximum of half of the lanes",
        F32,
        "apart = 16; apart; apart /= 2) most",
        "apart = 8; apart; apart /= 2) most",
    ),
    bug(
        "the sum of half of the lanes",
        F32,
        "apart = 16; apart; apart /= 2) l",
        "apart = 8; apart; apart /= 2) l",
    ),
    bug("weights are not scaled to a new maximum", F32, "fused(l, corr, weight)", "l + weight"),
    bug("values are not scaled to a new maximum", F32, "O[i] *= corr;", ""),
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
    KERNEL(merge_parts, PartsArguments, StateRow::THREADS) { Parts(args).run(); }\n\
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
