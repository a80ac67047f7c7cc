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
const EMPTY: &str = "phase_wait(empty, parity_of(step) ^ 1);";
const UNLESS_KEYS: &str = "if (empty != k_empty(step % STAGES)) phase_wait(empty, parity_of(step) ^ 1);";
const UNLESS_VALUES: &str = "if (empty != v_empty(step % STAGES)) phase_wait(empty, parity_of(step) ^ 1);";

const BUGS: [Bug; 52] = [
    bug("queries are not waited for", FILE, "phase_wait(q_full(), taken % 2);", ""),
    bug("queries are overwritten while they are read", FILE, "phase_wait(q_empty(), taken % 2 ^ 1);", ""),
    bug(
        "keys of the first tile are not waited for",
        FILE,
        "phase_wait(k_full(step % STAGES), parity_of(step));\n                wgmma_fence();",
        "wgmma_fence();",
    ),
    bug(
        "values are not waited for",
        FILE,
        "phase_wait(v_full(step % STAGES), parity_of(step));\n        settle",
        "settle",
    ),
    bug("keys are copied before the previous ones were read", FILE, EMPTY, UNLESS_KEYS),
    bug("values are copied before the previous ones were read", FILE, EMPTY, UNLESS_VALUES),
    bug(
        "the producer's first wait is for a future phase",
        FILE,
        EMPTY,
        "phase_wait(empty, parity_of(step));",
    ),
    bug("the phase bit of the producer is never flipped", FILE, EMPTY, "phase_wait(empty, 1);"),
    bug(
        "values are copied to the stage of the next tile",
        FILE,
        "copy_values(step - 1, tile, at);",
        "copy_values(step, tile, at);",
    ),
    bug(
        "the values of the tile whose keys were just copied",
        FILE,
        "                copy_keys(step, tiles.tile, at);\n",
        "                copy_keys(step, tiles.tile, at);\n                before = named(tiles);\n",
    ),
    bug(
        "the values of the last tile are not copied",
        FILE,
        "            if (first)\n                copy_queries(at, taken);\n            else\n                copy_previous(at);",
        "            if (first) copy_queries(at, taken);",
    ),
    bug(
        "values are released before they are read",
        FILE,
        "wgmma_wait<0>();\n                    settle(mine.O);\n                    release(v_empty((step - 1) % STAGES));",
        "release(v_empty((step - 1) % STAGES));\n                    wgmma_wait<0>();\n                    settle(mine.O);",
    ),
    bug(
        "keys are released before they are read",
        FILE,
        "wgmma_wait<0>();\n                settle(scores);\n                release(k_empty(step % STAGES));",
        "release(k_empty(step % STAGES));\n                wgmma_wait<0>();\n                settle(scores);",
    ),
    bug("scores are not waited for", FILE, "wgmma_wait<1>();", "wgmma_wait<2>();"),
    bug(
        "sums are not waited for",
        FILE,
        "wgmma_wait<0>();\n                    settle(mine.O);\n                    release(v_empty((step - 1) % STAGES));",
        "release(v_empty((step - 1) % STAGES));",
    ),
    bug(
        "no fence before the products in the loop",
        FILE,
        "named_sync(TURN + consumer, 256);\n                    wgmma_fence();",
        "named_sync(TURN + consumer, 256);",
    ),
    bug("a wrong stride between eight rows", COMMON, "u64(1024 >> 4) << 32", "u64(2048 >> 4) << 32"),
    bug(
        "a wrong stride between chunks of values",
        FILE,
        "matrix_at(v + step % STAGES * TILE_BYTES, KV_CHUNK)",
        "matrix_at(v + step % STAGES * TILE_BYTES, KV_CHUNK / 2)",
    ),
    bug("a wrong step along the elements of a row", FILE, "within = i % 4 * 32", "within = i % 4 * 16"),
    bug(
        "a wrong step along the keys of values",
        FILE,
        "right + i * 16 * 128 / 16",
        "right + i * 16 * 64 / 16",
    ),
    bug(
        "no consumer has the first turn",
        FILE,
        "if (consumer == CONSUMERS - 1) named_arrive(TURN, 256);",
        "",
    ),
    bug(
        "a consumer gives its turn to itself",
        FILE,
        "named_arrive(TURN + (consumer + 1) % CONSUMERS",
        "named_arrive(TURN + consumer",
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
    bug("sums are not rescaled", FILE, "mine.scale_sums(corr);", ""),
    bug(
        "sums are rescaled before the values of the previous tile are added",
        FILE,
        "                    settle(scores);\n                    release(k_empty(step % STAGES));",
        "                    settle(scores);\n                    mine.scale_sums(corr);\n                    release(k_empty(step % STAGES));",
    ),
    bug(
        "the incomplete last tile of a full run counts as full",
        FILE,
        "whole(args.keys / keys)",
        "whole(~0u / keys)",
    ),
    bug(
        "mask tests are left out",
        FILE,
        "if (tested) {\n            phase_wait(located",
        "if (false) {\n            phase_wait(located",
    ),
    bug("positions are not waited for", FILE, "phase_wait(located(marked), parity_of(marked));", ""),
    bug(
        "positions of the tile before",
        FILE,
        "const u32 from = positions(marked)",
        "const u32 from = positions(marked + 1)",
    ),
    bug(
        "a marker leaves out its last keys",
        FILE,
        "key < Bc; key += 32 * MARKERS",
        "key < 32 * MARKERS; key += 32 * MARKERS",
    ),
    bug("the markers are not told of the end", FILE, "        request_marks(marked, NO_MORE, 0);\n", ""),
    bug(
        "the end replaces a request that was not read",
        FILE,
        "phase_wait(checked(marked), parity_of(marked) ^ 1);",
        "",
    ),
    bug(
        "a key behind the first visible ones counts",
        "rows.h",
        "pair[i % 2] >= spans[i / 2].hi",
        "pair[i % 2] > spans[i / 2].hi",
    ),
    bug(
        "keys before the first visible one count",
        "rows.h",
        "if (vote(spans[0].lo != 0 || spans[1].lo != 0))",
        "if (false)",
    ),
    bug(
        "values are checked before they are there",
        FILE,
        "            phase_wait(v_full(step % STAGES), parity_of(step));\n            const u32 values",
        "            const u32 values",
    ),
    bug(
        "the verdict on values is not waited for",
        FILE,
        "phase_wait(checked(n), parity_of(n));\n        u32 odd",
        "u32 odd",
    ),
    bug(
        "only one marker's verdict counts",
        FILE,
        "marker < MARKERS; marker++) odd |=",
        "marker < 1; marker++) odd |=",
    ),
    bug("hidden values that are NaN are multiplied by 0", FILE, "if (!warp_uniform(odd)) return;", "return;"),
    bug(
        "hidden values that are NaN are not cleared",
        COMMON,
        "at < bytes; at += 512 * consumers",
        "at < 0; at += 512 * consumers",
    ),
    bug(
        "an item without keys gets no queries",
        FILE,
        "            if (first)\n                copy_queries(at, taken);\n            else\n                copy_previous(at);",
        "            if (!first) copy_previous(at);",
    ),
    bug(
        "results of the columns of another lane",
        "rows.h",
        "(row * args.dim + lane % 4 * 2) / 2",
        "row * args.dim / 2",
    ),
    bug("results behind the last element", "rows.h", "if (u32(8 * j) < args.dim) into", "into"),
    bug(
        "results behind the last row",
        "rows.h",
        "            if (!there(half)) continue;\n            const Entry entry(m[half], l[half], Anchor::off(m[half]), EMPTY_M",
        "            const Entry entry(m[half], l[half], Anchor::off(m[half]), EMPTY_M",
    ),
    bug("results without sinks", FILE, "more.lse, more.sinks)", "more.lse, nullptr)"),
    bug("a sink of another head", "rows.h", "sinks + rows[half].head", "sinks"),
    bug(
        "results of sums of one lane",
        "rows.h",
        "    DEVICE void finish(const At &at, void *o, float *lse, const float *sinks) {\n        add_lanes();",
        "    DEVICE void finish(const At &at, void *o, float *lse, const float *sinks) {",
    ),
    bug("a row without keys is divided by 0", "logits.h", "return nothing ? 0.0f :", "return"),
    bug("the second warpgroup has the first one's queries", FILE, "q + consumer * 64 * 128", "q"),
];

/// A change that gives the same results more slowly. The counters must show it.
const SLOWER: Bug = bug(
    "each round begins with the first block",
    FILE,
    "round % 2 ? grid_x() - 1 - block_x() : block_x()",
    "block_x()",
);

const INSTANCE: &str = "#include \"attend_hopper.h\"\n#include \"state.h\"\n\
    KERNEL(hopper_bf16_128, HopperArguments, (Hopper<Bf16, 128, 128, 2>::THREADS)) { Hopper<Bf16, 128, 128, 2>(args).run(); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(finalize_bf16, StateArguments, StateRow::THREADS) { finalize<Bf16>(args); }\n";

pub(super) fn kernel() -> Planted {
    // Six full tiles and some with mask tests, for rows of both consumers, and a second item for the
    // same block.
    let causal = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len, case.problem.head_dim) = (70, 890, 128);
        (case.problem.q_heads, case.problem.q_offset) = (2, 820);
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
    // Each item has three tiles, all with mask tests.
    let diagonal = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len, case.problem.head_dim) = (128, 384, 128);
        (case.problem.q_heads, case.problem.q_offset) = (3, 128);
        case.problem.mask = OracleMask::full().and(OracleTerm::Window { left: 120, right: 120 });
    };
    let sinks = |case: &mut Case| {
        ragged(case);
        case.problem.sinks = vec![0.5, -1.0, 2.0];
    };
    // One item with as many tiles as there are stages, all with mask tests.
    let two = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len, case.problem.head_dim) = (60, 200, 72);
        (case.problem.q_heads, case.problem.q_offset) = (1, 140);
        case.problem.mask = OracleMask::full().and(OracleTerm::Window { left: 100, right: 0 });
    };
    let mut nan = cases().into_iter().find(|case| case.name == "NaN in padding").unwrap();
    nan.problem.head_dim = 72;
    // A seed chooses the warp that is far behind the others.
    let seeded = |change: fn(&mut Case)| {
        (1..=4).map(move |seed| {
            let late = call(|case| {
                change(case);
                case.seed = seed;
            });
            (late, Kernel::Hopper(1), Keys::Whole)
        })
    };
    let calls = vec![
        (call(causal), Kernel::Hopper(1), Keys::Whole),
        (call(ragged), Kernel::Hopper(2), Keys::Whole),
        (call(ragged), Kernel::Hopper(2), Keys::Finished),
        (call(blind), Kernel::Hopper(2), Keys::Whole),
        (call(blind), Kernel::Hopper(1), Keys::Finished),
        (call(sinks), Kernel::Hopper(1), Keys::Finished),
        (call(diagonal), Kernel::Hopper(1), Keys::Whole),
        (Call::new::<bf16>(nan, Dtype::Bf16), Kernel::Hopper(3), Keys::Whole),
    ];
    let calls = calls.into_iter().chain(seeded(causal)).chain(seeded(diagonal)).chain(seeded(two)).collect();
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
