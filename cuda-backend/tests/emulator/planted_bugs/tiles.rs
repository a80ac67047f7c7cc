//! Planted bugs in the kernel with one block for each query tile.

use half::bf16;
use kyklos::Dtype;
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::{OracleMask, OracleTerm};

use super::{Bug, Planted, bug, call, planted};
use crate::call::{Call, Kernel, Keys};
use crate::job::Timing;

const BUGS: [Bug; 26] = [
    bug("an exponent without a bound", "logits.h", "return !(magnitude(base) < FAR);", "return false;"),
    bug("copies are not waited for", "attend.h", "copy_async_wait<0>();", ""),
    bug(
        "the wait leaves one group of copies incomplete",
        "attend.h",
        "copy_async_wait<0>();",
        "copy_async_wait<1>();",
    ),
    bug(
        "no barrier between the copies of all threads and their readers",
        "attend.h",
        "const bool odd = barrier_or(tested && copied_odd(v_from));",
        "const bool odd = false;",
    ),
    bug(
        "the next tile goes to the stage that is being read",
        "attend.h",
        "copy_keys(stages + (step + 1) % 2 * 2 * TILE_BYTES",
        "copy_keys(stages + step % 2 * 2 * TILE_BYTES",
    ),
    bug("sums are not rescaled to a new maximum", "attend.h", "mine.scale_sums(corr);", ""),
    bug(
        "the sum of weights is not scaled",
        "rows.h",
        "fused(l[half], corr[half], l_here)",
        "l[half] + l_here",
    ),
    bug(
        "keys are loaded in the order of values",
        "attend.h",
        "k_from + place(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2)",
        "k_from + place(16 * n + lane % 16, 2 * k + lane / 16)",
    ),
    bug(
        "columns of queries swapped",
        "attend.h",
        "lane % 16, 2 * k + lane / 16));\n        UNROLL",
        "lane % 16, 2 * k + 1 - lane / 16));\n        UNROLL",
    ),
    bug("values are not transposed", "attend.h", "load_matrices_transposed(v,", "load_matrices(v,"),
    bug(
        "tiles are written without the permutation of columns",
        "attend.h",
        "copy(into + place(n, column), head + (there ? first",
        "copy(into + (n * COLUMNS + column) * 16, head + (there ? first",
    ),
    bug(
        "halves of the weights swapped",
        "rows.h",
        "T::pack(weights[2 * k + i / 2][i % 2 * 2], weights[2 * k + i / 2][i % 2 * 2 + 1])",
        "T::pack(weights[2 * k + i % 2][i / 2 * 2], weights[2 * k + i % 2][i / 2 * 2 + 1])",
    ),
    bug("the maximum of two of four lanes", "rows.h", "most = larger(most, shuffle_xor(most, 2));", ""),
    bug("the sum of two of four lanes", "rows.h", "l[half] += shuffle_xor(l[half], 2);", ""),
    bug("a row sees one key more", "logits.h", "position >= span.hi", "position > span.hi"),
    bug("a row sees one key less", "logits.h", "position < span.lo", "position <= span.lo"),
    bug(
        "no tile is tested against the mask",
        "attend.h",
        "tested = !tiles.full() || first_key + Bc > args.keys || args.bias_kind != NO_BIAS;",
        "tested = false;",
    ),
    bug(
        "an incomplete full tile is not tested against the mask",
        "attend.h",
        "!tiles.full() || first_key + Bc > args.keys ||",
        "!tiles.full() ||",
    ),
    bug("a lane writes before the other lanes of its row have read", "rows.h", "warp_sync();", ""),
    bug("a fresh state is read", "rows.h", "&& !At::PARTS && !args.fresh;", "&& !At::PARTS;"),
    bug(
        "a query tile without keys is left out of a fresh state",
        "attend.h",
        "(At::PARTS || args.fresh) && rows_here",
        "At::PARTS && rows_here",
    ),
    bug(
        "a row without keys is left out of a fresh state",
        "rows.h",
        "(entry.nothing && reads(half))",
        "entry.nothing",
    ),
    bug(
        "hidden values that are NaN are multiplied by 0",
        "attend.h",
        "barrier_or(tested && copied_odd(v_from))",
        "barrier_or(false)",
    ),
    bug("the state that was there is forgotten", "logits.h", "l += old_l * keep;", ""),
    bug(
        "rows behind the last are written",
        "rows.h",
        "if (!there(half) || (entry.nothing && reads(half))) continue;",
        "if (entry.nothing && reads(half)) continue;",
    ),
    bug(
        "a query head reads the KV head with its own index",
        "logits.h",
        "kv_head(args.kv_head_of[head])",
        "kv_head(head / 2)",
    ),
];

/// Changes that give the same results more slowly. The counters must show them.
const SLOWER: Bug = bug(
    "no permutation of columns at all",
    "attend.h",
    "COLUMNS % 8 == 0 ? row & 7 : row >> 1 & 3",
    "row & 0",
);

const INSTANCE: &str = "#include \"attend.h\"\n#include \"state.h\"\n\
    KERNEL(attend_bf16_64, AttendArguments, (Attention<Bf16, 64>::THREADS)) { Attention<Bf16, 64>(args, Place(args)).run(); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(finalize_bf16, StateArguments, StateRow::THREADS) { finalize<Bf16>(args); }\n";

fn causal_call() -> Call {
    call(|case| {
        (case.problem.q_len, case.problem.kv_len) = (72, 210);
        (case.problem.q_offset, case.problem.mask) = (138, OracleMask::causal());
        // Large enough for the maxima to change between tiles.
        case.problem.scale *= 4.0;
    })
}

/// Logits of some billions.
fn huge(case: &mut Case) {
    (case.problem.q_len, case.problem.kv_len) = (20, 133);
    case.problem.scale *= 1e9;
}

pub(super) fn kernel() -> Planted {
    let window = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len) = (40, 90);
        case.problem.mask = OracleMask::full().and(OracleTerm::Window { left: 9, right: 4 });
    };
    let ragged = |case: &mut Case| (case.problem.q_len, case.problem.kv_len) = (17, 133);
    let nan = cases().into_iter().find(|case| case.name == "NaN in padding").unwrap();
    // Rows from 66 on see no key, and neither does a whole query tile.
    let blind = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len, case.problem.q_heads) = (260, 260, 1);
        let window = OracleTerm::Window { left: 5, right: 0 };
        case.problem.mask = OracleMask::full().and(window).and(OracleTerm::Valid(vec![60]));
    };
    let calls = vec![
        (causal_call(), Kernel::Tiled, Keys::Whole),
        (causal_call(), Kernel::Tiled, Keys::Split),
        (call(window), Kernel::Tiled, Keys::Whole),
        (call(ragged), Kernel::Tiled, Keys::Whole),
        (call(huge), Kernel::Tiled, Keys::Split),
        (call(blind), Kernel::Tiled, Keys::Whole),
        (Call::new::<bf16>(nan, Dtype::Bf16), Kernel::Tiled, Keys::Whole),
    ];
    Planted::attending("tiles", INSTANCE, &BUGS, calls)
}

#[test]
fn banks_are_read_once_for_each_access_and_the_counter_shows_it() {
    let kernel = kernel();
    let call = causal_call();
    let counts_of = |bugs: &[&Bug], name| {
        call.judge(&planted(&kernel, bugs, name), Kernel::Tiled, Keys::Whole, Timing::Eager).unwrap()
    };
    let counts = counts_of(&[], "none");
    assert!(counts.accesses > 0);
    assert_eq!(counts.passes, counts.accesses, "{counts:?}");
    // Without the permutation 8 rows of 128 bytes are in the same banks. The results are the same.
    let counts = counts_of(&[&SLOWER], "slower");
    assert_eq!(counts.passes, 8 * counts.accesses, "{counts:?}");
}
