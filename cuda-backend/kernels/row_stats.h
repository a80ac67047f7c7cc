// The log-sum-exp, e^-rest, delta = sum of d_o * o, minus d_lse, and the rest of each row; and zeros for sums of gradients.
#pragma once
#include "logits.h"

static constexpr int ROW_STATS_THREADS = 256, CLEAR_THREADS = 256;

// One warp for each row of a head. A row that saw no key gets (-EMPTY_M, 1, 0, 0), whatever its gradients are.
template <typename T> DEVICE void row_stats(const RowStatsArguments &args) {
    const u64 row = u64(block_x()) * (ROW_STATS_THREADS / 32) + thread_x() / 32;
    if (row >= args.rows) return;
    const u32 lane = thread_x() % 32;
    float delta = 0.0f;
    for (u32 d = lane; d < args.dim; d += 32)
        delta = fused(element<T>(args.d_o, row * args.dim + d), element<T>(args.o, row * args.dim + d), delta);
    for (u32 apart = 16; apart; apart /= 2) delta += shuffle_xor(delta, apart);
    if (lane != 0) return;
    const float lse = args.lse[2 * row], rest = args.lse[2 * row + 1];
    if (args.d_lse) delta -= args.d_lse[row];
    const bool dead = lse == -INFINITE;
    const Four seen{{lse, exp_fast(-rest), delta, rest}}, unseen{{-EMPTY_M, 1.0f, 0.0f, 0.0f}};
    four_at(args.stats + 4 * row) = dead ? unseen : seen;
}

DEVICE void clear(const ClearArguments &args) {
    const u64 step = u64(grid_x()) * CLEAR_THREADS;
    for (u64 n = u64(block_x()) * CLEAR_THREADS + thread_x(); n < args.count; n += step) args.words[n] = 0;
}
