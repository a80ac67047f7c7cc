//! Bugs in decoding: packed heads, parts of the keys, and their merge.

use kyklos_tests::inputs::Case;
use kyklos_tests::oracle::OracleMask;

use super::{Fault, Planted, call, fault};
use crate::call::{Keys, Way};

const FAULTS: [Fault; 11] = [
    fault(
        "a tile between two parts is in neither",
        "decode.h",
        "from.skip(u32(u64(all) * part / more.parts))",
        "from.skip(u32((u64(all) * part + more.parts - 1) / more.parts))",
    ),
    fault(
        "a part without tiles leaves its state as it was",
        "attend.h",
        "if (At::FRESH && rows_here) mine.merge(at);",
        "",
    ),
    fault(
        "a row that sees nothing of a part leaves its state as it was",
        "rows.h",
        "if (!there || (entry.nothing && !At::FRESH)) continue;",
        "if (!there || entry.nothing) continue;",
    ),
    fault("a part adds to what is in memory", "rows.h", "reads = there && !At::FRESH", "reads = there"),
    fault("all rows are of the first head", "decode.h", "pack.first + n % pack.count", "pack.first"),
    fault(
        "each packed row is a query row",
        "decode.h",
        "const u32 row = n / pack.count;",
        "const u32 row = n;",
    ),
    fault(
        "parts forget the batch",
        "decode.h",
        "args.ml + (((u64(part) * more.batch + batch)",
        "args.ml + (((u64(part) + batch)",
    ),
    fault("the state that was there is not scaled", "state.h", "float l = old_l * keep;", "float l = old_l;"),
    fault(
        "a part is not scaled",
        "state.h",
        "fused(state.from_a[part * rows * state.dim + row.a + d], exp2_fast((their_m - m) * LOG2_E), a)",
        "state.from_a[part * rows * state.dim + row.a + d] + a",
    ),
    fault(
        "parts that saw nothing are merged",
        "state.h",
        "if (ml[0] != EMPTY_M || ml[1] != 0.0f) with",
        "with",
    ),
    fault(
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

pub(super) fn kernel() -> Planted {
    let one_row = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len) = (1, 210);
        // Large enough for maxima to differ between parts.
        case.problem.scale *= 4.0;
    };
    let some = |case: &mut Case| {
        (case.problem.batch, case.problem.q_len, case.problem.kv_len) = (2, 40, 300);
        (case.problem.q_offset, case.problem.mask) = (230, OracleMask::causal());
    };
    let calls = vec![
        (call(one_row), Way::Parts(3), Keys::Whole),
        (call(one_row), Way::Parts(3), Keys::Split),
        (call(some), Way::Parts(7), Keys::Whole),
    ];
    Planted::attending("decode", INSTANCE, &FAULTS, calls)
}
