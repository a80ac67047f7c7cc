//! Bugs in the kernel for Hopper.

use half::bf16;
use kyklos::Dtype;
use kyklos_oracle::inputs::{Case, cases};
use kyklos_oracle::oracle::OracleMask;

use super::{Fault, Planted, call, fault};
use crate::call::{Call, Kernel, Keys};

const FILE: &str = "attend_hopper.h";

const FAULTS: [Fault; 28] = [
    fault("queries are not waited for", FILE, "phase_wait(q_full(), taken % 2);", ""),
    fault("queries are overwritten while they are read", FILE, "phase_wait(q_empty(), taken % 2 ^ 1);", ""),
    fault(
        "keys of tested tiles are not waited for",
        FILE,
        "phase_wait(k_full(stage), parity);\n                wgmma_fence();",
        "wgmma_fence();",
    ),
    fault("values of full tiles are not waited for", FILE, "phase_wait(v_full(before), parity);", ""),
    fault("keys are loaded before the last ones were read", FILE, "phase_wait(k_empty(stage), over);", ""),
    fault("values are loaded before the last ones were read", FILE, "phase_wait(v_empty(stage), over);", ""),
    fault(
        "the producer's first wait is for a phase to come",
        FILE,
        "over = step / STAGES % 2 ^ 1",
        "over = step / STAGES % 2",
    ),
    fault("the phase bit of the producer is never flipped", FILE, "over = step / STAGES % 2 ^ 1", "over = 1"),
    fault(
        "values are released before they are read",
        FILE,
        "                    wgmma_wait<0>();\n                    settle(mine.acc);\n                    release(v_empty(before));",
        "                    release(v_empty(before));\n                    wgmma_wait<0>();\n                    settle(mine.acc);",
    ),
    fault(
        "keys are released before they are read",
        FILE,
        "wgmma_wait<0>();\n                settle(scores);\n                release(k_empty(stage));",
        "release(k_empty(stage));\n                wgmma_wait<0>();\n                settle(scores);",
    ),
    fault("scores are not waited for", FILE, "wgmma_wait<1>();", "wgmma_wait<2>();"),
    fault(
        "values are not waited for",
        FILE,
        "wgmma_wait<0>();\n                    settle(mine.acc);\n                    release(v_empty(before));",
        "release(v_empty(before));",
    ),
    fault(
        "no fence before the products of full tiles",
        FILE,
        "named_sync(TURN + consumer, 256);\n                    wgmma_fence();",
        "named_sync(TURN + consumer, 256);",
    ),
    fault("a wrong stride between eight rows", FILE, "u64(1024 >> 4) << 32", "u64(2048 >> 4) << 32"),
    fault(
        "a wrong stride between chunks of values",
        FILE,
        "i * 16 * 128, KV_CHUNK)",
        "i * 16 * 128, KV_CHUNK / 2)",
    ),
    fault("a wrong step along the elements of a row", FILE, "within = i % 4 * 32", "within = i % 4 * 16"),
    fault("nobody has the first turn", FILE, "if (consumer == CONSUMERS - 1) named_arrive(TURN, 256);", ""),
    fault("a turn is left at the end", FILE, "if (consumer == 0) named_sync(TURN, 256);", ""),
    fault(
        "more bytes are expected than come",
        FILE,
        "phase_arrive_expecting(k_full(stage), TILE_BYTES);",
        "phase_arrive_expecting(k_full(stage), TILE_BYTES + 16);",
    ),
    fault(
        "fewer bytes are expected than come",
        FILE,
        "phase_arrive_expecting(v_full(stage), TILE_BYTES);",
        "phase_arrive_expecting(v_full(stage), TILE_BYTES / 2);",
    ),
    fault(
        "a warp says nothing when it has read",
        FILE,
        "phase_init(v_empty(stage), READERS);",
        "phase_init(v_empty(stage), READERS + 1);",
    ),
    fault(
        "each lane says that its warp has read",
        FILE,
        "if (thread_x() % 32 == 0) phase_arrive(phase);",
        "phase_arrive(phase);",
    ),
    fault(
        "what was summed is not scaled in full tiles",
        FILE,
        "release(v_empty(before));\n                    mine.scale_sums(rescale);",
        "release(v_empty(before));",
    ),
    fault(
        "sums are scaled before the values of the tile before",
        FILE,
        "pack(p, scores);\n                }\n                phase_wait",
        "mine.scale_sums(rescale);\n                    pack(p, scores);\n                }\n                phase_wait",
    ),
    fault("the ragged end of full runs is full", FILE, "args.keys / KEYS, tested)", "~0u / KEYS, tested)"),
    fault(
        "hidden values that are NaN are multiplied by 0",
        FILE,
        "if (odd_values(consumer, stage)) {",
        "if (false) {",
    ),
    fault(
        "hidden values that are NaN are not cleared",
        FILE,
        "at < TILE_BYTES; at += 512 * CONSUMERS",
        "at < 0; at += 512 * CONSUMERS",
    ),
    fault("the second warpgroup has the first one's queries", FILE, "consumer * 64 * 128 + within", "within"),
];

const INSTANCE: &str = "#include \"attend_hopper.h\"\n#include \"state.h\"\n\
    KERNEL(hopper_bf16_128, HopperArguments, (Hopper<Bf16, 128, 128>::THREADS)) { Hopper<Bf16, 128, 128>(args).run(); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(finalize_bf16, StateArguments, StateRow::THREADS) { finalize<Bf16>(args); }\n";

pub(super) fn kernel() -> Planted {
    // Six full tiles and some that are tested, for rows of both warpgroups, and a second item for the same block.
    let causal = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len, case.problem.head_dim) = (70, 850, 128);
        (case.problem.q_heads, case.problem.q_offset) = (2, 780);
        case.problem.mask = OracleMask::causal();
        // Large enough for maxima to move.
        case.problem.scale *= 4.0;
    };
    let ragged = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len, case.problem.head_dim) = (5, 300, 72);
    };
    let mut nan = cases().into_iter().find(|case| case.name == "NaN in padding").unwrap();
    nan.problem.head_dim = 72;
    let calls = vec![
        (call(causal), Kernel::Hopper(1), Keys::Whole),
        (call(ragged), Kernel::Hopper(2), Keys::Whole),
        (Call::new::<bf16>(nan, Dtype::Bf16), Kernel::Hopper(3), Keys::Whole),
    ];
    Planted::attending("hopper", INSTANCE, &FAULTS, calls)
}
