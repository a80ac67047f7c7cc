//! Planted bugs in the kernel for Hopper.

use half::bf16;
use kyklos::Dtype;
use kyklos_cuda::item_of_round;
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::{OracleMask, OracleTerm};

use super::{Bug, Planted, bug, call, planted};
use crate::call::{Call, Kernel, Keys};
use crate::job::Timing;

const FILE: &str = "attend_hopper.h";
const COMMON: &str = "hopper.h";

/// The producer's wait for a free stage, and the same without it for keys or for values.
const EMPTY: &str = "phase_wait(empty, step / STAGES % 2 ^ 1);";
const UNLESS_KEYS: &str = "if (empty != k_empty(step % STAGES)) phase_wait(empty, step / STAGES % 2 ^ 1);";
const UNLESS_VALUES: &str = "if (empty != v_empty(step % STAGES)) phase_wait(empty, step / STAGES % 2 ^ 1);";

const BUGS: [Bug; 32] = [
    bug("queries are not waited for", FILE, "phase_wait(q_full(), taken % 2);", ""),
    bug("queries are overwritten while they are read", FILE, "phase_wait(q_empty(), taken % 2 ^ 1);", ""),
    bug(
        "keys of tested tiles are not waited for",
        FILE,
        "phase_wait(k_full(stage), parity);\n                wgmma_fence();",
        "wgmma_fence();",
    ),
    bug("values of full tiles are not waited for", FILE, "phase_wait(v_full(before), parity);", ""),
    bug("keys are copied before the previous ones were read", FILE, EMPTY, UNLESS_KEYS),
    bug("values are copied before the previous ones were read", FILE, EMPTY, UNLESS_VALUES),
    bug(
        "the producer's first wait is for a future phase",
        FILE,
        EMPTY,
        "phase_wait(empty, step / STAGES % 2);",
    ),
    bug("the phase bit of the producer is never flipped", FILE, EMPTY, "phase_wait(empty, 1);"),
    bug(
        "values are copied to the stage of the next tile",
        FILE,
        "else\n                        copy_values(step - 1,",
        "else\n                        copy_values(step,",
    ),
    bug(
        "the values of the tile whose keys were just copied",
        FILE,
        "copy_values(step - 1, tile_before, at);\n                    first",
        "copy_values(step - 1, tiles.tile, at);\n                    first",
    ),
    bug(
        "the values of the last tile are not copied",
        FILE,
        "else\n                copy_values(step - 1, tile_before, at);",
        "",
    ),
    bug(
        "values are released before they are read",
        FILE,
        "                    wgmma_wait<0>();\n                    settle(mine.acc);\n                    release(v_empty(before));",
        "                    release(v_empty(before));\n                    wgmma_wait<0>();\n                    settle(mine.acc);",
    ),
    bug(
        "keys are released before they are read",
        FILE,
        "wgmma_wait<0>();\n                settle(scores);\n                release(k_empty(stage));",
        "release(k_empty(stage));\n                wgmma_wait<0>();\n                settle(scores);",
    ),
    bug("scores are not waited for", FILE, "wgmma_wait<1>();", "wgmma_wait<2>();"),
    bug(
        "values are not waited for",
        FILE,
        "wgmma_wait<0>();\n                    settle(mine.acc);\n                    release(v_empty(before));",
        "release(v_empty(before));",
    ),
    bug(
        "no fence before the products of full tiles",
        FILE,
        "named_sync(TURN + consumer, 256);\n                    wgmma_fence();",
        "named_sync(TURN + consumer, 256);",
    ),
    bug("a wrong stride between eight rows", COMMON, "u64(1024 >> 4) << 32", "u64(2048 >> 4) << 32"),
    bug(
        "a wrong stride between chunks of values",
        FILE,
        "i * 16 * 128, KV_CHUNK)",
        "i * 16 * 128, KV_CHUNK / 2)",
    ),
    bug("a wrong step along the elements of a row", FILE, "within = i % 4 * 32", "within = i % 4 * 16"),
    bug(
        "no consumer has the first turn",
        FILE,
        "if (consumer == CONSUMERS - 1) named_arrive(TURN, 256);",
        "",
    ),
    bug("a turn is left at the end", FILE, "if (consumer == 0) named_sync(TURN, 256);", ""),
    bug(
        "more bytes are expected than copied",
        FILE,
        "phase_arrive_expecting(full, TILE_BYTES);",
        "phase_arrive_expecting(full, TILE_BYTES + 16 * (full == k_full(step % STAGES)));",
    ),
    bug(
        "fewer bytes are expected than copied",
        FILE,
        "phase_arrive_expecting(full, TILE_BYTES);",
        "phase_arrive_expecting(full, TILE_BYTES / (full == v_full(step % STAGES) ? 2 : 1));",
    ),
    bug(
        "a warp does not arrive after it has read",
        FILE,
        "phase_init(v_empty(stage), READERS);",
        "phase_init(v_empty(stage), READERS + 1);",
    ),
    bug(
        "each lane arrives for its warp",
        COMMON,
        "if (thread_x() % 32 == 0) phase_arrive(phase);",
        "phase_arrive(phase);",
    ),
    bug(
        "sums are not rescaled in full tiles",
        FILE,
        "release(v_empty(before));\n                    mine.scale_sums(rescale);",
        "release(v_empty(before));",
    ),
    bug(
        "sums are rescaled before the values of the previous tile are added",
        FILE,
        "pack(p, scores);\n                }\n                phase_wait",
        "mine.scale_sums(rescale);\n                    pack(p, scores);\n                }\n                phase_wait",
    ),
    bug(
        "the incomplete last tile of a full run counts as full",
        FILE,
        "args.keys / KEYS, tested)",
        "~0u / KEYS, tested)",
    ),
    bug(
        "hidden values that are NaN are multiplied by 0",
        FILE,
        "if (odd_in<Mine>(values, TILE_BYTES, OWN + consumer)) {",
        "if (false) {",
    ),
    bug(
        "hidden values that are NaN are not cleared",
        COMMON,
        "at < bytes; at += 512 * consumers",
        "at < 0; at += 512 * consumers",
    ),
    bug(
        "an item without keys gets no queries",
        FILE,
        "if (first)\n                copy_queries(at, taken);\n            else",
        "if (!first)",
    ),
    bug("the second warpgroup has the first one's queries", FILE, "consumer * 64 * 128 + within", "within"),
];

/// A change that gives the same results more slowly. The counters must show it.
const SLOWER: Bug = bug(
    "each round begins with the first block",
    FILE,
    "round % 2 ? grid_x() - 1 - block_x() : block_x()",
    "block_x()",
);

const INSTANCE: &str = "#include \"attend_hopper.h\"\n#include \"state.h\"\n\
    KERNEL(hopper_bf16_128, HopperArguments, (Hopper<Bf16, 128, 128>::THREADS)) { Hopper<Bf16, 128, 128>(args).run(); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(finalize_bf16, StateArguments, StateRow::THREADS) { finalize<Bf16>(args); }\n";

pub(super) fn kernel() -> Planted {
    // Six full tiles and some with mask tests, for rows of both consumers, and a second item for the same block.
    let causal = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len, case.problem.head_dim) = (70, 850, 128);
        (case.problem.q_heads, case.problem.q_offset) = (2, 780);
        case.problem.mask = OracleMask::causal();
        // Large enough for the maxima to change between tiles.
        case.problem.scale *= 4.0;
    };
    let ragged = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len, case.problem.head_dim) = (5, 300, 72);
    };
    // The second and third query tile have no key.
    let blind = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len, case.problem.head_dim) = (260, 260, 72);
        (case.problem.q_heads, case.problem.kv_heads) = (1, 1);
        let window = OracleTerm::Window { left: 5, right: 0 };
        case.problem.mask = OracleMask::full().and(window).and(OracleTerm::Valid(vec![60]));
    };
    let mut nan = cases().into_iter().find(|case| case.name == "NaN in padding").unwrap();
    nan.problem.head_dim = 72;
    let calls = vec![
        (call(causal), Kernel::Hopper(1), Keys::Whole),
        (call(ragged), Kernel::Hopper(2), Keys::Whole),
        (call(blind), Kernel::Hopper(2), Keys::Whole),
        (Call::new::<bf16>(nan, Dtype::Bf16), Kernel::Hopper(3), Keys::Whole),
    ];
    Planted::attending("hopper", INSTANCE, &BUGS, calls)
}

#[test]
fn a_block_computes_the_items_that_the_host_counts_on() {
    let kernel = kernel();
    // Five query tiles of 128 rows with five to one tiles of 128 keys, for two blocks.
    let call = call(|case| {
        (case.problem.q_len, case.problem.kv_len, case.problem.head_dim) = (640, 640, 128);
        (case.problem.batch, case.problem.q_heads, case.problem.kv_heads) = (1, 1, 1);
        case.problem.mask = OracleMask::causal();
    });
    let busiest = |bugs: &[&Bug], name| {
        let program = planted(&kernel, bugs, name);
        call.judge(&program, Kernel::Hopper(2), Keys::Whole, Timing::Eager).unwrap().busiest
    };
    let tiles_of = |block| -> u32 {
        let items = (0..).map(|round| item_of_round(round, block, 2)).take_while(|item| *item < 5);
        items.map(|item| 5 - item).sum()
    };
    assert_eq!([tiles_of(0), tiles_of(1)], [5 + 2 + 1, 4 + 3]);
    // For each tile both warpgroups have 8 products of queries and keys, and 8 of weights and values.
    let products_of_tile = 2 * (8 + 8);
    assert_eq!(busiest(&[], "none"), 8 * products_of_tile);
    assert_eq!(busiest(&[&SLOWER], "slower"), (5 + 3 + 1) * products_of_tile);
}
